"""How much better than expected a rollout did. A new estimator is one file and one line here.

Most compare a rollout with its group; what compares it with the whole batch says so in ``Estimator.of_batch``, and is applied
when the batch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evergrad.config import nearest
from evergrad.rollouts.advantages._estimator import Estimator
from evergrad.rollouts.advantages._spread import uniform
from evergrad.rollouts.advantages.constant import constant
from evergrad.rollouts.advantages.generalized import GaeConfig, generalized_advantages
from evergrad.rollouts.advantages.group_mean import group_mean
from evergrad.rollouts.advantages.group_normalized import group_normalized
from evergrad.rollouts.advantages.leave_one_out import leave_one_out
from evergrad.rollouts.advantages.overlong import OverlongConfig
from evergrad.rollouts.advantages.reinforce_pp import reward_itself, whitened
from evergrad.types import EvergradError

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "GaeConfig",
    "OverlongConfig",
    "estimate",
    "generalized_advantages",
    "uniform",
    "whitened",
]

ESTIMATORS: dict[str, Estimator] = {
    "group_mean": Estimator(group_mean),
    "group_normalized": Estimator(group_normalized),
    "leave_one_out": Estimator(leave_one_out),
    "reinforce_pp": Estimator(reward_itself, of_batch=whitened, least_group=1),
    "reinforce_pp_baseline": Estimator(group_mean, of_batch=whitened),
    "generalized": Estimator(reward_itself, least_group=1, needs_critic=True),
    "constant": Estimator(constant, least_group=1, reads_rewards=False),
}


def estimate(name: str, rewards: Sequence[float]) -> list[float]:
    """One number per reward of a group's trainable rollouts: the advantages, as far as they come from the group.

    Raises:
        EvergradError: unknown estimator, a reward that is not finite, or the estimator gave something that is not one finite
            number per reward.
    """
    if name not in ESTIMATORS:
        raise EvergradError(f"no advantage estimator '{name}'", hint=nearest(name, ESTIMATORS))
    for number, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise EvergradError(f"reward {number} of {len(rewards)} is {reward}", hint="a verifier must give a finite number")
    advantages = ESTIMATORS[name].of_group(rewards)
    if len(advantages) != len(rewards) or not all(math.isfinite(each) for each in advantages):
        raise EvergradError(f"estimator '{name}' did not give one finite advantage for each of {len(rewards)} rewards")
    return advantages
