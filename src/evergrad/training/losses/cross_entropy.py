"""Supervised fine-tuning: make the demonstrated tokens likely."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from evergrad.training.losses.base import Loss, TokenTensors

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy(Loss):
    """``−log π(token)``; advantages play no part."""

    needs_advantage: ClassVar[bool] = False

    def __call__(self, tokens: TokenTensors) -> Tensor:
        return -tokens.logprobs
