"""Policy gradient with truncated importance weights; the default."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from evergrad.training.losses.base import TokenTensors
from evergrad.training.losses.policy import PolicyLoss, ratio

if TYPE_CHECKING:
    from torch import Tensor


class PolicyGradient(PolicyLoss):
    """``−min(π/μ, ratio_cap) · A · log π``, the weight taken as a constant.

    μ is the policy that sampled the token, so tokens that are some updates old are corrected for, and a numerical difference
    between engine and trainer is as well. Truncation from above bounds the variance and leaves the sign alone (Ionides 2008,
    "Truncated Importance Sampling"). With advantages ``leave_one_out`` this is RLOO (arXiv 2402.14740).
    """

    ratio_cap: float = Field(default=2.0, gt=0, le=1e6)
    """Largest importance weight."""

    def surrogate(self, tokens: TokenTensors, log_ratio: Tensor) -> Tensor:
        return -ratio(log_ratio.detach()).clamp(max=self.ratio_cap) * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: TokenTensors) -> Tensor:
        return self.log_ratio(tokens).detach() > math.log(self.ratio_cap)
