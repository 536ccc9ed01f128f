"""Dr. GRPO: no answer counts more for being short."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from evergrad.training.losses.ppo import Ppo


class DrGrpo(Ppo):
    """``1/(G · constant_length) Σ_i Σ_t −min(r · A, clip(r) · A)`` (arXiv 2503.20783); its advantages are ``group_mean``."""

    normalization: Literal["constant"] = "constant"
    """A constant times the number of rollouts."""
    constant_length: int = Field(ge=1)
    """Tokens of the longest answer there can be: ``max_tokens_per_turn · max_turns`` of the environment's limits."""
