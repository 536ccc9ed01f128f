"""GSPO: the ratio of a whole answer instead of its tokens'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from evergrad.training.losses.base import TokenTensors
from evergrad.training.losses.ppo import Ppo

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Ppo):
    """``1/G Σ_i −min(s_i · A_i, clip(s_i) · A_i)`` with ``s_i = exp(mean_t log r_t)`` (Qwen3, arXiv 2507.18071).

    An answer is clipped as a whole, so the bounds are much closer to 1 than a token's.
    """

    normalization: Literal["rollout"] = "rollout"
    """There is one ratio per rollout, so tokens have no weight of their own."""
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """An answer that lost gets no further push below ``s = 1 − clip_low``."""
    clip_high: float = Field(default=4e-4, gt=0, le=1e6)
    """An answer that won gets no further push above ``s = 1 + clip_high``."""

    @property
    def whole_rollouts(self) -> bool:
        return True

    def level(self, tokens: TokenTensors, log_ratio: Tensor) -> Tensor:
        return (tokens.rollout_sums(log_ratio) / tokens.lengths).index_select(0, tokens.rollout)
