"""The canary's word: a fair game while the candidate does no harm, by closed form and simulation; harm is found soon."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from pydantic import ValidationError

from evergrad.evals import CanaryConfig, CanaryStep, EvalError, HarmTest, rule_on_canary
from evergrad.types import SessionOutcome, Side

BOTH = (Side.INCUMBENT, Side.CANDIDATE)


def session(number: int, side: Side, score: float | None, share: float) -> SessionOutcome:
    return SessionOutcome(f"s{number}", side, score, share)


@pytest.mark.parametrize(("share", "rates"), [(0.5, (0.7, 0.7)), (0.25, (0.6, 0.6)), (0.1, (0.3, 0.9))])
def test_the_expected_e_value_is_one_without_a_difference_and_less_where_the_candidate_is_better(
    share: float, rates: tuple[float, float]
) -> None:
    """Exact: over all ways in which seven sessions can go, each with its probability."""
    chance = dict(zip(BOTH, ((1 - share, rates[0]), (share, rates[1])), strict=True))
    expected, total = 0.0, 0.0
    for way in itertools.product(itertools.product(BOTH, (0.0, 1.0)), repeat=7):
        probability = math.prod(chance[side][0] * (chance[side][1] if score else 1 - chance[side][1]) for side, score in way)
        test = HarmTest()
        for number, (side, score) in enumerate(way):
            value = test.see(session(number, side, score, share))
        expected, total = expected + probability * value, total + probability
    assert total == pytest.approx(1)
    if rates[0] == rates[1]:
        assert expected == pytest.approx(1, abs=1e-12)
    else:
        assert expected < 1


def release(
    plan: CanaryConfig, draws: np.random.Generator, scores: dict[Side, Sequence[float]], faults: dict[Side, float] | None = None
) -> tuple[CanaryStep, list[SessionOutcome]]:
    """A whole release on simulated sessions, looked at after every one as :func:`rule_on_canary` looks at it."""
    faults = faults or dict.fromkeys(BOTH, 0.0)
    test, outcomes = HarmTest(plan.margin), list[SessionOutcome]()
    for share in plan.shares:
        scored = 0
        while scored < plan.outcomes:
            side = Side.CANDIDATE if draws.random() < share else Side.INCUMBENT
            score = None if draws.random() < faults[side] else float(draws.choice(scores[side]))
            outcomes.append(session(len(outcomes), side, score, share))
            if test.see(outcomes[-1]) >= 1 / plan.alpha:
                return CanaryStep.ROLL_BACK, outcomes
            scored += side is Side.CANDIDATE and score is not None
    return CanaryStep.WIDEN, outcomes


NULLS = {
    "as good": ([0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]),
    "always right": ([1.0], [1.0]),
    "graded": ([0.0, 0.2, 0.4, 1.0], [0.1, 0.7]),  # means of 0.4, and other spreads
    "better": ([0.0, 0.0, 1.0], [0.0, 1.0, 1.0]),
}


@pytest.mark.parametrize("name", NULLS)
@pytest.mark.parametrize("plan", [CanaryConfig(shares=(0.05, 0.25), outcomes=40), CanaryConfig(shares=(0.5,), outcomes=100)])
def test_a_harmless_candidate_is_seldom_rolled_back_however_often_one_looks(plan: CanaryConfig, name: str) -> None:
    draws = np.random.default_rng(7)
    scores = dict(zip(BOTH, NULLS[name], strict=True))
    ended = [release(plan, draws, scores, dict.fromkeys(BOTH, 0.1))[0] for _ in range(200)]
    # Two standard errors of a rate of 0.05 in 200 are 0.03; what is expected lies well below it.
    assert ended.count(CanaryStep.ROLL_BACK) / len(ended) <= 0.05


def test_the_default_plan_keeps_its_promise_under_the_null() -> None:
    draws, plan = np.random.default_rng(3), CanaryConfig()
    scores = {side: [0.0] + [1.0] * 9 for side in BOTH}
    assert sum(release(plan, draws, scores)[0] is CanaryStep.ROLL_BACK for _ in range(40)) / 40 <= 0.05


def test_what_befalls_both_sides_alike_is_no_harm() -> None:
    """Success falls from 95% to 20% in the middle of a stage, whoever answers."""
    draws, crossed = np.random.default_rng(13), 0
    for _ in range(200):
        test, fall = HarmTest(), draws.integers(100, 300)
        highest = 0.0
        for number in range(400):
            side = Side.CANDIDATE if draws.random() < 0.1 else Side.INCUMBENT
            rate = 0.95 if number < fall else 0.2
            highest = max(highest, test.see(session(number, side, float(draws.random() < rate), 0.1)))
        crossed += highest >= 20
    assert crossed / 200 <= 0.05


@pytest.mark.parametrize(
    ("scores", "faults"),
    [
        (([1.0, 1.0, 1.0, 0.0], [0.0]), (0.0, 0.0)),
        (([1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]), (0.0, 0.0)),
        (([1.0], [1.0]), (0.02, 0.8)),  # what it says is good, when it says anything
    ],
)
def test_harm_is_found_at_the_first_share(scores: tuple[list[float], list[float]], faults: tuple[float, float]) -> None:
    draws, plan = np.random.default_rng(5), CanaryConfig(shares=(0.05, 0.25), outcomes=50)
    for _ in range(20):
        step, outcomes = release(plan, draws, dict(zip(BOTH, scores, strict=True)), dict(zip(BOTH, faults, strict=True)))
        assert step is CanaryStep.ROLL_BACK
        assert outcomes[-1].share == 0.05
        # The word of the record is that of the process that made it, at the session that crossed.
        ruling = rule_on_canary(plan, outcomes, 0.05)
        assert ruling.step is CanaryStep.ROLL_BACK
        assert ruling.evidence["e_value"] >= 20
        assert rule_on_canary(plan, outcomes[:-1], 0.05).step is CanaryStep.HOLD


def test_a_margin_is_no_harm() -> None:
    draws = np.random.default_rng(11)
    scores = {Side.INCUMBENT: [1.0] * 10, Side.CANDIDATE: [1.0] * 9 + [0.0]}
    strict, lenient = (CanaryConfig(shares=(0.5,), outcomes=400, margin=margin) for margin in (0.0, 0.1))
    found = [[release(plan, draws, scores)[0] for _ in range(40)] for plan in (strict, lenient)]
    assert found[0].count(CanaryStep.ROLL_BACK) >= 36
    assert found[1].count(CanaryStep.ROLL_BACK) <= 4


def customer(number: int, side: Side, score: float | None, share: float) -> SessionOutcome:
    return SessionOutcome(f"customer-{number}", side, score, share, by_customer=True)


@pytest.mark.parametrize("shares", [(0.01,) * 6, (0.25, 0.25, 0.5, 0.5, 0.5, 0.9)])
@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_customers_who_come_as_they_choose_are_a_fair_game_over_the_coins_of_their_sides(
    shares: tuple[float, ...], margin: float
) -> None:
    """Exact: over all ways in which six coins can fall. What the next customer asks, and whether the loop plays in between,
    depends on everything so far, the coins included; the version itself makes no difference."""

    def next_one(so_far: Sequence[Side]) -> float | None:
        to_candidate = so_far.count(Side.CANDIDATE)
        return [1.0, 0.0, 0.5, None, 0.2, 0.0][(len(so_far) + 2 * to_candidate) % 6]

    expected, unweighed = 0.0, 0.0
    for coins in itertools.product(BOTH, repeat=len(shares)):
        test, chance = HarmTest(margin), 1.0
        for number, side in enumerate(coins):
            if number == coins.count(Side.CANDIDATE):
                test.see(session(number, Side.INCUMBENT, 1.0, shares[number]))
            value = test.see(customer(number, side, next_one(coins[:number]), shares[number]))
            chance *= shares[number] if side is Side.CANDIDATE else 1 - shares[number]
        expected, unweighed = expected + chance * value, unweighed + chance
    assert unweighed == pytest.approx(1)
    if margin == 0.0:
        assert expected == pytest.approx(1, abs=1e-12)
    else:
        assert expected < 1, "as good is better than what the margin allows"


def test_customers_who_come_because_of_what_was_said_to_others_are_no_harm() -> None:
    """Whoever comes soon after the candidate has spoken asks something easy, whoever comes late something hard; the version
    makes no difference. Each block of sessions would compare early ones with a late one, so customers are weighed by coins."""
    draws, crossed, blocks_crossed = np.random.default_rng(17), 0, 0
    for _ in range(60):
        test, blocks, since = HarmTest(), HarmTest(), 0
        highest = highest_of_blocks = 0.0
        for number in range(600):
            side = Side.CANDIDATE if draws.random() < 0.1 else Side.INCUMBENT
            score = float(draws.random() < (0.9 if since < 6 else 0.1))
            highest = max(highest, test.see(customer(number, side, score, 0.1)))
            highest_of_blocks = max(highest_of_blocks, blocks.see(session(number, side, score, 0.1)))
            since = 0 if side is Side.CANDIDATE else since + 1
        crossed += highest >= 20
        blocks_crossed += highest_of_blocks >= 20
    assert crossed / 60 <= 0.05
    assert blocks_crossed / 60 > 0.2, "or weights would not be needed"


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5])
def test_harm_to_customers_alone_is_found(share: float) -> None:
    """What the loop plays goes as well on either side; of its customers, the candidate's are failed."""
    draws, needed = np.random.default_rng(23), list[int]()
    for _ in range(20):
        test, met = HarmTest(), 0
        for number in range(100_000):
            side = Side.CANDIDATE if draws.random() < share else Side.INCUMBENT
            rate = 0.9 if side is Side.INCUMBENT else 0.2
            met += side is Side.CANDIDATE
            test.see(session(number, BOTH[number % 2], 1.0, share))
            if test.see(customer(number, side, float(draws.random() < rate), share)) >= 20:
                break
        needed.append(met)
    assert max(needed) <= 60, needed


def test_customers_whom_nobody_could_answer_are_harm_and_of_both_sides_alike_none() -> None:
    draws = np.random.default_rng(29)
    for faults, harmful in (((0.0, 0.6), True), ((0.3, 0.3), False)):
        test, highest = HarmTest(), 0.0
        for number in range(2000):
            side = Side.CANDIDATE if draws.random() < 0.25 else Side.INCUMBENT
            score = None if draws.random() < faults[side is Side.CANDIDATE] else 1.0
            highest = max(highest, test.see(customer(number, side, score, 0.25)))
        assert (highest >= 20) is harmful


def test_without_customers_all_is_as_it_was_and_with_them_half_is_staked_on_them() -> None:
    own, both = HarmTest(), HarmTest()
    harmed = list(in_turn([0.0] * 4, 0.5))
    for each in harmed:
        assert own.see(each) == both.see(each)
    won = own.e_value
    assert won > 1
    both.see(customer(0, Side.INCUMBENT, 0.5, 0.5))
    assert both.e_value == pytest.approx(won), "split, not spent: who scores what is expected changes nothing"
    for each in in_turn([0.0] * 4, 0.5, start=10):
        own.see(each)
        both.see(each)
    assert both.e_value == pytest.approx((own.e_value + won) / 2)


def test_the_word_of_a_canary_tells_customers_apart_and_waits_for_none() -> None:
    plan = CanaryConfig(shares=(0.5,), outcomes=2)
    own = list(in_turn([1.0, 1.0], 0.5))
    customers = [customer(number, BOTH[number % 2], 1.0, 0.5) for number in range(5)]
    held = rule_on_canary(plan, [*customers, *own[:2]], 0.5)
    assert held.step is CanaryStep.HOLD, "customers are not among the registered number"
    assert held.evidence["candidate"] == {"sessions": 1, "scored": 1, "mean": 1.0}
    assert held.evidence["customers"]["incumbent"] == {"sessions": 3, "scored": 3, "mean": 1.0}
    assert "; customers: candidate mean 1.000 of 2; incumbent mean 1.000 of 3; e = " in held.reason
    assert rule_on_canary(plan, [*customers, *own], 0.5).step is CanaryStep.WIDEN
    alone = rule_on_canary(plan, own, 0.5)
    assert "customers" not in alone.evidence
    assert "customers" not in alone.reason


def test_a_customer_for_whom_no_coin_was_tossed_says_nothing() -> None:
    for share in (0.0, 1.0):
        with pytest.raises(EvalError, match="could have come to either side"):
            HarmTest().see(customer(0, Side.INCUMBENT, 1.0, share))


def in_turn(scores: Sequence[float | None], share: float, start: int = 0) -> Iterator[SessionOutcome]:
    """A perfect session of the incumbent before each one of the candidate."""
    for number, score in enumerate(scores, start=start):
        yield session(2 * number, Side.INCUMBENT, 1.0, share)
        yield session(2 * number + 1, Side.CANDIDATE, score, share)


def test_a_stage_ends_with_its_registered_number_of_scored_sessions() -> None:
    plan = CanaryConfig(shares=(0.1, 0.5), outcomes=4)
    first = list(in_turn([1.0, 1.0, None, 1.0], 0.1))
    held = rule_on_canary(plan, first, 0.1)
    assert (held.step, held.reason.partition(":")[0]) == (CanaryStep.HOLD, "3 of 4 sessions at 0.1 of all")
    first += in_turn([1.0], 0.1, start=10)
    assert rule_on_canary(plan, first, 0.1).step is CanaryStep.WIDEN
    # What the first share brought counts for harm, and not for the number of the second.
    assert rule_on_canary(plan, first, 0.5).step is CanaryStep.HOLD
    assert rule_on_canary(plan, first, 0.5).evidence["candidate"] == {"sessions": 5, "scored": 4, "mean": 1.0}


def test_sessions_that_nobody_can_score_do_not_hold_a_release_for_ever() -> None:
    plan = CanaryConfig(shares=(0.5,), outcomes=3)
    both = [session(number, BOTH[number % 2], None, 0.5) for number in range(8)]
    assert rule_on_canary(plan, both[:6], 0.5).step is CanaryStep.HOLD
    ruling = rule_on_canary(plan, both, 0.5)
    assert ruling.step is CanaryStep.ROLL_BACK
    assert ruling.reason.startswith("4 of 4 sessions of the candidate could not be scored")
    assert ruling.evidence["e_value"] == 1.0, "not more often than the incumbent's: no harm, but no evidence either"


def test_what_is_no_score_or_no_plan_is_refused() -> None:
    with pytest.raises(EvalError, match=r"outside of \[0, 1\]"):
        HarmTest().see(session(0, Side.CANDIDATE, 1.5, 0.5))
    for shares in ([], [0.5, 0.1], [0.1, 0.1], [0.0, 0.5], [0.5, 1.0]):
        with pytest.raises(ValidationError, match="shares = "):
            CanaryConfig(shares=tuple(shares))
