"""What all losses of reinforcement learning share: a ratio, its correction, two regularizers, and what they divide by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from evergrad.config import Config
from evergrad.training.losses.base import MAX_LOG_RATIO, Loss, TokenTensors, Totals

if TYPE_CHECKING:
    from torch import Tensor


class Correction(Config):
    """The weight ``w = π₀/μ`` of a token that the proximal policy π₀ did not sample itself; a constant in the gradient.

    ``truncate`` gives ``min(max(w, floor), cap)``, biased but of bounded variance (Ionides 2008); ``mask`` gives w inside
    [floor, cap] and 0 outside, which lets go of tokens that cannot be mended. A mask with a floor is IcePop (Ring-1T,
    arXiv 2510.18855: 0.5 and 5 per token); a mask per sequence is that of TRL's default.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight outside [floor, cap]: the nearer bound, or 0."""
    level: Literal["token", "sequence"] = "token"
    """``sequence`` takes the product over the rollout's trained tokens, the unbiased weight of the whole, for each of them."""
    cap: float = Field(default=2.0, ge=1, le=1e6)
    """Largest weight."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Smallest weight."""

    def weights(self, tokens: TokenTensors) -> Tensor:
        """[tokens], without gradient."""
        log_weights = tokens.proximal - tokens.behaviour_logprobs
        if self.level == "sequence":
            log_weights = tokens.rollout_sums(log_weights).index_select(0, tokens.rollout)
        weights = log_weights.clamp(max=MAX_LOG_RATIO).exp()
        if self.kind == "mask":
            return weights * ((weights >= self.floor) & (weights <= self.cap))
        return weights.clamp(self.floor, self.cap)


class PolicyLoss(Loss):
    """``Σ_i n_i Σ_t [ w_t · surrogate_t(r_t, A_t) + kl_coef · KL_t ] − entropy_coef · mean H``, with ``r = π/anchor``.

    The surrogate is the subclass's own; n is the normalization. The mean of the entropy is over all valid tokens whatever the
    normalization, so that its coefficient means the same everywhere.
    """

    needs_advantage: ClassVar[bool] = True
    needs_behaviour: ClassVar[bool] = True

    normalization: Literal["token", "rollout", "constant"] = "token"
    """What the sum over tokens is divided by: all valid tokens of the batch (each token counts the same), the valid tokens of
    its own rollout and then the number of rollouts (each rollout counts the same, however many samples it was cut into), or
    ``constant_length`` times the number of rollouts (as ``token``, but no batch counts more because its answers are short)."""
    constant_length: int | None = Field(default=None, ge=1)
    """For ``constant``: tokens of the longest answer there can be."""
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """What the ratio is to: the policy μ that sampled the token, or the policy π₀ before the first update on this batch."""
    correction: Correction | None = None
    """For anchor ``proximal``, where nothing else makes up for the difference between π₀ and μ."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from a frozen reference: the model that training started from."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With ``d = log π − log reference``: k1 is d, k2 is ``d²/2``, k3 is ``exp(−d) − 1 + d``, which is never negative and, like
    k1, right on average (Schulman 2020, "Approximating KL divergence")."""
    kl_weighted: bool = True
    """Multiplies the estimator by the ratio r, through which it then has a gradient: of k1 and k3 it is that of the KL itself,
    for tokens of an older policy as well (DeepSeek-V3.2, arXiv 2512.02556). Without, only k2 has that gradient, and for fresh
    tokens only; GRPO's own form is k3 without."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy that is paid for keeping answers diverse."""

    @model_validator(mode="after")
    def _sound(self) -> PolicyLoss:
        if self.correction is not None and self.anchor == "behaviour":
            raise ValueError(
                "the ratio to the behaviour policy is a correction already, another would correct twice; "
                "set anchor = 'proximal' or leave correction out"
            )
        if self.normalization == "constant" and self.constant_length is None:
            raise ValueError("normalization 'constant' needs constant_length: the tokens of the longest answer there can be")
        if self.normalization != "constant" and self.constant_length is not None:
            raise ValueError(
                f"normalization '{self.normalization}' does not use constant_length; "
                "set normalization = 'constant' or leave it out"
            )
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_weighted:
            raise ValueError("k1 without the ratio has gradient 0 on average and holds nothing; set kl_weighted = true")
        if self.kl_coef and self.kl_estimator == "k2" and self.kl_weighted:
            raise ValueError(
                "k2 has the gradient of the KL without the ratio, and another with it; set kl_weighted = false, "
                "or kl_estimator = 'k3'"
            )
        return self

    @property
    def silent_at_zero(self) -> bool:
        return not self.kl_coef and not self.entropy_coef

    @property
    def whole_rollouts(self) -> bool:
        return self.correction is not None and self.correction.level == "sequence"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_proximal(self) -> bool:
        return self.anchor == "proximal"

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    @property
    def corrects_staleness(self) -> bool:
        return self.anchor == "behaviour" or self.correction is not None

    @abstractmethod
    def surrogate(self, tokens: TokenTensors, log_ratio: Tensor) -> Tensor:
        """The policy's own loss, [tokens].

        Args:
            tokens: For advantages, rollouts and log-probabilities.
            log_ratio: ``log π − log anchor``, [tokens], with the gradient of log π.
        """

    def __call__(self, tokens: TokenTensors) -> Tensor:
        log_ratio = self.log_ratio(tokens)
        loss = self.surrogate(tokens, log_ratio)
        if self.correction is not None:
            loss = loss * self.correction.weights(tokens)
        if self.kl_coef:
            kl = self._kl(tokens)
            loss = loss + self.kl_coef * (kl * ratio(log_ratio) if self.kl_weighted else kl)
        return loss

    def log_ratio(self, tokens: TokenTensors) -> Tensor:
        """``log π − log anchor``, [tokens]."""
        return tokens.logprobs - (tokens.behaviour_logprobs if self.anchor == "behaviour" else tokens.proximal)

    def total(self, tokens: TokenTensors, totals: Totals) -> Tensor:
        loss = self(tokens)
        if self.normalization == "rollout":
            total = (loss / tokens.lengths.index_select(0, tokens.rollout)).sum() / totals.rollouts
        elif self.normalization == "constant":
            total = loss.sum() / (totals.rollouts * float(self.constant_length or 1))
        else:
            total = loss.sum() / totals.tokens
        if self.entropy_coef:
            assert tokens.entropies is not None
            total = total - self.entropy_coef * tokens.entropies.sum() / totals.tokens
        return total

    def _kl(self, tokens: TokenTensors) -> Tensor:
        assert tokens.reference_logprobs is not None
        difference = tokens.logprobs - tokens.reference_logprobs
        if self.kl_estimator == "k1":
            return difference
        if self.kl_estimator == "k2":
            return difference.square() / 2
        return (-difference).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference

    def clipped(self, tokens: TokenTensors) -> Tensor:
        """Which tokens were kept from having their full weight, [tokens] bool; none by default."""
        return tokens.advantages.new_zeros(tokens.advantages.shape).bool()

    def figures(self, tokens: TokenTensors) -> Mapping[str, Tensor]:
        figures = {"clipped_share": self.clipped(tokens)}
        if self.correction is not None:
            figures["correction_mean"] = self.correction.weights(tokens)
        if self.kl_coef:
            figures["reference_kl"] = self._kl(tokens)
        if tokens.entropies is not None:
            figures["entropy"] = tokens.entropies
        return figures


def ratio(log_ratio: Tensor) -> Tensor:
    """``exp``, bounded where a float would end."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
