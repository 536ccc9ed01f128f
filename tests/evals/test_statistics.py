"""The statistics against published numbers, other implementations, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evergrad.evals import (
    EvalError,
    cost_per_success_ratio,
    gain_interval,
    mcnemar_p,
    non_inferiority_p,
    paired_difference,
    sample_size,
    sign_flip_p,
    wilson_interval,
)
from evergrad.evals.statistics import Z95, superiority_p, tango_interval


def arms(wins: int, losses: int, n: int) -> tuple[dict[str, float], dict[str, float]]:
    after = {str(i): float(i < wins or i >= wins + losses) for i in range(n)}
    before = {str(i): float(i >= wins) for i in range(n)}
    return after, before


def test_seventy_wins_and_thirty_losses_of_four_hundred() -> None:
    pairs = paired_difference(*arms(70, 30, 400))
    assert (pairs.n, pairs.wins, pairs.losses, pairs.binary) == (400, 70, 30, True)
    assert pairs.delta == pytest.approx(0.10)
    assert pairs.se == pytest.approx(0.0244949, abs=1e-7)
    assert pairs.ci95 == pytest.approx((0.05199, 0.14801), abs=5e-6)
    assert superiority_p(pairs) == ("exact McNemar", pytest.approx(7.850e-5, abs=5e-9))


def test_non_inferiority_of_twenty_wins_and_twenty_four_losses_of_six_hundred_fails() -> None:
    pairs = paired_difference(*arms(20, 24, 600))
    assert pairs.delta == pytest.approx(-0.00667, abs=5e-6)
    assert pairs.se == pytest.approx(0.01105, abs=5e-6)
    assert non_inferiority_p(pairs, 0.02) == pytest.approx(0.114, abs=5e-4)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_tail_written_out(wins: int, losses: int) -> None:
    total = wins + losses
    tail = sum(math.comb(total, k) for k in range(min(wins, losses) + 1)) / 2**total
    assert mcnemar_p(wins, losses) == pytest.approx(min(1.0, 2 * tail if wins != losses else 1.0))
    assert mcnemar_p(wins, losses) == mcnemar_p(losses, wins)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_standard_error_of_binary_scores_is_the_known_formula(wins: int, losses: int, same: int) -> None:
    n = wins + losses + same
    if n == 0:
        return
    pairs = paired_difference(*arms(wins, losses, n))
    assert pairs.se == pytest.approx(math.sqrt(max(0.0, wins + losses - (wins - losses) ** 2 / n)) / n, abs=1e-9)


scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 4)), min_size=1, max_size=30)


@given(scores)
def test_clustered_standard_error_is_the_double_sum_written_out(rows: list[tuple[float, float, int]]) -> None:
    after = {str(i): row[0] for i, row in enumerate(rows)}
    before = {str(i): row[1] for i, row in enumerate(rows)}
    clusters = {str(i): row[2] for i, row in enumerate(rows)}
    pairs = paired_difference(after, before, clusters)
    differences = [row[0] - row[1] for row in rows]
    mean = sum(differences) / len(rows)
    variance = (
        sum(
            (differences[i] - mean) * (differences[j] - mean)
            for i in range(len(rows))
            for j in range(len(rows))
            if rows[i][2] == rows[j][2]
        )
        / len(rows) ** 2
    )
    assert pairs.se == pytest.approx(math.sqrt(max(variance, 0.0)), abs=1e-7)


def test_clusters_of_eight_with_intracluster_correlation_widen_by_the_design_effect() -> None:
    """DEFF = 1 + (m − 1)ρ = 1.7 for m = 8, ρ = 0.1: the SE of 0.0245 becomes 0.0319 on average."""
    draws = np.random.default_rng(0)
    n, m, rho, total = 400, 8, 0.1, []
    for _ in range(300):
        shared = np.repeat(draws.normal(size=n // m), m)
        values = 0.0244949 * math.sqrt(n) * (math.sqrt(rho) * shared + math.sqrt(1 - rho) * draws.normal(size=n))
        pairs = paired_difference(
            {str(i): float(v) for i, v in enumerate(values)},
            {str(i): 0.0 for i in range(n)},
            {str(i): i // m for i in range(n)},
        )
        total.append(pairs.se**2)
    # The clustered estimate is biased down by the factor 1 − 1/clusters.
    assert math.sqrt(np.mean(total) / (1 - m / n)) == pytest.approx(0.03194, rel=0.02)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=9))
def test_sign_flips_of_few_are_all_flips(values: list[int]) -> None:
    moving = [value for value in values if value]
    sums = [sum(v * (1 if mask >> i & 1 else -1) for i, v in enumerate(moving)) for mask in range(2 ** len(moving))]
    seen = sum(values)
    expected = min(1.0, 2 * min(sum(s >= seen for s in sums), sum(s <= seen for s in sums)) / len(sums))
    assert sign_flip_p(values) == pytest.approx(expected)


def test_sign_flips_hold_their_level_and_see_a_shift() -> None:
    draws = np.random.default_rng(5)
    false_alarms = sum(sign_flip_p(draws.normal(size=30), seed=i) < 0.05 for i in range(100))
    assert false_alarms <= 12
    assert sign_flip_p(draws.normal(0.8, 1, size=60)) < 1e-3
    sample = draws.normal(0.3, 1, size=40)
    assert sign_flip_p(sample, seed=1) == sign_flip_p(sample, seed=1)


@given(st.integers(0, 40), st.integers(0, 40))
def test_one_sided_mcnemar_is_the_upper_tail_written_out(wins: int, losses: int) -> None:
    total = wins + losses
    tail = sum(math.comb(total, k) for k in range(wins, total + 1)) / 2**total
    assert mcnemar_p(wins, losses, "greater") == pytest.approx(tail)


def test_one_sided_sign_flips_count_only_gains() -> None:
    differences = [1.0] * 30 + [-1.0] * 14 + [0.0] * 60
    assert sign_flip_p(differences, alternative="greater") == pytest.approx(mcnemar_p(30, 14, "greater"), abs=0.003)
    assert sign_flip_p([-each for each in differences], alternative="greater") > 0.98
    assert sign_flip_p([3.0, 2.0, 1.0], alternative="greater") == pytest.approx(1 / 8)


def test_sign_flips_can_fall_below_any_level_they_are_held_against() -> None:
    gains = [0.5] * 40
    assert sign_flip_p(gains, alternative="greater") == pytest.approx(1e-4)
    assert sign_flip_p(gains, alternative="greater", level=1e-4) < 1e-5


def test_sample_size_of_the_worked_example() -> None:
    assert sample_size(0.05, 0.25) == 613, "612.07, rounded up"
    # By simulation: 25% of the tasks differ, the candidate wins 60% of those.
    draws = np.random.default_rng(9)
    wins, losses, _ = draws.multinomial(613, [0.15, 0.10, 0.75], size=4000).T
    z = (wins - losses) / np.sqrt(wins + losses - (wins - losses) ** 2 / 613)
    assert (z > 1.645).mean() == pytest.approx(0.80, abs=0.02)
    with pytest.raises(EvalError, match="no sample size"):
        sample_size(0.3, 0.2)


def test_bootstrap_of_clusters_covers_the_mean() -> None:
    draws, n, m, covered = np.random.default_rng(6), 240, 4, 0
    for repeat in range(150):
        shared = np.repeat(draws.normal(scale=0.2, size=n // m), m)
        values = {str(i): float(v) for i, v in enumerate(0.05 + shared + draws.normal(scale=0.2, size=n))}
        pairs = paired_difference(values, dict.fromkeys(values, 0.0), {name: int(name) // m for name in values})
        name, (low, high) = gain_interval(pairs, seed=repeat)
        covered += low <= 0.05 <= high
        assert name == "cluster bootstrap"
        assert (low, high) == pytest.approx(pairs.ci95, abs=0.02), "about that of the clustered standard error"
    assert 0.90 <= covered / 150 <= 0.99
    assert gain_interval(paired_difference(*arms(70, 30, 400))) == ("Tango score", tango_interval(70, 30, 400))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_the_score_interval_holds_what_the_score_test_does_not_reject(wins: int, losses: int, ties: int) -> None:
    n = wins + losses + ties
    assume(n > 0)
    low, high = tango_interval(wins, losses, n)
    assert -1 <= low < high <= 1
    assert low <= (wins - losses) / n <= high
    assert tango_interval(losses, wins, n) == pytest.approx((-high, -low), abs=1e-6)
    if wins == losses == 0:
        assert high == pytest.approx(Z95**2 / (n + Z95**2)), "its closed form"
    # The other way round: of all shares of losses that go with a difference at the end, the likeliest gives that score.
    if wins and losses:
        possible = np.linspace(max(0.0, -low), (1 - low) / 2, 20_000)[1:-1]
        chances = wins * np.log(possible + low) + losses * np.log(possible) + ties * np.log(1 - 2 * possible - low)
        likeliest = possible[chances.argmax()]
        z = (wins - losses - n * low) / math.sqrt(n * (2 * likeliest + low - low * low))
        assert z == pytest.approx(Z95, abs=0.05)


def test_the_score_interval_covers_where_the_normal_one_does_not() -> None:
    draws, n = np.random.default_rng(3), 48
    covered, normal = 0, 0
    for wins, losses, _ in draws.multinomial(n, [0.93, 0.01, 0.06], size=2000):
        pairs = paired_difference(*arms(int(wins), int(losses), n))
        low, high = tango_interval(int(wins), int(losses), n)
        covered += low <= 0.92 <= high
        normal += pairs.ci95[0] <= 0.92 <= pairs.ci95[1]
    assert covered / 2000 >= 0.94 > normal / 2000


def test_sign_flips_agree_with_mcnemar_on_binary_differences() -> None:
    differences = [1.0] * 30 + [-1.0] * 14 + [0.0] * 60
    assert sign_flip_p(differences) == pytest.approx(mcnemar_p(30, 14), abs=0.006)
    assert sign_flip_p([0.0, 0.0]) == sign_flip_p([3.0]) == sign_flip_p([]) == 1.0


def test_no_difference_at_all_still_needs_enough_tasks_for_a_guard() -> None:
    few, many = paired_difference(*arms(0, 0, 20)), paired_difference(*arms(0, 0, 96))
    assert non_inferiority_p(few, 0.05) == pytest.approx(0.95**20)
    assert non_inferiority_p(few, 0.05) > 0.05 > non_inferiority_p(many, 0.05)
    down = paired_difference({"a": 0.5, "b": 0.5}, {"a": 0.75, "b": 0.75})
    assert non_inferiority_p(down, 0.2) == 1.0
    assert non_inferiority_p(down, 0.3) == 0.0


def test_pairing_is_by_task_not_by_position() -> None:
    after = {"a": 1.0, "b": 0.0, "c": 1.0}
    pairs = paired_difference(after, dict(reversed(after.items())))
    assert (pairs.wins, pairs.losses) == (0, 0)
    with pytest.raises(EvalError, match="no common task"):
        paired_difference({"a": 1.0}, {"b": 1.0})
    with pytest.raises(EvalError, match="not finite"):
        paired_difference({"a": math.nan}, {"a": 1.0})


def test_cost_per_success_ratio_and_its_bound() -> None:
    draws = np.random.default_rng(11)
    names = [str(i) for i in range(400)]
    upper_covers = 0
    for _ in range(300):
        hard = draws.random(400)
        before = {n: float(v) for n, v in zip(names, draws.random(400) > hard * 0.8, strict=True)}
        after = {n: float(v) for n, v in zip(names, draws.random(400) > hard * 0.6, strict=True)}
        cost = {n: float(v) for n, v in zip(names, 0.01 + 0.02 * hard, strict=True)}
        dearer = {n: 1.1 * value for n, value in cost.items()}
        ratio, upper = cost_per_success_ratio(after, before, dearer, cost, 0.05)
        upper_covers += upper >= 1.1 * 0.6 / 0.7
        assert ratio < upper
    assert 270 <= upper_covers <= 298, "a one-sided 95% bound"
    nothing = dict.fromkeys(names, 0.0)
    assert cost_per_success_ratio(after, nothing, cost, cost, 0.05) == (0.0, 0.0)
    assert cost_per_success_ratio(nothing, after, cost, cost, 0.05) == (math.inf, math.inf)


def test_wilson_interval_against_known_values() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    with pytest.raises(EvalError):
        wilson_interval(3, 2)
