"""What all losses of preference pairs share: a score per answer, and the difference between the two of a pair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from evergrad.training.losses.base import Loss, TokenTensors, Unit

if TYPE_CHECKING:
    from torch import Tensor


class PairLoss(Loss):
    """``preference(margin) + rpo_alpha · −log π(chosen)/|chosen|``, the mean over pairs.

    The margin is the chosen answer's score minus the rejected one's. A pair is two samples with one ``group_id``, whose
    advantages are 1 (chosen) and −1 (rejected). The second term keeps the chosen answer from becoming unlikely together with
    the rejected one (Pang et al. 2024, arXiv 2404.19733).
    """

    unit: ClassVar[Unit] = "pair"
    beta: float = Field(default=0.1, gt=0)
    """How much the margin says: larger values keep the policy nearer to the reference."""
    rpo_alpha: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's own negative log-likelihood per token."""

    @property
    def silent_at_zero(self) -> bool:
        return False

    @abstractmethod
    def scores(self, tokens: TokenTensors) -> Tensor:
        """How likely the policy has made each answer, [answers]."""

    @abstractmethod
    def preference(self, margin: Tensor) -> Tensor:
        """The loss of each pair, [pairs], from its margin."""

    def __call__(self, tokens: TokenTensors) -> Tensor:
        loss = self.preference(self._margin(tokens))
        if self.rpo_alpha:
            likelihoods = tokens.rollout_sums(tokens.logprobs) / tokens.lengths
            loss = loss - self.rpo_alpha * _over_pairs(likelihoods * (_signs(tokens) > 0), tokens)
        return loss

    def _margin(self, tokens: TokenTensors) -> Tensor:
        return _over_pairs(self.scores(tokens) * _signs(tokens), tokens)

    def figures(self, tokens: TokenTensors) -> Mapping[str, Tensor]:
        margin = self._margin(tokens)
        return {"margin": margin, "pair_accuracy": margin > 0}


class ReferencePairLoss(PairLoss):
    """One whose answers are scored by ``log π/π_ref``."""

    reference_free: bool = False
    """Scores by ``log π``, as if the reference found all answers equally likely; none is computed then."""
    length_normalized: bool = False
    """Takes the mean over each answer's tokens instead of the sum."""

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def scores(self, tokens: TokenTensors) -> Tensor:
        logprobs = tokens.logprobs
        if not self.reference_free:
            assert tokens.reference_logprobs is not None
            logprobs = logprobs - tokens.reference_logprobs
        sums = tokens.rollout_sums(logprobs)
        return sums / tokens.lengths if self.length_normalized else sums


def _signs(tokens: TokenTensors) -> Tensor:
    """[answers] 1 for the chosen answer, −1 for the rejected one."""
    return tokens.rollout_sums(tokens.advantages).sign()


def _over_pairs(values: Tensor, tokens: TokenTensors) -> Tensor:
    """[answers] → [pairs]; a sum of two is the same in either order."""
    return values.new_zeros(tokens.num_rollouts // 2).index_add(0, tokens.group, values)
