"""GRPO: each rollout counts the same, however long it is."""

from __future__ import annotations

from typing import Literal

from evergrad.training.losses.ppo import Ppo


class Grpo(Ppo):
    """``1/G Σ_i 1/|o_i| Σ_t −min(r · A, clip(r) · A)`` (DeepSeekMath, arXiv 2402.03300).

    Its advantages are ``group_normalized``; the paper's KL is ``kl_coef = 0.04, kl_weighted = false``.
    """

    normalization: Literal["rollout"] = "rollout"
    """Each rollout's mean over its tokens, then the mean over rollouts."""
