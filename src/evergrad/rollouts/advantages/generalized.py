"""Generalized advantage estimation, for whoever has a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from evergrad.config import Config


class GaeConfig(Config):
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438)."""

    step: Literal["token", "turn"] = "token"
    """What one step of the walk is. Of a turn, the value before its first token counts, and all its tokens share one advantage:
    discount and λ are then per turn, whatever its length."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """γ: what a reward one step later is worth."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ: 1 trusts the rewards alone, 0 the critic alone. Of a reward at the end of a rollout of n steps, ``λⁿ`` reaches the
    first."""


def generalized_advantages(rewards: Sequence[float], values: Sequence[float], gae: GaeConfig) -> list[float]:
    """``A_t = Σ_k (γλ)^k δ_{t+k}`` with ``δ_t = r_t + γ V_{t+1} − V_t`` and V = 0 after the end.

    Args:
        rewards: Of each step of one rollout; usually 0 but for the last.
        values: The critic's value before each step; same length.
        gae: γ and λ.

    Raises:
        ValueError: lengths differ.

    >>> generalized_advantages([0.0, 1.0], [0.5, 0.5], GaeConfig(lam=0.5))
    [0.25, 0.5]
    """
    advantages: list[float] = []
    running, after = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gae.discount * after - value + gae.discount * gae.lam * running
        advantages.append(running)
        after = value
    return advantages[::-1]
