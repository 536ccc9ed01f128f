"""E-processes against the integral they stand for, their worked number, and simulation under the hypothesis."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from evergrad.evals import Bettor, EvalError, betting_e_process, fall_e_value, mixture_e_value, success_upper_bound


def test_seventy_wins_and_thirty_losses() -> None:
    assert mixture_e_value(70, 30) == pytest.approx(854.59, abs=0.005)
    assert mixture_e_value(0, 0) == 1.0
    assert mixture_e_value(30, 70) < 0.05
    assert mixture_e_value(0, 5000) >= 0.0, "no overflow, no NaN"
    with pytest.raises(EvalError):
        mixture_e_value(-1, 2)


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_mixture_is_the_mean_likelihood_ratio_over_win_rates_above_a_half(wins: int, losses: int) -> None:
    ratio, _ = quad(lambda p: 2 * (2 * p) ** wins * (2 * (1 - p)) ** losses, 0.5, 1.0, limit=200)
    assert mixture_e_value(wins, losses) == pytest.approx(ratio, rel=1e-6)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_mixture_is_a_fair_game_for_a_fair_coin(wins: int, losses: int) -> None:
    following = (mixture_e_value(wins + 1, losses) + mixture_e_value(wins, losses + 1)) / 2
    assert following == pytest.approx(mixture_e_value(wins, losses), rel=1e-9)


def test_the_mixture_crosses_seldom_under_the_hypothesis() -> None:
    draws = np.random.default_rng(0)
    wins = np.cumsum(draws.random((1500, 400)) < 0.5, axis=1)
    looks = np.arange(1, 401)
    # Crossing depends on the counts alone: find, for each number of looks, the fewest wins that cross 20.
    need = [next((w for w in range(n + 1) if mixture_e_value(w, n - w) >= 20), n + 1) for n in looks]
    assert (wins >= np.array(need)).any(axis=1).mean() == pytest.approx(0.034, abs=0.012)


@given(st.lists(st.floats(-1, 1), max_size=60), st.floats(-0.5, 0.5))
def test_a_bettor_never_goes_broke_and_never_looks_ahead(differences: list[float], threshold: float) -> None:
    path = betting_e_process(differences, threshold=threshold)
    assert all(value > 0 for value in path)
    assert betting_e_process(differences[: len(differences) // 2], threshold=threshold) == path[: len(differences) // 2]


@pytest.mark.parametrize("threshold", [0.0, -0.1])
def test_bets_cross_seldom_under_the_hypothesis(threshold: float) -> None:
    draws = np.random.default_rng(1)
    crossed = 0
    for _ in range(400):
        # Mean exactly at the threshold; graded, skewed, in [-1, 1].
        values = np.clip(threshold + (draws.beta(2, 5, size=200) - 2 / 7) * 0.9, -1, 1)
        crossed += max(betting_e_process(values, threshold=threshold)) >= 20
    assert crossed / 400 <= 0.05


def test_bets_find_a_gain_and_no_worse_than_a_margin() -> None:
    draws = np.random.default_rng(2)
    gains = draws.choice([-1.0, 0.0, 1.0], p=[0.1, 0.6, 0.3], size=400)
    assert max(betting_e_process(gains)) > 20
    level = draws.choice([-1.0, 0.0, 1.0], p=[0.02, 0.96, 0.02], size=400)
    assert max(betting_e_process(level)) < 20
    assert max(betting_e_process(level, threshold=-0.1)) > 20, "not worse by ten points"


def test_bets_by_hand() -> None:
    # m = 1/2. First stake 0 (nothing seen); then the mean of one imagined 1/2 and one 1 is 3/4, variance 3/16: Kelly's
    # stake 0.25 / (3/16 + 1/16) = 1, which is the most that is allowed.
    bettor = Bettor()
    assert [bettor.see(value) for value in (1.0, 1.0, -1.0)] == pytest.approx([1.0, 1.5, 0.75])


def test_a_win_that_no_float_could_hold_is_a_finite_one() -> None:
    value = mixture_e_value(2000, 0)
    assert math.isfinite(value)
    assert mixture_e_value(900, 0) <= value
    path = betting_e_process([1.0] * 4000)
    assert math.isfinite(path[-1])
    assert path == sorted(path)
    assert betting_e_process([1.0] * 4000 + [-1.0])[-1] < path[-1], "and may still be lost again"


def test_what_is_no_difference_of_scores_is_refused() -> None:
    for bad in (2.0, math.nan, -1.5):
        with pytest.raises(EvalError, match="outside of"):
            betting_e_process([bad])
    with pytest.raises(EvalError, match="threshold"):
        Bettor(1.0)


@pytest.mark.parametrize(("successes", "failures", "rate"), [(0, 3, 0.9), (5, 2, 0.8), (20, 4, 0.97)])
def test_the_e_value_of_a_fall_is_the_mixture_over_lower_rates(successes: int, failures: int, rate: float) -> None:
    whole, _ = quad(lambda q: (q / rate) ** successes * ((1 - q) / (1 - rate)) ** failures / rate, 0, rate)
    assert fall_e_value(successes, failures, rate) == pytest.approx(whole, rel=1e-6)


def test_the_upper_bound_is_where_the_e_value_crosses() -> None:
    for successes, failures in ((0, 24), (3, 21), (20, 4), (90, 10)):
        bound = success_upper_bound(successes, failures, 0.01)
        assert fall_e_value(successes, failures, bound) == pytest.approx(100, rel=1e-6)
        assert bound > successes / (successes + failures)
    assert success_upper_bound(24, 0, 0.01) == 1.0


def test_a_rate_that_has_not_fallen_is_accused_no_more_often_than_it_may_however_often_one_looks() -> None:
    rng, accused, trials = Random(4), 0, 400
    for _ in range(trials):
        successes = 0
        for request in range(1, 401):
            successes += rng.random() < 0.9
            if fall_e_value(successes, request - successes, 0.9) >= 20:
                accused += 1
                break
    assert accused / trials <= 0.05


def test_a_fall_to_two_thirds_is_seen_within_four_checks() -> None:
    rng = Random(5)
    seen = 0
    for _ in range(100):
        successes = sum(rng.random() < 0.6 for _ in range(96))
        seen += success_upper_bound(successes, 96 - successes, 0.01) < 0.9
    assert seen >= 95
