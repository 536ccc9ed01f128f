"""CISPO: the policy gradient under the name and cap that its users know."""

from __future__ import annotations

from pydantic import Field

from evergrad.training.losses.policy_gradient import PolicyGradient


class Cispo(PolicyGradient):
    """``−min(π/μ, ratio_cap) · A · log π``, the weight taken as a constant (MiniMax-M1, arXiv 2506.13585).

    ``policy_gradient`` with the looser cap of ScaleRL (arXiv 2510.13786).
    """

    ratio_cap: float = Field(default=5.0, gt=0, le=1e6)
    """Largest importance weight; TRL's ``epsilon_high``."""
