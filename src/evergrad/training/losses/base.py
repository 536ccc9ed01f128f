"""What a loss is given and what it gives back."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from evergrad.config import Config

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenTensors:
    """The trained tokens of one micro-batch, flat; all [tokens], aligned."""

    logprobs: Tensor
    """Of the current policy, under the temperature each token was sampled at; carries the gradient."""
    behaviour_logprobs: Tensor
    """Of the policy that sampled the token."""
    advantages: Tensor


class Loss(Config):
    """A frozen configuration that can be called; its fields are the loss's options."""

    needs_advantage: ClassVar[bool]
    """True for losses of sampled tokens: one whose advantage is 0 has no gradient and is not computed (but stays in the
    denominator), and the others are compared with the policy that sampled them."""

    @abstractmethod
    def __call__(self, tokens: TokenTensors) -> Tensor:
        """The loss of each token, [tokens]."""

    def clipped(self, tokens: TokenTensors) -> Tensor:
        """Which tokens were kept from having their full weight, [tokens] bool; none by default."""
        return tokens.advantages.new_zeros(tokens.advantages.shape).bool()
