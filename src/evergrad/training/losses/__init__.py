"""Losses: plain math on flat tensors, one file each, one line below each.

A loss sees every trained token of a micro-batch in one flat row and returns its part of the batch's loss, which it divides by
what the whole batch holds, however the batch was cut. Nothing here imports torch before it is called, so that a configuration
is checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evergrad.config import ConfigError, nearest, parse_config
from evergrad.training.losses.base import Loss, TokenTensors, Totals
from evergrad.training.losses.cispo import Cispo
from evergrad.training.losses.cross_entropy import CrossEntropy
from evergrad.training.losses.dapo import Dapo
from evergrad.training.losses.decoupled_ppo import DecoupledPpo
from evergrad.training.losses.dpo import Dpo
from evergrad.training.losses.dppo_kl import DppoKl
from evergrad.training.losses.dppo_tv import DppoTv
from evergrad.training.losses.dr_grpo import DrGrpo
from evergrad.training.losses.grpo import Grpo
from evergrad.training.losses.gspo import Gspo
from evergrad.training.losses.ipo import Ipo
from evergrad.training.losses.policy_gradient import PolicyGradient
from evergrad.training.losses.ppo import Ppo
from evergrad.training.losses.reverse_kl import ReverseKl
from evergrad.training.losses.simpo import SimPo

__all__ = ["LOSSES", "Loss", "TokenTensors", "Totals", "build_loss"]

LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "policy_gradient": PolicyGradient,
    "ppo": Ppo,
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "dppo_tv": DppoTv,
    "dppo_kl": DppoKl,
    "decoupled_ppo": DecoupledPpo,
    "dpo": Dpo,
    "ipo": Ipo,
    "simpo": SimPo,
    "reverse_kl": ReverseKl,
}


def build_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """The loss of that name.

    Raises:
        ValueError: no such loss or option (with the nearest), a value that does not fit, or options that contradict each
            other (with the reason, and what to set instead).
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss '{name}': {nearest(name, LOSSES)}")
    loss = LOSSES[name]
    if options and not loss.model_fields:
        raise ValueError(f"unknown option '{next(iter(options))}' of loss '{name}': it has none")
    try:
        return parse_config(loss, options, where=f"options of loss '{name}'")
    except ConfigError as error:
        raise ValueError(str(error)) from error
