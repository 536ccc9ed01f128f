"""Losses: plain per-token math, one file each, one line below each.

A loss sees every trained token of the batch in one flat row and returns one number per token; the trainer adds them up and
divides by the batch's ``num_valid_tokens``, however the batch was cut. Nothing here imports torch, so that a configuration
is checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from evergrad.config import nearest
from evergrad.training.losses.base import Loss, TokenTensors
from evergrad.training.losses.cross_entropy import CrossEntropy
from evergrad.training.losses.policy_gradient import PolicyGradient

__all__ = ["LOSSES", "Loss", "TokenTensors", "build_loss"]

LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "policy_gradient": PolicyGradient,
}


def build_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """The loss of that name.

    Raises:
        ValueError: no such loss or option (with the nearest), or a value that does not fit.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss '{name}': {nearest(name, LOSSES)}")
    loss = LOSSES[name]
    for option in options:
        if option not in loss.model_fields:
            valid = nearest(option, loss.model_fields) if loss.model_fields else "it has none"
            raise ValueError(f"unknown option '{option}' of loss '{name}': {valid}")
    try:
        return loss.model_validate(dict(options))
    except ValidationError as error:
        raise ValueError(f"loss '{name}': {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from error
