"""Supervised fine-tuning: make the demonstrated tokens likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evergrad.training.losses.base import Loss, TokenTensors

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy(Loss):
    """``−weight · log π(token)``; the weights are the samples' advantages, 1 for plain fine-tuning."""

    def __call__(self, tokens: TokenTensors) -> Tensor:
        return -tokens.advantages * tokens.logprobs
