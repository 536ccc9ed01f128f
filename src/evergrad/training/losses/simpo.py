"""SimPO: preferences without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from evergrad.training.losses.base import TokenTensors
from evergrad.training.losses.pairs import PairLoss

if TYPE_CHECKING:
    from torch import Tensor


class SimPo(PairLoss):
    """``−log σ(β Δ − γ)`` with ``Δ`` the difference of mean log π per token (Meng et al. 2024, arXiv 2405.14734)."""

    beta: float = Field(default=2.0, gt=0)
    """How much the margin says."""
    gamma: float = Field(default=1.0, ge=0)
    """By how much ``β Δ`` should exceed 0."""

    def scores(self, tokens: TokenTensors) -> Tensor:
        return tokens.rollout_sums(tokens.logprobs) / tokens.lengths

    def preference(self, margin: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.beta * margin - self.gamma)
