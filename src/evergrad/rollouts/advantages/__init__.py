"""How much better than its group a rollout did. A new estimator is one file and one line here.

An estimator sees one group. What needs the whole batch, as the standard deviation over all groups that REINFORCE++ divides by,
is left out on purpose: groups are accepted, replaced and aged one by one before there is a batch, and under AdamW one common
factor changes nothing that the learning rate does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from evergrad.config import nearest
from evergrad.rollouts.advantages._spread import uniform
from evergrad.rollouts.advantages.constant import constant
from evergrad.rollouts.advantages.generalized import generalized_advantages
from evergrad.rollouts.advantages.group_mean import group_mean
from evergrad.rollouts.advantages.group_normalized import group_normalized
from evergrad.rollouts.advantages.leave_one_out import leave_one_out
from evergrad.rollouts.advantages.overlong import overlong_penalty
from evergrad.types import EvergradError

__all__ = ["ESTIMATORS", "estimate", "generalized_advantages", "overlong_penalty", "uniform"]

ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group_mean": group_mean,
    "group_normalized": group_normalized,
    "leave_one_out": leave_one_out,
    "constant": constant,
}


def estimate(name: str, rewards: Sequence[float]) -> list[float]:
    """One advantage per reward of a group's trainable rollouts.

    Raises:
        EvergradError: unknown estimator, a reward that is not finite, or the estimator gave something that is not one finite
            number per reward.
    """
    if name not in ESTIMATORS:
        raise EvergradError(f"no advantage estimator '{name}'", hint=nearest(name, ESTIMATORS))
    for number, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise EvergradError(f"reward {number} of {len(rewards)} is {reward}", hint="a verifier must give a finite number")
    advantages = ESTIMATORS[name](rewards)
    if len(advantages) != len(rewards) or not all(math.isfinite(each) for each in advantages):
        raise EvergradError(f"estimator '{name}' did not give one finite advantage for each of {len(rewards)} rewards")
    return advantages
