"""A soft price on length, added to a reward before advantages are taken."""

from __future__ import annotations

from pydantic import Field, model_validator

from evergrad.config import Config


class OverlongConfig(Config):
    """DAPO's soft penalty for length (arXiv 2503.14476): 0 up to ``longest − margin`` sampled tokens of a rollout, then falling
    in a line to −1 at ``longest`` and beyond. It shapes what is learned; figures and reports keep the verifier's reward.

    An answer near its limit learns that it is before it is cut off, where a reward of 0 would not tell long from wrong.

    >>> price = OverlongConfig(longest=100, margin=20)
    >>> [price.penalty(n) for n in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """

    longest: int = Field(ge=1)
    """Sampled tokens, of all turns together, from which on the whole of it is due."""
    margin: int = Field(ge=1)
    """Tokens before that at which it begins."""

    @model_validator(mode="after")
    def _inside(self) -> OverlongConfig:
        if self.margin > self.longest:
            raise ValueError(f"margin {self.margin} begins before the first token; set it to {self.longest} at most")
        return self

    def penalty(self, num_tokens: int) -> float:
        """What is added to the reward of a rollout with so many sampled tokens, in [−1, 0]."""
        return max(min((self.longest - self.margin - num_tokens) / self.margin, 0.0), -1.0)
