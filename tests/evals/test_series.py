"""The series rules against their formulas written out, an independent implementation, and what they promise."""

from __future__ import annotations

import math
from functools import cache
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from evergrad.evals import Rule, Trial, next_level

ALPHA = 0.05
RULES: tuple[Rule, ...] = get_args(Rule)
p_values = st.lists(st.floats(1e-9, 1.0), max_size=40)


def tried(rule: Rule, values: list[float]) -> list[Trial]:
    """A series in which nothing but the p-value decides."""
    trials: list[Trial] = []
    for value in values:
        trials.append(Trial(value, value <= next_level(rule, ALPHA, trials)))
    return trials


def levels(rule: Rule, values: list[float]) -> list[float]:
    trials = tried(rule, values)
    return [next_level(rule, ALPHA, trials[:count]) for count in range(len(trials) + 1)]


@cache
def zeta(exponent: float) -> float:
    """Euler and Maclaurin: the sum to n, the integral after it, half a step."""
    n = 100_000
    return math.fsum(j**-exponent for j in range(1, n)) + n ** (1 - exponent) / (exponent - 1) + n**-exponent / 2


@given(p_values)
def test_saffron_is_the_formula_of_the_paper_written_out(values: list[float]) -> None:
    norm = zeta(1.6)
    taken: list[int] = []
    for t in range(1, len(values) + 1):
        past = values[: t - 1]

        def gamma(since: int, past: list[float] = past, t: int = t) -> float:
            candidates = sum(value <= 0.5 for value in past[since:])
            return (t - since - candidates) ** -1.6 / norm

        inner = 0.025 * gamma(0)
        if taken:
            inner += (ALPHA - 0.025) * gamma(taken[0]) + sum(ALPHA * gamma(at) for at in taken[1:])
        expected = min(0.5, 0.5 * inner)
        assert levels("saffron", past)[-1] == pytest.approx(expected, rel=1e-6)
        if values[t - 1] <= expected:
            taken.append(t)


@given(p_values)
def test_no_rule_ever_gives_more_level_than_it_has(values: list[float]) -> None:
    """What the guarantee rests on: the level spent, as each rule counts it, is at most α times the promotions (or α)."""
    for rule, weigh in (("lord", lambda p: 1.0), ("saffron", lambda p: 2.0 if p > 0.5 else 0.0)):
        trials, spent = tried(rule, values), 0.0  # type: ignore[arg-type]
        for trial, level in zip(trials, levels(rule, values), strict=False):  # type: ignore[arg-type]
            spent += level * weigh(trial.p_value)
        assert spent <= ALPHA * max(1, sum(trial.promoted for trial in trials)) + 1e-12
    assert math.fsum(levels("alpha_spending", [1.0] * len(values))) <= ALPHA


def test_first_levels() -> None:
    assert next_level("saffron", ALPHA, []) == pytest.approx(0.5 * 0.025 / zeta(1.6), rel=1e-8)
    assert next_level("alpha_spending", ALPHA, []) == pytest.approx(ALPHA / zeta(1.6), rel=1e-8)
    assert next_level("lord", ALPHA, []) == pytest.approx(0.025 * 0.07720838 * math.log(2))
    assert next_level("e_lond", ALPHA, []) == pytest.approx(ALPHA * 0.07720838 * math.log(2))
    assert next_level("fixed", ALPHA, []) == ALPHA


@pytest.mark.parametrize("rule", ["saffron", "lord"])
def test_a_promotion_earns_level_and_a_failure_spends_it(rule: Rule) -> None:
    dry = levels(rule, [0.9] * 5)
    assert dry[1:] == sorted(dry[1:], reverse=True)
    promoted = [Trial(1e-9, promoted=True)]
    assert next_level(rule, ALPHA, promoted) > next_level(rule, ALPHA, [])
    assert next_level("alpha_spending", ALPHA, promoted) < next_level("alpha_spending", ALPHA, [])


def test_a_hopeful_failure_costs_saffron_nothing() -> None:
    assert levels("saffron", [0.3] * 4) == [levels("saffron", [])[0]] * 5


@pytest.mark.parametrize("rule", ["saffron", "lord", "e_lond", "alpha_spending"])
def test_few_of_all_promotions_are_false(rule: Rule) -> None:
    """A hundred candidates, thirty better (p shifted as by 100 discordant pairs of which 68 are won), sixty such series."""
    draws = np.random.default_rng(7)
    shares = []
    for _ in range(60):
        better = draws.random(100) < 0.3
        shift = np.where(better, (0.68 - 0.5) * math.sqrt(100) / 0.5, 0.0)
        p = norm.sf(draws.normal(shift))
        # 1/E of any e-value calibrated from p: κ·p^(κ−1) with κ = 1/2.
        values = [min(1.0, 2 * math.sqrt(each)) if rule == "e_lond" else float(each) for each in p]
        promoted = np.array([trial.promoted for trial in tried(rule, values)])
        shares.append((promoted & ~better).sum() / max(1, promoted.sum()))
    assert np.mean(shares) <= ALPHA


def test_rules_agree_with_an_independent_implementation() -> None:
    from online_fdr.e_values import ELond
    from online_fdr.p_values import LordPlusPlus, Saffron

    draws = np.random.default_rng(3)
    for _ in range(20):
        values = [float(p) for p in np.where(draws.random(60) < 0.3, draws.random(60) * 1e-3, draws.random(60))]
        others = {"saffron": Saffron(ALPHA, 0.025, 0.5), "lord": LordPlusPlus(ALPHA, 0.025), "e_lond": ELond(ALPHA)}
        for rule, other in others.items():
            decided = [other.test_one(1 / p if rule == "e_lond" else p) for p in values]
            assert [trial.promoted for trial in tried(rule, values)] == decided  # type: ignore[arg-type]
            assert levels(rule, values)[-2] == pytest.approx(other.last_test_level, rel=1e-6)  # type: ignore[arg-type]
