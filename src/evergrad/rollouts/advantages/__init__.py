"""How much better than expected a rollout, or a turn of one, did. A new estimator is one file and one line here.

Most compare a rollout with its group; some do so turn by turn (``Estimator.by_turn``). What compares with the whole batch says
so in ``Estimator.of_batch``, and is applied when the batch is cut.
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
from evergrad.rollouts.advantages.per_turn import compared_by_turn
from evergrad.rollouts.advantages.reinforce_pp import reward_itself, whitened
from evergrad.types import EvergradError

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "GaeConfig",
    "OverlongConfig",
    "estimate",
    "estimate_turns",
    "generalized_advantages",
    "uniform",
    "whitened",
]

ESTIMATORS: dict[str, Estimator] = {
    "group_mean": Estimator(group_mean),
    "group_normalized": Estimator(group_normalized),
    "leave_one_out": Estimator(leave_one_out),
    "turn_mean": Estimator(group_mean, by_turn=True),
    "turn_normalized": Estimator(group_normalized, by_turn=True),
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
    estimator = _named(name)
    for number, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise EvergradError(f"reward {number} of {len(rewards)} is {reward}", hint="a verifier must give a finite number")
    advantages = estimator.of_group(rewards)
    if len(advantages) != len(rewards) or not all(math.isfinite(each) for each in advantages):
        raise EvergradError(f"estimator '{name}' did not give one finite advantage for each of {len(rewards)} rewards")
    return advantages


def estimate_turns(name: str, rewards: Sequence[Sequence[float]], discount: float = 1.0) -> list[list[float]]:
    """One number per turn of a group's trainable rollouts; the same for all turns of a rollout, unless the estimator compares
    turn by turn.

    Args:
        name: Of the estimator.
        rewards: Of each rollout, what each of its turns earned.
        discount: γ, a turn; read by estimators that compare turn by turn.

    Raises:
        EvergradError: as :func:`estimate`.
    """
    for number, of_turns in enumerate(rewards):
        for turn, reward in enumerate(of_turns, 1):
            if not math.isfinite(reward):
                hint = "a verifier must give a finite number"
                raise EvergradError(f"reward {number} of {len(rewards)} is {reward}, in turn {turn}", hint=hint)
    if _named(name).by_turn:
        return compared_by_turn(lambda returns: estimate(name, returns), rewards, discount)
    advantages = estimate(name, [math.fsum(each) for each in rewards])
    return [[advantage] * len(each) for advantage, each in zip(advantages, rewards, strict=True)]


def _named(name: str) -> Estimator:
    if name not in ESTIMATORS:
        raise EvergradError(f"no advantage estimator '{name}'", hint=nearest(name, ESTIMATORS))
    return ESTIMATORS[name]
