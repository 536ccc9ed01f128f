"""Generalized advantage estimation, for whoever has a critic."""

from __future__ import annotations

from collections.abc import Sequence


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], *, discount: float = 1.0, decay: float = 0.95
) -> list[float]:
    """``A_t = Σ_k (γλ)^k δ_{t+k}`` with ``δ_t = r_t + γ V_{t+1} − V_t`` and V = 0 after the end (arXiv 1506.02438).

    Not in ``ESTIMATORS``, which take one reward a rollout: these advantages differ from token to token, and go with loss
    ``ppo`` as a sample's ``advantages``.

    Args:
        rewards: Of each step of one rollout; usually 0 but for the last.
        values: The critic's value before each step; same length.
        discount: γ.
        decay: λ; 1 gives the whole return minus the value, 0 the one-step error.

    Raises:
        ValueError: lengths differ.

    >>> generalized_advantages([0.0, 1.0], [0.5, 0.5], decay=0.5)
    [0.25, 0.5]
    """
    advantages: list[float] = []
    running, after = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + discount * after - value + discount * decay * running
        advantages.append(running)
        after = value
    return advantages[::-1]
