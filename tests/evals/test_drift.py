"""Input drift and saturation: exact levels, power against a real change, and what numbers in a text may not do."""

from __future__ import annotations

from random import Random

import pytest

from evergrad.evals import EvalError, drift_level, drift_p, error_reduction, is_saturated

VERBS = ("refund", "cancel", "find", "status")


def requests(rng: Random, n: int, verbs: tuple[str, ...] = VERBS) -> list[str]:
    return [f"Please {rng.choice(verbs)} the lamp of order K{rng.randint(10, 999)}." for _ in range(n)]


def test_texts_drawn_alike_alarm_no_more_often_than_they_may() -> None:
    rng = Random(0)
    p_values = [drift_p(requests(rng, 24), requests(rng, 96), seed=trial) for trial in range(120)]
    assert sum(p <= 0.1 for p in p_values) / 120 <= 0.17  # binomial: more is rarer than one in a hundred
    assert sum(p <= 0.5 for p in p_values) / 120 >= 0.35


def test_another_mix_and_other_words_are_found() -> None:
    rng = Random(1)
    reference = requests(rng, 96)
    assert drift_p(requests(rng, 24, ("find", "status")), reference) < 0.005
    assert drift_p([each.replace("lamp", "left half of the lamp") for each in requests(rng, 24)], reference) < 0.001


def test_numbers_are_no_drift_and_the_same_call_says_the_same() -> None:
    assert drift_p(["order 5"] * 24, ["order 9"] * 96) == 1.0
    rng = Random(2)
    seen, reference = requests(rng, 24), requests(rng, 96)
    assert drift_p(seen, reference, seed=3) == drift_p(seen, reference, seed=3)
    with pytest.raises(EvalError, match="0 texts against 1"):
        drift_p([], ["a"])


def test_the_levels_of_all_looks_sum_to_alpha() -> None:
    assert sum(drift_level(0.01, look) for look in range(1, 10_000)) == pytest.approx(0.01, rel=1e-3)


def test_a_suite_with_nothing_left_is_saturated_and_a_few_tasks_decide_nothing() -> None:
    assert is_saturated(1.0, 30)
    assert not is_saturated(1.0, 29)
    assert not is_saturated(0.95, 1000)
    assert not is_saturated(None, 96)
    assert error_reduction(0.90, 0.95) == pytest.approx(0.5)
    assert error_reduction(1.0, 1.0) is None, "a report of a perfect incumbent is a report, too"
