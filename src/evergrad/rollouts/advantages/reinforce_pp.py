"""REINFORCE++: the baseline and the scale come from the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt

from evergrad.rollouts.advantages._spread import uniform


def reward_itself(rewards: Sequence[float]) -> list[float]:
    """
    >>> reward_itself([1.0, 0.0])
    [1.0, 0.0]
    """
    return list(rewards)


def whitened(values: Sequence[float]) -> list[float]:
    """``(A − mean) / std`` over all trained tokens of the batch (Hu et al. 2025, arXiv 2501.03262).

    Of raw rewards that is REINFORCE++, which needs no second rollout of a task; of rewards less their group's mean it is
    REINFORCE++-baseline, which is for several. A token counts once, so a long rollout weighs more in mean and deviation. Exact
    zeros when all values agree up to rounding.

    >>> whitened([1.0, 1.0, 0.0, 0.0])
    [1.0, 1.0, -1.0, -1.0]
    """
    if uniform(values):
        return [0.0] * len(values)
    mean = fsum(values) / len(values)
    deviation = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / deviation for value in values]
