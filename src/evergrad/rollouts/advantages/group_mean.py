"""Reward minus the group's mean; the default."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from evergrad.rollouts.advantages._spread import uniform


def group_mean(rewards: Sequence[float]) -> list[float]:
    """Exact zeros when all rewards agree up to rounding.

    >>> group_mean([1.0, 0.0, 0.0, 1.0])
    [0.5, -0.5, -0.5, 0.5]
    """
    if uniform(rewards):
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
