"""Decoupled PPO: clip against the policy of a moment ago, weigh by the one that sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from evergrad.training.losses.policy import Correction
from evergrad.training.losses.ppo import Ppo


class DecoupledPpo(Ppo):
    """``−w · min(ρ · A, clip(ρ) · A)`` with ``ρ = π/π₀`` and ``w = π₀/μ`` (Hilton et al. 2022, arXiv 2110.00641; AReaL).

    The size of a step and the age of the data are then two things: stale tokens are not clipped away before they taught.
    """

    anchor: Literal["proximal"] = "proximal"
    """The policy before the first update on this batch."""
    correction: Correction = Field(default_factory=lambda: Correction(kind="mask", cap=5.0))
    """Of the age of the data; AReaL's mask at 5."""
