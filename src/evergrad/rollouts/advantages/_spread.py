"""When a group's rewards tell nothing apart."""

from __future__ import annotations

from collections.abc import Sequence


def uniform(rewards: Sequence[float]) -> bool:
    """Whether rewards agree up to rounding.

    >>> uniform([0.1 + 0.2, 0.3]), uniform([0.0, 1.0])
    (True, False)
    """
    if not rewards:
        return True
    return max(rewards) - min(rewards) <= 1e-9 + 1e-6 * max(abs(each) for each in rewards)
