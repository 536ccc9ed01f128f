"""The metrics: every figure of the worked example, the edge cases, and the interval against simulation and by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.ledger import (
    Arm,
    Ledger,
    LedgerError,
    Point,
    PriceBook,
    compare_intelligence,
    cost_per_million_tokens,
    cost_per_success,
    intelligence_per_dollar,
    marginal_intelligence,
    pareto_front,
    payback,
)

# The worked example: a GPU at $3/h serves 2,500 tok/s at 50% utilization; training cost T; N attempts; a success is worth V.
T, N, V = Decimal(500), 100_000, 0.10
SERVING_PER_MTOK = 3 / (2500 * 0.5 * 3600 / 1e6)
CHAMPION = Arm(0.60, 0.04 * SERVING_PER_MTOK + 0.01)
CANDIDATE = Arm(0.70, 0.03 * SERVING_PER_MTOK + 0.01)
# 70 wins and 30 losses in 400 pairs: √(70 + 30 − 40²/400) / 400.
DELTA_SE = math.sqrt(96) / 400
DELTA_CI95 = (0.1 - 1.959963984540054 * DELTA_SE, 0.1 + 1.959963984540054 * DELTA_SE)


# Phase, resource, quantity, dollars to the cent.
TRAINING = [
    ("train", "gpu_h", 40, "120.00"),
    ("rollout", "gpu_h", 40, "120.00"),
    ("rollout", "sandbox_core_h", 2000, "100.00"),
    ("label", "judge_in", 20_000_000, "20.00"),
    ("label", "judge_out", 2_000_000, "10.00"),
    ("store", "storage_gb_month", 500, "10.00"),
    ("gate", "gpu_h", 10, "30.00"),
    ("label", "label_h", 2, "90.00"),
]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Ledger]:
    prices = {"gpu_h": 3, "sandbox_core_h": "0.05", "judge_in": 1, "judge_out": 5, "storage_gb_month": "0.02", "label_h": 45}
    per = {"judge_in": 1_000_000, "judge_out": 1_000_000}
    book = PriceBook.model_validate({"prices": {name: {"usd": usd, "per": per.get(name, 1)} for name, usd in prices.items()}})
    with Ledger(tmp_path / "ledger.sqlite", book) as ledger:
        for index, (phase, resource, quantity, _) in enumerate(TRAINING):
            ledger.record(f"k{index}", subject="cycle-1", phase=phase, resource=resource, quantity=quantity)
        yield ledger


@pytest.mark.parametrize("line", range(len(TRAINING)), ids=[f"{phase}-{resource}" for phase, resource, *_ in TRAINING])
def test_each_line_of_the_worked_example_to_the_cent(trained: Ledger, line: int) -> None:
    assert trained.entries()[line].usd == Decimal(TRAINING[line][3])


def test_training_cost_of_the_worked_example(trained: Ledger) -> None:
    summary = trained.summary()
    assert summary.usd == trained.total_usd() == T
    assert summary.by_phase == {"gate": 30, "label": 120, "rollout": 220, "store": 10, "train": 120}
    assert sum(Decimal(usd) for *_, usd in TRAINING) == T


def test_serving_figures_of_the_worked_example() -> None:
    assert round(SERVING_PER_MTOK, 5) == 0.66667
    assert CHAMPION.cost_per_attempt == pytest.approx(0.0366667, abs=1e-7)
    assert CANDIDATE.cost_per_attempt == pytest.approx(0.03)
    amortized = T / N
    assert amortized == Decimal("0.005")

    def usd(arm: Arm) -> Decimal:
        return Decimal(arm.cost_per_attempt) * N

    before = cost_per_million_tokens(usd(CHAMPION), 4_000_000_000)
    after = cost_per_million_tokens(usd(CANDIDATE), 3_000_000_000, amortized_usd_per_token=T / 3_000_000_000)
    before_success = cost_per_success(usd(CHAMPION), successes=60_000, attempts=N).value
    after_success = cost_per_success(usd(CANDIDATE) + T, successes=70_000, attempts=N).value
    assert before is not None
    assert after is not None
    assert before_success is not None
    assert after_success is not None
    assert float(before) == pytest.approx(0.916667, abs=1e-6)
    assert float(after) == pytest.approx(1.166667, abs=1e-6)
    assert float(before_success) == pytest.approx(0.0611111, abs=1e-7)
    assert float(after_success) == pytest.approx(0.05)
    assert (round(after / before - 1, 2), round(after_success / before_success - 1, 2)) == (Decimal("0.27"), Decimal("-0.18"))


def test_intelligence_per_dollar_of_the_worked_example() -> None:
    before = intelligence_per_dollar([1.0] * 60 + [0.0] * 40, [CHAMPION.cost_per_attempt] * 100)
    after = intelligence_per_dollar([1.0] * 70 + [0.0] * 30, [CANDIDATE.cost_per_attempt + 0.005] * 100)
    assert before.value == pytest.approx(16.3636, abs=1e-4)
    assert after.value == pytest.approx(20.0)
    assert before.value is not None
    assert after.value is not None
    assert after.value / before.value == pytest.approx(1.2222, abs=1e-4)


def test_payback_of_the_worked_example() -> None:
    result = payback(CHAMPION, CANDIDATE, T, attempts=N, value_per_success=V, gain_ci95=DELTA_CI95)
    assert result is not None
    assert result.gain_per_attempt == pytest.approx(0.0166667, abs=1e-7)
    assert result.break_even_attempts == pytest.approx(30_000)
    assert result.break_even_attempts * 0.03 == pytest.approx(900), "million tokens"
    assert result.roi == pytest.approx(2.3333, abs=1e-4)
    assert result.break_even_successes == pytest.approx(27_391.3, abs=0.05)
    assert result.break_even_ci95 == pytest.approx((23_291, 42_138), abs=0.5)
    assert result.roi_ci95 == pytest.approx((1.37, 3.29), abs=0.005)


def test_marginal_intelligence_of_the_worked_example() -> None:
    result = marginal_intelligence(0.10, T, ci95=DELTA_CI95)
    assert result.value == pytest.approx(20)
    assert result.ci95 == pytest.approx((10.40, 29.60), abs=0.005)
    assert marginal_intelligence(-0.05, T).value == pytest.approx(-10), "a loss is a negative gain"
    assert marginal_intelligence(0.1, None).value is None
    assert marginal_intelligence(0.1, 0).value is None


def test_nothing_gained_is_never_paid_back() -> None:
    worse = payback(CANDIDATE, CHAMPION, T, attempts=N, value_per_success=V, gain_ci95=(-0.2, 0.01))
    assert worse is not None
    assert worse.break_even_attempts == worse.break_even_successes == math.inf
    assert worse.roi is not None
    assert worse.roi < -1
    assert payback(CHAMPION, CANDIDATE, None, attempts=N, value_per_success=V) is None
    free = payback(CHAMPION, CANDIDATE, 0, attempts=N, value_per_success=V)
    assert free is not None
    assert (free.break_even_attempts, free.roi) == (0, None)
    never_succeeds = payback(Arm(0, 0.01), Arm(0, 0.02), T, attempts=N, value_per_success=V)
    assert never_succeeds is not None
    assert never_succeeds.break_even_successes == math.inf


def test_no_success_leaves_cost_per_success_undefined_but_bounded() -> None:
    result = cost_per_success(Decimal("9.00"), successes=0, attempts=300)
    assert result.value is None
    # Mean cost per attempt 0.03, times n/3.
    assert result.lower_bound == Decimal("0.03") * 300 / 3
    assert cost_per_success(Decimal("9.00"), successes=0, attempts=1).lower_bound == 9, "never below one attempt"
    assert cost_per_success(None, successes=3, attempts=3).value is None
    assert cost_per_success(Decimal(0), successes=0, attempts=0).value is None
    assert cost_per_success(Decimal(3), successes=2, attempts=4).lower_bound is None
    with pytest.raises(LedgerError, match="5 successes in 4 attempts"):
        cost_per_success(Decimal(3), successes=5, attempts=4)


def test_the_front_of_the_worked_example_names_who_dominates_whom() -> None:
    champion = Point("champion", 0.60, Decimal("0.0611111"))
    candidate = Point("candidate", 0.70, Decimal("0.05"))
    cheap, unpriced = Point("cheap", 0.40, 0.01), Point("unpriced", 0.99, None)
    placed = {each.point.name: each for each in pareto_front([champion, candidate, unpriced, cheap])}
    assert list(placed) == ["cheap", "candidate", "champion", "unpriced"]
    assert placed["champion"].dominated_by == ("candidate",)
    assert [name for name, each in placed.items() if each.on_front] == ["cheap", "candidate"]
    assert placed["unpriced"].dominated_by == (), "what has no price is not judged"
    twins = pareto_front([Point("a", 0.5, 1.0), Point("b", 0.5, 1.0)])
    assert all(each.on_front for each in twins)
    with pytest.raises(LedgerError, match="two points"):
        pareto_front([champion, champion])
    with pytest.raises(LedgerError, match="not finite"):
        pareto_front([Point("x", math.nan, 1.0)])


points = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12)


@given(points)
def test_a_point_is_dominated_exactly_if_some_other_is_nowhere_worse_and_somewhere_better(rows: list[tuple[int, int]]) -> None:
    placed = pareto_front([Point(str(i), float(score), float(cost)) for i, (score, cost) in enumerate(rows)])
    for each in placed:
        score, cost = rows[int(each.point.name)]
        better = {str(i) for i, (s, c) in enumerate(rows) if s >= score and c <= cost and (s, c) != (score, cost)}
        assert set(each.dominated_by) == better
    assert any(each.on_front for each in placed) or not rows


def test_unpriced_and_free_have_no_figure() -> None:
    assert intelligence_per_dollar([1.0, 0.0], [Decimal("0.1"), None]).value is None
    assert intelligence_per_dollar([1.0, 0.0], [0.0, 0.0]).value is None
    assert intelligence_per_dollar([1.0, 0.0], [0.0, 0.0]).mean_cost == 0
    assert cost_per_million_tokens(None, 5) is None
    assert cost_per_million_tokens(Decimal(1), 0) is None
    one = intelligence_per_dollar([1.0], [0.5])
    assert (one.value, one.ci95) == (2.0, None)
    assert compare_intelligence(([1.0], [None]), ([1.0], [1.0])).ratio is None
    assert compare_intelligence(([0.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, 1.0])).ratio is None


@pytest.mark.parametrize(
    ("scores", "costs"),
    [([], []), ([1.0], [0.1, 0.2]), ([math.nan], [0.1]), ([1.0], [math.inf]), ([1.0], [-0.1]), ([1.0, 0.0], [None, math.nan])],
)
def test_broken_numbers_are_refused(scores: list[float], costs: list[float | None]) -> None:
    with pytest.raises(LedgerError):
        intelligence_per_dollar(scores, costs)


pairs = st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), min_size=2, max_size=40)


@given(pairs)
def test_interval_is_the_delta_method_written_out(items: list[tuple[float, float]]) -> None:
    scores, costs = [np.array(column) for column in zip(*items, strict=True)]
    result = intelligence_per_dollar(list(scores), list(costs))
    ratio = scores.mean() / costs.mean()
    covariance = np.cov(scores, costs)
    variance = (covariance[0, 0] + ratio**2 * covariance[1, 1] - 2 * ratio * covariance[0, 1]) / (
        len(scores) * costs.mean() ** 2
    )
    half = 1.959963984540054 * math.sqrt(max(variance, 0))
    assert result.value == pytest.approx(ratio)
    assert result.ci95 == pytest.approx((ratio - half, ratio + half), abs=1e-6)


@given(pairs, st.floats(0.1, 100))
def test_dearer_money_scales_the_figure_and_its_interval(items: list[tuple[float, float]], factor: float) -> None:
    scores, costs = [list(column) for column in zip(*items, strict=True)]
    once = intelligence_per_dollar(scores, costs)
    scaled = intelligence_per_dollar(scores, [cost * factor for cost in costs])
    assert once.value is not None
    assert once.ci95 is not None
    assert scaled.value == pytest.approx(once.value / factor)
    assert scaled.ci95 == pytest.approx([end / factor for end in once.ci95], abs=1e-6)


def test_interval_covers_the_truth_in_95_of_100_samples() -> None:
    """Score and cost correlate (long attempts fail), as they do in truth."""
    draws = np.random.default_rng(7)
    covered = 0
    for _ in range(1000):
        hard = draws.random(200)
        scores = (draws.random(200) > hard).astype(float)
        costs = 0.01 + 0.05 * hard
        result = intelligence_per_dollar(list(scores), list(costs))
        assert result.ci95 is not None
        covered += result.ci95[0] <= 0.5 / 0.035 <= result.ci95[1]
    assert 930 <= covered <= 970


def test_comparison_is_paired_seeded_and_brackets_the_ratio() -> None:
    draws = np.random.default_rng(3)
    hard = draws.random(300)
    before = (list((draws.random(300) > hard).astype(float)), list(0.01 + 0.05 * hard))
    better = [max(score, float(draws.random() < 0.3)) for score in before[0]]
    result = compare_intelligence(before, (better, before[1]), fixed_usd_per_attempt=0.001)
    assert result.ratio is not None
    assert result.ci95 is not None
    assert 1 < result.ci95[0] < result.ratio < result.ci95[1]
    assert result == compare_intelligence(before, (better, before[1]), fixed_usd_per_attempt=0.001)
    same = compare_intelligence(before, before)
    assert (same.ratio, same.ci95) == (1.0, (1.0, 1.0)), "paired: what both share does not blur the ratio"
    by_cluster = compare_intelligence(before, (better, before[1]), clusters=[index // 30 for index in range(300)])
    assert by_cluster.ratio is not None
