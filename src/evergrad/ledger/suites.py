"""Scores of different suites side by side: normalized, weighted, and without those that no longer tell versions apart.

Raw scores of two suites are never averaged: 0.5 is chance on one and brilliant on another. So each has a scale of its own::

    normalized   (s − chance) / (ceiling − chance)
    index        Σ w·normalized / Σ w  over the suites that are not retired
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from evergrad.ledger.prices import LedgerError
from evergrad.types import strict_json


@dataclass(frozen=True, slots=True)
class Suite:
    """How a suite is read."""

    name: str
    chance: float = 0.0
    """What a guess scores."""
    ceiling: float = 1.0
    """What nobody can exceed."""
    weight: float = 1.0

    def normalized(self, score: float) -> float:
        """0 for chance, 1 for the ceiling; less than 0 for worse than chance.

        >>> Suite("four choices", chance=0.25).normalized(0.625)
        0.5
        """
        return (score - self.chance) / (self.ceiling - self.chance)


@dataclass(frozen=True, slots=True)
class SuiteIndex:
    """One figure per version, over all suites that still tell versions apart."""

    version: str
    """Hash of the suites that are in it, with their weights and ends: figures of different indices cannot be compared."""
    suites: tuple[str, ...]
    retired: tuple[str, ...]
    """Saturated ones. They stay guards; they measure no progress."""
    values: Mapping[str, float]
    """By version id, for those that were measured on every suite of the index; empty when all are retired."""


def suite_index(
    suites: Sequence[Suite], scores: Mapping[str, Mapping[str, float]], retired: Collection[str] = ()
) -> SuiteIndex:
    """
    Args:
        suites: All suites, with fixed weights.
        scores: Version id to suite name to mean score.
        retired: Names of the suites that are saturated.

    Raises:
        LedgerError: chance and ceiling in the wrong order, a weight that is not positive, or a score that is not finite.
    """
    for suite in suites:
        if not (suite.chance < suite.ceiling and suite.weight > 0 and math.isfinite(suite.weight)):
            raise LedgerError("a suite needs chance < ceiling and a weight > 0", where=suite.name)
    if not all(math.isfinite(score) for row in scores.values() for score in row.values()):
        raise LedgerError("a score is not finite", hint="leave what was not measured out")
    kept = [suite for suite in suites if suite.name not in retired]
    told = sorted((suite.name, suite.chance, suite.ceiling, suite.weight) for suite in kept)
    total = math.fsum(suite.weight for suite in kept)
    values = {
        version: math.fsum(suite.weight * suite.normalized(row[suite.name]) for suite in kept) / total
        for version, row in scores.items()
        if kept and all(suite.name in row for suite in kept)
    }
    version = hashlib.sha256(strict_json(told).encode()).hexdigest()[:12]
    return SuiteIndex(
        version, tuple(suite.name for suite in kept), tuple(suite.name for suite in suites if suite not in kept), values
    )
