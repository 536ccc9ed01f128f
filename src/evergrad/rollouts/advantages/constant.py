"""1 for every rollout: demonstrations are all worth following, and a teacher grades all tokens alike."""

from __future__ import annotations

from collections.abc import Sequence


def constant(rewards: Sequence[float]) -> list[float]:
    """
    >>> constant([1.0, 0.0])
    [1.0, 1.0]
    """
    return [1.0] * len(rewards)
