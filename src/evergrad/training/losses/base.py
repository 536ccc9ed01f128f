"""What a loss is given and what it gives back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from evergrad.config import Config

if TYPE_CHECKING:
    from torch import Tensor

Unit = Literal["token", "pair"]

MAX_LOG_RATIO = 20.0
"""Bounds what one absurd token does to a sum: a ratio of 5e8 is past anything that a correction can mend."""


@dataclass(frozen=True, slots=True)
class TokenTensors:
    """The trained tokens of one micro-batch, flat; [tokens], aligned, unless it says otherwise."""

    logprobs: Tensor
    """Of the current policy, under the temperature each token was sampled at; carries the gradient."""
    behaviour_logprobs: Tensor
    """Of the policy that sampled the token."""
    advantages: Tensor
    rollout: Tensor
    """int64: index of the token's rollout in this micro-batch. All samples of a rollout are in one micro-batch if the loss says
    ``whole_rollouts``; otherwise a rollout may have tokens in several."""
    lengths: Tensor
    """[rollouts] valid positions of each rollout in the whole batch, those without a gradient included."""
    group: Tensor
    """[rollouts] int64, from 0: rollouts with the same number belong together."""
    reference_logprobs: Tensor | None = None
    """Of a frozen reference or of a teacher; there when the loss needs it."""
    proximal_logprobs: Tensor | None = None
    """Of the policy before the first update on this batch; None while that is the current policy."""
    entropies: Tensor | None = None
    """Nats, of the whole next-token distribution under the same temperature; carry gradients; there when the loss needs it."""

    @property
    def num_rollouts(self) -> int:
        return len(self.lengths)

    @property
    def proximal(self) -> Tensor:
        """Log-probabilities of the proximal policy, without gradient."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs

    def rollout_sums(self, values: Tensor) -> Tensor:
        """[tokens] → [rollouts]"""
        import torch

        # Not index_add: also on a GPU, where its order of addition is free, a rollout's sum is then the same every time.
        counts = torch.bincount(self.rollout, minlength=self.num_rollouts)
        return torch.segment_reduce(values.index_select(0, self.rollout.argsort(stable=True)), "sum", lengths=counts)


@dataclass(frozen=True, slots=True)
class Totals:
    """How much there is of each unit in the whole optimizer step, however it is cut; what a loss divides by."""

    tokens: int
    rollouts: int
    """A rollout that was cut into several samples is one; of preference pairs, each answer is one."""

    def of(self, unit: Unit) -> int:
        return self.tokens if unit == "token" else self.rollouts // 2


class Loss(Config):
    """A frozen configuration that can be called; its fields are the loss's options."""

    unit: ClassVar[Unit] = "token"
    """What there is one number for; ``pair`` keeps the two answers of a group in one micro-batch."""
    needs_advantage: ClassVar[bool] = True
    """Whether advantages (weights, signs) are read; then they must be finite."""
    needs_behaviour: ClassVar[bool] = False
    """True for losses of sampled tokens, which are compared with the policy that sampled them."""
    teacher: ClassVar[bool] = False
    """The reference is another model: its log-probabilities come with the samples, and nothing here could compute them."""

    @property
    def silent_at_zero(self) -> bool:
        """Whether a token with advantage 0 has no gradient: it is then not computed, but stays in the denominator."""
        return self.needs_advantage

    @property
    def whole_rollouts(self) -> bool:
        """Whether a token's loss depends on the others of its rollout: all of them are then computed, together, if any is."""
        return self.unit != "token"

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def needs_proximal(self) -> bool:
        return False

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def corrects_staleness(self) -> bool:
        """Whether tokens of an older policy get the weight that makes up for it."""
        return False

    @abstractmethod
    def __call__(self, tokens: TokenTensors) -> Tensor:
        """One number per unit: [tokens] or [pairs]."""

    def total(self, tokens: TokenTensors, totals: Totals) -> Tensor:
        """This micro-batch's part of the batch's loss, a scalar; the parts add up, however the batch is cut."""
        return self(tokens).sum() / totals.of(self.unit)

    def figures(self, tokens: TokenTensors) -> Mapping[str, Tensor]:
        """What a step reports, as the mean over all micro-batches: name to any number of values."""
        return {}
