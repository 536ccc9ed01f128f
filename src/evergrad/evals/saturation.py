"""Saturation: a suite on which nearly all succeed can show no gain; it is retired from promotions, and stays a guard."""

from __future__ import annotations

SATURATED_ABOVE = 0.95
"""Mean score above which a suite has too little room for a gain to show."""
FEWEST_TASKS = 30
"""Tasks below which a mean is told and decides nothing."""


def is_saturated(mean: float | None, n: int) -> bool:
    """Whether a version that scores ``mean`` on ``n`` tasks leaves its successors nothing to show.

    >>> is_saturated(0.99, 96), is_saturated(0.95, 96), is_saturated(1.0, 12)
    (True, False, False)
    """
    return mean is not None and n >= FEWEST_TASKS and mean > SATURATED_ABOVE


def error_reduction(before: float, after: float) -> float | None:
    """Share of the failures that a version removed: what a gain means close to the ceiling. None where nothing failed before.

    >>> round(error_reduction(0.96, 0.98), 6), error_reduction(1.0, 1.0)
    (0.5, None)
    """
    return 1 - (1 - after) / (1 - before) if before < 1.0 else None
