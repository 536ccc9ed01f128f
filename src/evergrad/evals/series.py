"""The series of promotions: how strong the evidence of each try must be, so that few of all promotions are false.

Fifty tries at level 0.05 each promote one or two versions that are no better, and nobody knows which. The rules here give
each try a level α_t that depends on what came before, so that a share of at most α of all promotions is false in
expectation (the false discovery rate), however long the series grows::

    saffron         α_t = min(λ, (1−λ)·[w₀γ(t−C₀) + (α−w₀)γ(t−τ₁−C₁) + α·Σ_{j≥2} γ(t−τ_j−C_j)])
    lord            α_t = w₀γ(t) + (α−w₀)γ(t−τ₁) + α·Σ_{j≥2} γ(t−τ_j)
    e_lond          α_t = α·γ(t)·(R+1), compared with 1/E: valid whatever the dependence of the tries
    alpha_spending  α_t = α·γ(t): bounds the chance that even one promotion is false, and loses power with each try
    fixed           α_t = α: no correction at all

τ_j is the try of the j-th promotion, C_j the number of tries after it with p ≤ λ (C₀: of all), R the number of promotions,
Σγ = 1, λ = 1/2, w₀ = α/2. Sources: Ramdas et al., "SAFFRON" (ICML 2018) and "Online control of the false discovery rate
with decaying memory" (2017, LORD++); Xu and Ramdas, "Online multiple testing with e-values" (AISTATS 2024).

All but ``e_lond`` need p-values that are valid given the past: each try on tasks that no earlier try has looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from evergrad.types import Verdict

Rule = Literal["saffron", "lord", "e_lond", "alpha_spending", "fixed"]

CANDIDATE_P = 0.5
"""λ of SAFFRON: a try with a p-value above it is taken for one without any gain, and is what spends the level."""
_ZETA = 2.285765668
"""ζ(1.6), the sum of j^−1.6."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One try of a series.

    >>> Trial(p_value=0.001, promoted=True).candidate
    True
    """

    p_value: float
    """One-sided; 1 where something else than the gain refused the candidate, so that it counts as no promotion."""
    promoted: bool

    @property
    def candidate(self) -> bool:
        return self.p_value <= CANDIDATE_P


def next_level(rule: Rule, alpha: float, trials: Sequence[Trial]) -> float:
    """The level α_t of the try that follows ``trials``: its p-value (for ``e_lond``: 1/E) must not exceed it.

    Pure: the same history gives the same level, whoever computes it and when.

    >>> f"{next_level('saffron', 0.05, []):.6f}"
    '0.005469'
    """
    return _RULES[rule](alpha, trials)


def trials_of(verdicts: Sequence[Verdict]) -> list[Trial]:
    """The tries among ``verdicts``, oldest first: those by hand, without an incumbent or without a test are none."""
    found = []
    for verdict in verdicts:
        entry = verdict.evidence.get("series")
        if isinstance(entry, Mapping) and entry.get("p_value") is not None:
            found.append(Trial(float(entry["p_value"]) if verdict.promote else _p_of_refusal(entry), verdict.promote))
    return found


def _p_of_refusal(entry: Mapping[str, object]) -> float:
    """A gain that was shown and yet not promoted, because of a guard or a price, counts as p = 1.

    The p-value that decides is then the larger of two, which keeps it valid, and only promotions earn new level.
    """
    p_value, level = float(str(entry["p_value"])), float(str(entry["level"]))
    return 1.0 if p_value <= level else p_value


def _saffron(alpha: float, trials: Sequence[Trial]) -> float:
    wealth, now = alpha / 2, len(trials) + 1
    candidates = list(accumulate((trial.candidate for trial in trials), initial=0))

    def share(since: int) -> float:
        # Tries that looked like a gain do not count: those that did not are what spends the level.
        return _polynomial(now - since - (candidates[-1] - candidates[since]))

    level = wealth * share(0)
    for order, at in enumerate(_promotions(trials)):
        level += (alpha if order else alpha - wealth) * share(at)
    return min(CANDIDATE_P, (1 - CANDIDATE_P) * level)


def _lord(alpha: float, trials: Sequence[Trial]) -> float:
    wealth, now = alpha / 2, len(trials) + 1
    level = wealth * _logarithmic(now)
    for order, at in enumerate(_promotions(trials)):
        level += (alpha if order else alpha - wealth) * _logarithmic(now - at)
    return level


def _e_lond(alpha: float, trials: Sequence[Trial]) -> float:
    return alpha * _logarithmic(len(trials) + 1) * (len(_promotions(trials)) + 1)


def _alpha_spending(alpha: float, trials: Sequence[Trial]) -> float:
    return alpha * _polynomial(len(trials) + 1)


def _fixed(alpha: float, trials: Sequence[Trial]) -> float:
    return alpha


_RULES: dict[str, Callable[[float, Sequence[Trial]], float]] = {
    "saffron": _saffron,
    "lord": _lord,
    "e_lond": _e_lond,
    "alpha_spending": _alpha_spending,
    "fixed": _fixed,
}


def _promotions(trials: Sequence[Trial]) -> list[int]:
    """Positions of the promotions, from 1."""
    return [position for position, trial in enumerate(trials, start=1) if trial.promoted]


def _polynomial(j: int) -> float:
    """γ ∝ j^−1.6."""
    return float(j**-1.6) / _ZETA


def _logarithmic(j: int) -> float:
    """γ ∝ log(max(j, 2)) / (j·exp(√log j)), as in Javanmard and Montanari (2018)."""
    return 0.07720838 * math.log(max(j, 2)) / (j * math.exp(math.sqrt(math.log(j))))
