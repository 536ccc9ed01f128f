"""PPO's clipped surrogate, and the parent of the losses that differ from it by what they divide by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from evergrad.training.losses.base import TokenTensors
from evergrad.training.losses.policy import PolicyLoss, ratio

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(PolicyLoss):
    """``−min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A)``, at most ``−dual_clip · A`` where A < 0.

    Schulman et al. 2017 (arXiv 1707.06347); the dual clip is of Ye et al. 2019 (arXiv 1912.09729). Advantages may differ from
    token to token, as those of ``generalized_advantages`` do. Normalized per token it is BNPO.
    """

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """A token that lost gets no further push below ``1 − clip_low`` times its old probability."""
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    """A token that won gets no further push above ``1 + clip_high`` times its old probability."""
    dual_clip: float | None = Field(default=None, le=1e6)
    """Largest ratio that pushes a token down; without it, a token that became likely may push without bound."""

    @model_validator(mode="after")
    def _outer_clip_is_outside(self) -> Ppo:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip {self.dual_clip:g} lies inside the clip; set it above 1 + clip_high = {1 + self.clip_high:g}"
            )
        return self

    def surrogate(self, tokens: TokenTensors, log_ratio: Tensor) -> Tensor:
        import torch

        ratios = ratio(self.level(tokens, log_ratio))
        inside = ratios.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantages
        if self.dual_clip is not None:
            ratios = ratios.clamp(max=self.dual_clip)
        return -torch.min(ratios * tokens.advantages, inside)

    def level(self, tokens: TokenTensors, log_ratio: Tensor) -> Tensor:
        """The log-ratio that is clipped, [tokens]: each token's own."""
        return log_ratio

    def clipped(self, tokens: TokenTensors) -> Tensor:
        ratios = ratio(self.level(tokens, self.log_ratio(tokens).detach()))
        won, lost = tokens.advantages > 0, tokens.advantages < 0
        return ((ratios > 1 + self.clip_high) & won) | ((ratios < 1 - self.clip_low) & lost)
