"""Policy gradient anchored at the behaviour policy, with truncated importance weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from evergrad.training.losses.base import Loss, TokenTensors

if TYPE_CHECKING:
    from torch import Tensor


class PolicyGradient(Loss):
    """``−min(π/μ, ratio_cap) · A · log π``, the weight taken as a constant.

    μ is the policy that sampled the token, so tokens that are some updates old are corrected for, and a numerical difference
    between engine and trainer is as well. Truncation from above bounds the variance and leaves the sign alone (Ionides 2008,
    "Truncated Importance Sampling"; used on tokens by CISPO, arXiv 2506.13585, and others).
    """

    needs_advantage: ClassVar[bool] = True
    ratio_cap: float = Field(default=2.0, gt=0, le=1e6)
    """Largest importance weight."""

    def __call__(self, tokens: TokenTensors) -> Tensor:
        ratio = (tokens.logprobs.detach() - tokens.behaviour_logprobs).exp()
        return -ratio.clamp(max=self.ratio_cap) * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: TokenTensors) -> Tensor:
        return tokens.logprobs.detach() - tokens.behaviour_logprobs > math.log(self.ratio_cap)
