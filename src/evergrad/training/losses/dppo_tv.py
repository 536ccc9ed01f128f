"""DPPO with total variation: tokens leave the gradient when their probability, not their ratio, has moved far."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from evergrad.training.losses.base import TokenTensors
from evergrad.training.losses.policy import PolicyLoss, ratio

if TYPE_CHECKING:
    from torch import Tensor


class Dppo(PolicyLoss):
    """``−m · r · A``: m is 0 where the policy has moved more than ``threshold`` from μ in the direction that A pushes, else 1.

    A ratio clip stops rare tokens for nothing and common ones too late; a divergence measures what the sampled token says of
    the distance between two distributions (Qi et al. 2026, arXiv 2602.04879).
    """

    anchor: Literal["behaviour"] = "behaviour"
    """The region of trust is around the policy that sampled."""
    threshold: float = Field(gt=0)
    """Largest divergence that may still grow."""

    @abstractmethod
    def divergence(self, tokens: TokenTensors) -> Tensor:
        """Distance of π from μ as far as the sampled token shows it, [tokens], without gradient, never negative."""

    def surrogate(self, tokens: TokenTensors, log_ratio: Tensor) -> Tensor:
        return -ratio(log_ratio) * tokens.advantages * ~self.clipped(tokens)

    def clipped(self, tokens: TokenTensors) -> Tensor:
        away = (tokens.logprobs.detach() - tokens.behaviour_logprobs) * tokens.advantages > 0
        return away & (self.divergence(tokens) > self.threshold)


class DppoTv(Dppo):
    """``−m · r · A`` with ``m = 0`` where ``(π − μ) · sign A > threshold``: prime-rl's default without its penalty."""

    threshold: float = Field(default=0.2, gt=0, lt=1)
    """Largest change of a token's probability that may still grow."""

    def divergence(self, tokens: TokenTensors) -> Tensor:
        return (tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()).abs()
