"""DPPO with the KL divergence of the sampled token against all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from evergrad.training.losses.base import TokenTensors
from evergrad.training.losses.dppo_tv import Dppo

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_REST = 1e-7
"""Of a token that is all but certain, the rest is lost to rounding; bounds its logarithm."""


class DppoKl(Dppo):
    """``−m · r · A`` with ``m = 0`` where π moved along A and ``μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π)) > threshold``."""

    threshold: float = Field(default=0.05, gt=0)
    """Nats."""

    def divergence(self, tokens: TokenTensors) -> Tensor:
        new, old = tokens.logprobs.detach(), tokens.behaviour_logprobs
        rest_new, rest_old = (-each.expm1() for each in (new, old))
        rest_new, rest_old = rest_new.clamp(min=_LEAST_REST), rest_old.clamp(min=_LEAST_REST)
        return old.exp() * (old - new) + rest_old * (rest_old.log() - rest_new.log())
