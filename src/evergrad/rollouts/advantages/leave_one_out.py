"""Reward minus the mean of the others' rewards."""

from __future__ import annotations

from collections.abc import Sequence

from evergrad.rollouts.advantages.group_mean import group_mean


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """RLOO (Kool et al. 2019; arXiv 2402.14740): ``r_i − mean_{j≠i} r_j``, which is ``n/(n − 1)`` times ``group_mean``.

    A baseline that a reward is no part of takes no bias into the gradient. Zero for a group of one.

    >>> leave_one_out([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    n = len(rewards)
    return [advantage * n / (n - 1) for advantage in group_mean(rewards)] if n > 1 else [0.0] * n
