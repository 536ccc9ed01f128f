"""The Pareto front of score against cost per success: which versions are worth having at any exchange rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from evergrad.ledger.prices import LedgerError


@dataclass(frozen=True, slots=True)
class Point:
    """One version, or one model of others, on one suite."""

    name: str
    score: float
    usd_per_success: Decimal | float | None
    """``None`` where unpriced, or without a success."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A point, and by whom it is dominated."""

    point: Point
    dominated_by: tuple[str, ...]
    """Names of those that score no less for no more, and one of the two is better; empty on the front."""

    @property
    def on_front(self) -> bool:
        """Nobody beats it, and its price is known."""
        return not self.dominated_by and self.point.usd_per_success is not None


def pareto_front(points: Iterable[Point]) -> tuple[Placed, ...]:
    """Every point with its place, cheapest first; those without a cost come last, and neither dominate nor are dominated.

    All must be scores on the same suite. Two points that are equal in both are both on the front.

    Raises:
        LedgerError: a name twice, or a number that is not finite.

    >>> [(each.point.name, each.dominated_by) for each in pareto_front([Point("a", 0.6, 0.06), Point("b", 0.7, 0.05)])]
    [('b', ()), ('a', ('b',))]
    """
    found = list(points)
    names = [point.name for point in found]
    if len(set(names)) < len(names):
        raise LedgerError("a name stands for two points", hint="name each point once")
    for point in found:
        if not math.isfinite(point.score) or not math.isfinite(_cost(point, missing=0.0)):
            raise LedgerError(f"score {point.score}, cost {point.usd_per_success}: not finite", where=point.name)
    ordered = sorted(found, key=lambda point: (point.usd_per_success is None, _cost(point, missing=0.0), -point.score))
    return tuple(Placed(point, tuple(each.name for each in ordered if _dominates(each, point))) for point in ordered)


def _dominates(one: Point, other: Point) -> bool:
    if one.usd_per_success is None or other.usd_per_success is None:
        return False
    cheaper, better = _cost(other) - _cost(one), one.score - other.score
    return cheaper >= 0 and better >= 0 and (cheaper > 0 or better > 0)


def _cost(point: Point, missing: float = math.nan) -> float:
    return missing if point.usd_per_success is None else float(point.usd_per_success)
