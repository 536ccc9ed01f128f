"""Which tasks teach most per token: the closed forms, and an estimate that is better for following them."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.rollouts import SliceRecord, draw_slice, informative_group_probability, neyman_shares


@pytest.mark.parametrize(("rate", "chance"), [(0.02, 0.149), (0.1, 0.570), (0.5, 0.992), (0.0, 0.0), (1.0, 0.0)])
def test_the_chance_that_a_group_of_eight_teaches_something(rate: float, chance: float) -> None:
    assert informative_group_probability(rate, 8) == pytest.approx(chance, abs=0.0005)


def test_that_chance_is_what_drawing_groups_shows() -> None:
    successes = np.random.default_rng(0).binomial(4, 0.3, 20_000)
    assert np.mean((successes > 0) & (successes < 4)) == pytest.approx(informative_group_probability(0.3, 4), abs=0.01)


names = st.sampled_from("abcd")


@given(st.dictionaries(names, st.tuples(st.floats(0.01, 0.99), st.floats(1, 1e4), st.floats(0.01, 1)), min_size=2))
def test_no_other_shares_give_less_variance_for_the_same_tokens(slices: dict[str, tuple[float, float, float]]) -> None:
    """Variance of the mean over slices, Σ w²·p(1−p)/n, at a fixed Σ n·c: the optimum is a stationary point."""
    rates, tokens, weights = ({name: value[index] for name, value in slices.items()} for index in range(3))

    def variance(shares: dict[str, float]) -> float:
        spent = sum(share * tokens[name] for name, share in shares.items())
        return sum(weights[n] ** 2 * rates[n] * (1 - rates[n]) / shares[n] for n in slices) * spent

    best = neyman_shares(weights, rates, tokens)
    assert sum(best.values()) == pytest.approx(1)
    for name in slices:
        for factor in (0.7, 0.95, 1.05, 1.4):
            moved = {other: share * (factor if other == name else 1.0) for other, share in best.items()}
            assert variance(best) <= variance(moved) * (1 + 1e-9)


def test_slices_without_variance_leave_the_tasks_as_they_are() -> None:
    assert neyman_shares({"a": 0.7, "b": 0.3}, {"a": 1.0, "b": 0.0}, {"a": 1, "b": 1}) == {"a": 0.7, "b": 0.3}


def drawn(records: dict[str, SliceRecord], count: int = 2000) -> Counter[str]:
    shares = {"easy": 0.5, "hard": 0.5}
    return Counter(draw_slice(shares, records, Random(number)) for number in range(count))


def test_what_is_solved_gets_few_groups_and_is_not_forgotten() -> None:
    found = drawn({"easy": SliceRecord(200, 0, 20_000), "hard": SliceRecord(100, 100, 20_000)})
    assert 0.8 < found["hard"] / 2000 < 0.95
    assert found["easy"] > 2000 * 0.05


def test_what_costs_more_gets_fewer_groups() -> None:
    found = drawn({"easy": SliceRecord(100, 100, 20_000), "hard": SliceRecord(100, 100, 320_000)})
    even = 0.1 / 2  # of all groups, whatever they cost
    assert (found["easy"] / 2000 - even) / (found["hard"] / 2000 - even) == pytest.approx(4, rel=0.2), (
        "sixteen times the tokens"
    )


def test_what_is_unknown_is_tried() -> None:
    assert 0.4 < drawn({})["hard"] / 2000 < 0.6
    assert drawn({"easy": SliceRecord(100, 100, 20_000)})["hard"] > 500


def test_the_same_number_draws_the_same_slice() -> None:
    assert drawn({}, 50) == drawn({}, 50)


def test_a_record_fades() -> None:
    record = SliceRecord()
    record.add(4, 4, 800)
    record.fade()
    assert (record.successes, record.failures, record.tokens) == (pytest.approx(3.2), pytest.approx(3.2), pytest.approx(640))
