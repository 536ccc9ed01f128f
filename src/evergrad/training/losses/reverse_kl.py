"""On-policy distillation: a teacher grades each token that the student sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from evergrad.training.losses.base import Loss, TokenTensors
from evergrad.training.losses.policy import ratio

if TYPE_CHECKING:
    from torch import Tensor


class ReverseKl(Loss):
    """``min(π/μ, ratio_cap) · (log π − log π_T)² / 2``, the weight taken as a constant.

    Its gradient is ``−w · (log π_T − log π) · ∇ log π``: the policy gradient whose advantage is how much likelier the teacher
    π_T finds each token, with no look ahead (Thinking Machines 2025, "On-Policy Distillation"). On fresh tokens that is the
    gradient of ``KL(π ‖ π_T)``. Rewards play no part.
    """

    needs_advantage: ClassVar[bool] = False
    needs_behaviour: ClassVar[bool] = True
    teacher: ClassVar[bool] = True
    ratio_cap: float = Field(default=2.0, gt=0, le=1e6)
    """Largest importance weight."""

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def corrects_staleness(self) -> bool:
        return True

    def __call__(self, tokens: TokenTensors) -> Tensor:
        assert tokens.reference_logprobs is not None
        weight = ratio(tokens.logprobs.detach() - tokens.behaviour_logprobs).clamp(max=self.ratio_cap)
        return weight * (tokens.logprobs - tokens.reference_logprobs).square() / 2

    def figures(self, tokens: TokenTensors) -> Mapping[str, Tensor]:
        assert tokens.reference_logprobs is not None
        log_ratio = tokens.logprobs - tokens.behaviour_logprobs
        return {
            "clipped_share": log_ratio > math.log(self.ratio_cap),
            "teacher_kl": tokens.logprobs - tokens.reference_logprobs,
        }
