"""How much better than its group a rollout did. A new estimator is one file and one line here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from evergrad.config import nearest
from evergrad.rollouts.advantages._spread import uniform
from evergrad.rollouts.advantages.constant import constant
from evergrad.rollouts.advantages.group_mean import group_mean
from evergrad.rollouts.advantages.group_normalized import group_normalized
from evergrad.types import EvergradError

__all__ = ["ESTIMATORS", "estimate", "uniform"]

ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group_mean": group_mean,
    "group_normalized": group_normalized,
    "constant": constant,
}


def estimate(name: str, rewards: Sequence[float]) -> list[float]:
    """One advantage per reward of a group's trainable rollouts.

    Raises:
        EvergradError: unknown estimator, or it gave something that is not one finite number per reward.
    """
    if name not in ESTIMATORS:
        raise EvergradError(f"no advantage estimator '{name}'", hint=nearest(name, ESTIMATORS))
    advantages = ESTIMATORS[name](rewards)
    if len(advantages) != len(rewards) or not all(math.isfinite(each) for each in advantages):
        raise EvergradError(f"estimator '{name}' did not give one finite advantage for each of {len(rewards)} rewards")
    return advantages
