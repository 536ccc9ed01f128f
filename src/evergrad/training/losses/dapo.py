"""DAPO: each token counts the same, and winners may rise further than losers may fall."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from evergrad.training.losses.ppo import Ppo


class Dapo(Ppo):
    """``1/Σ|o_i| Σ_i Σ_t −min(r · A, clip(r, 1 − 0.2, 1 + 0.28) · A)`` (arXiv 2503.14476).

    Its dynamic sampling is ``rl.replace_groups``, its soft penalty for length ``rl.overlong``.
    """

    normalization: Literal["token"] = "token"
    """All valid tokens of the batch."""
    clip_high: float = Field(default=0.28, gt=0, le=1e6)
    """A token that won gets no further push above ``1 + clip_high`` times its old probability."""
