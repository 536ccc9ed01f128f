"""A soft price on length, added to a reward before advantages are taken."""

from __future__ import annotations

from pydantic import Field, model_validator

from evergrad.config import Config


class OverlongConfig(Config):
    """DAPO's soft penalty for length (arXiv 2503.14476): 0 up to ``max_length − cache`` sampled tokens of a rollout, then
    falling in a line to −1 at ``max_length`` and beyond. It shapes what is learned; figures and reports keep the
    verifier's reward.

    An answer near its limit learns that it is before it is cut off, where a reward of 0 would not tell long from wrong.

    >>> price = OverlongConfig(max_length=100, cache=20)
    >>> [price.penalty(n) for n in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """

    max_length: int = Field(ge=1)
    """Sampled tokens, of all turns together, from which on the whole of it is due."""
    cache: int = Field(ge=1)
    """Tokens before that at which it begins."""

    @model_validator(mode="after")
    def _inside(self) -> OverlongConfig:
        if self.cache > self.max_length:
            raise ValueError(f"cache {self.cache} begins before the first token; set it to {self.max_length} at most")
        return self

    def penalty(self, num_tokens: int) -> float:
        """What is added to the reward of a rollout with so many sampled tokens, in [−1, 0]."""
        return max(min((self.max_length - self.cache - num_tokens) / self.cache, 0.0), -1.0)
