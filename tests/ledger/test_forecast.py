"""Forecast and stop rule: the closed forms, and intervals that hold what they promise on recorded and simulated curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.bench_forecast import SEEN_SHARES, recorded_curves, recorded_hits, simulated_hits
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.ledger import Curve, Estimate, Forecast, LedgerError, fit_forecast, next_dollar, worthwhile_until

REFERENCE = Curve(start=0.5, ceiling=0.8, midpoint_usd=1000.0, steepness=1.0)
WORTH = 10_000.0


def certain(curve: Curve, spent_usd: float) -> Forecast:
    """A forecast whose replicates all agree."""
    row = (curve.start, curve.ceiling, curve.midpoint_usd, curve.steepness)
    return Forecast(curve, spent_usd, 10, 0.0, np.array([row] * 5))


@given(st.floats(0.0, 0.5), st.floats(0.5, 1.0), st.floats(0.1, 1e4), st.floats(0.3, 4.0), st.floats(0.01, 1e5))
def test_the_slope_is_the_derivative(start: float, ceiling: float, midpoint: float, steepness: float, usd: float) -> None:
    curve, step = Curve(start, ceiling, midpoint, steepness), 1e-5 * usd
    numeric = (curve.reward(usd + step) - curve.reward(usd - step)) / (2 * step)
    assert curve.slope(usd) == pytest.approx(numeric, rel=1e-3, abs=1e-9 / usd)


def test_stops_where_the_reference_stops() -> None:
    """R₀ = 0.5, A = 0.8, C_mid = $1,000, B = 1, V·N = $10,000, no hurdle: $732.05, which is 1000·(√3 − 1)."""
    assert 1000 * (math.sqrt(3) - 1) == pytest.approx(732.05, abs=0.005)
    assert WORTH * REFERENCE.slope(732.05) == pytest.approx(1.0, abs=1e-5)
    assert next_dollar(certain(REFERENCE, 731.0), WORTH).pays
    assert not next_dollar(certain(REFERENCE, 733.0), WORTH).pays
    until = worthwhile_until(certain(REFERENCE, 1.0), WORTH, from_usd=1.0, until_usd=5000.0)
    assert until == pytest.approx(732.05, abs=0.05)


def test_a_hurdle_stops_earlier_and_a_budget_earlier_still() -> None:
    curve = certain(REFERENCE, 1.0)
    spent = worthwhile_until(curve, WORTH, from_usd=1.0, until_usd=5000.0, hurdle=0.5)
    assert WORTH * REFERENCE.slope(spent) == pytest.approx(1.5, rel=1e-3)
    assert worthwhile_until(curve, WORTH, from_usd=1.0, until_usd=300.0) == 300.0
    assert worthwhile_until(curve, 1.0, from_usd=1.0, until_usd=300.0) == 1.0, "nothing pays"
    assert worthwhile_until(curve, WORTH, from_usd=400.0, until_usd=300.0) == 400.0


def test_a_curve_that_has_yet_to_rise_is_not_stopped() -> None:
    late = Curve(0.1, 0.9, 1000.0, 6.0)
    assert WORTH * late.slope(200.0) < 1
    assert next_dollar(certain(late, 200.0), WORTH, until_usd=2000.0).pays
    assert not next_dollar(certain(late, 200.0), WORTH, until_usd=210.0).pays, "the budget ends before it rises"


def test_it_is_the_lower_bound_that_must_clear_the_hurdle() -> None:
    steep, flat = (0.5, 0.8, 1000.0, 1.0), (0.5, 0.501, 1000.0, 1.0)
    unsure = Forecast(REFERENCE, 100.0, 10, 0.0, np.array([steep] * 90 + [flat] * 10))
    found = next_dollar(unsure, WORTH)
    assert found.brings.value > 2
    assert not found.pays


def test_a_fit_finds_the_curve_that_made_the_steps() -> None:
    truth = Curve(0.2, 0.7, 0.4, 2.0)
    usd = [0.05 * step for step in range(1, 41)]
    draws = np.random.default_rng(0)
    forecast = fit_forecast(usd, [truth.reward(amount) + draws.normal(0, 0.02) for amount in usd])
    assert forecast is not None
    assert forecast.curve.ceiling == pytest.approx(0.7, abs=0.03)
    assert forecast.curve.midpoint_usd == pytest.approx(0.4, abs=0.05)
    assert forecast.ceiling.low < 0.7 < forecast.ceiling.high < 0.8
    assert forecast.noise == pytest.approx(0.02, abs=0.008)
    exact = [fit_forecast(usd, [truth.reward(amount) for amount in usd]) for _ in range(2)]
    assert exact[0] is not None
    assert exact[1] is not None
    assert exact[0].ceiling == exact[1].ceiling, "the same steps and seed give the same interval"


def test_what_few_steps_do_not_say_stays_wide() -> None:
    rising = fit_forecast([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.1, 0.12, 0.15, 0.17, 0.2, 0.22])
    assert rising is not None
    assert rising.ceiling.high - rising.ceiling.low > 0.4
    assert fit_forecast([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=5, max_size=20), st.floats(1e-6, 1e6))
def test_any_rewards_give_finite_ordered_figures_in_any_currency(rewards: list[float], unit: float) -> None:
    usd = [unit * step for step in range(1, len(rewards) + 1)]
    forecast = fit_forecast(usd, rewards)
    assert forecast is not None
    for found in (forecast.reward(2 * usd[-1]), forecast.gain(usd[-1], 2 * usd[-1]), forecast.ceiling, forecast.marginal()):
        assert all(map(math.isfinite, (found.value, found.low, found.high)))
        assert found.low <= found.high
    assert 0 <= forecast.ceiling.low <= forecast.ceiling.high <= 1
    assert forecast.gain(usd[-1], 2 * usd[-1]).low >= 0


def test_rewards_of_another_scale_are_fitted_alike() -> None:
    usd, rewards = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.2, 0.3, 0.5, 0.5, 0.6, 0.7]
    plain, scaled = fit_forecast(usd, rewards), fit_forecast(usd, [10 * r - 5 for r in rewards], bounds=(-5.0, 5.0))
    assert plain is not None
    assert scaled is not None
    assert scaled.reward(9.0).low == pytest.approx(10 * plain.reward(9.0).low - 5, abs=1e-6)


@pytest.mark.parametrize(
    ("usd", "rewards"),
    [([1.0, 2.0], [0.1]), ([2.0, 1.0], [0.1, 0.2]), ([0.0, 1.0], [0.1, 0.2]), ([1.0, 2.0], [0.1, math.nan])],
)
def test_broken_steps_are_refused(usd: list[float], rewards: list[float]) -> None:
    with pytest.raises(LedgerError):
        fit_forecast(usd, rewards)


def test_intervals_hold_the_later_steps_of_recorded_curves() -> None:
    hits = [hit for share in SEEN_SHARES for hit in recorded_hits(recorded_curves(), share)]
    assert len(hits) > 300
    assert np.mean(hits) >= 0.85


def test_intervals_hold_the_truth_of_simulated_curves() -> None:
    assert np.mean(simulated_hits(100, seed=1)) >= 0.85


def test_an_estimate_scales() -> None:
    assert Estimate(1.0, 0.5, 2.0).times(2) == Estimate(2.0, 1.0, 4.0)
