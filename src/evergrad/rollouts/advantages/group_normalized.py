"""Reward minus the group's mean, over its standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt

from evergrad.rollouts.advantages._spread import uniform


def group_normalized(rewards: Sequence[float]) -> list[float]:
    """At most ``sqrt(n)`` in size for a group of ``n``; exact zeros when all rewards agree up to rounding.

    >>> group_normalized([1.0, 0.0, 0.0, 1.0])
    [1.0, -1.0, -1.0, 1.0]
    """
    if uniform(rewards):
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    deviation = sqrt(fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / deviation for reward in rewards]
