"""The choice among arms: what paid is tried again, what was never tried gets its turn, and doing nothing can win."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evergrad.ledger import NOTHING, LedgerError, Try, choose_arm
from evergrad.ledger.arms import WINDOW


def test_what_was_never_tried_comes_first_in_the_order_of_its_line() -> None:
    choice = choose_arm(["rl", "sft"], [])
    assert choice.arm == "rl"
    assert math.isinf(choice.values[0].value)
    assert choose_arm(["rl", "sft"], [Try("rl", 0.5, 1.0)]).arm == "sft"


def test_the_figures_of_a_choice_by_hand() -> None:
    tries = [Try("rl", 0.10, 2.0), Try("sft", 0.04, 0.5), Try("rl", 0.06, 2.0)]
    choice = choose_arm(["rl", "sft"], tries, usd_per_score=100.0)
    width = {"rl": math.sqrt(2 * math.log(3) / 2), "sft": math.sqrt(2 * math.log(3))}
    found = {each.arm: each for each in choice.values}
    assert found["rl"].gain_bound == pytest.approx(0.08 + width["rl"] * math.sqrt((2 * 0.02**2 + 0.05**2) / 3))
    assert found["rl"].usd_bound == pytest.approx(2.0 - width["rl"] * math.sqrt(0.5**2 / 3))
    gain, usd = 0.04 + width["sft"] * math.sqrt(0.05**2 / 2), 0.5 - width["sft"] * math.sqrt(0.125**2 / 2)
    assert found["sft"].value == pytest.approx(100 * gain / usd)
    assert (choice.arm, choice.needs) == ("sft", 1.0)


def test_doing_nothing_wins_when_no_arm_is_worth_its_price() -> None:
    tries = [Try("rl", 0.0, 10.0)] * 4 + [Try("sft", 0.0, 5.0)] * 4
    assert choose_arm(["rl", "sft"], tries, usd_per_score=20.0).arm == NOTHING
    assert choose_arm(["rl", "sft"], tries, usd_per_score=2000.0).arm == "sft"
    assert choose_arm(["rl", "sft"], tries, usd_per_score=2000.0, hurdle=1000.0).arm == NOTHING
    assert choose_arm(["rl", "sft"], tries).arm == "sft", "without a worth, what may gain is tried"
    assert choose_arm(["rl"], [Try("rl", -0.5, 1.0)] * 9).arm == NOTHING, "and what can only lose is not"


def test_an_arm_that_cannot_be_paid_takes_no_part() -> None:
    tries = [Try("rl", 0.9, 10.0)] * 3 + [Try("sft", 0.001, 1.0)] * 3
    assert choose_arm(["rl", "sft"], tries).arm == "rl"
    assert choose_arm(["rl", "sft"], tries, budget_left=2.0).arm == "sft"
    assert choose_arm(["rl", "sft"], tries, budget_left=0.1).arm == NOTHING


def test_what_paid_long_ago_is_forgotten() -> None:
    lately = [Try("rl", 0.0, 1.0)] * WINDOW + [Try("sft", 0.02, 1.0)] * WINDOW
    assert choose_arm(["rl", "sft"], [*[Try("rl", 0.5, 1.0)] * 50, *lately]).arm == "sft"


def test_tries_of_arms_that_are_gone_do_not_count() -> None:
    assert choose_arm(["rl"], [Try("gone", 0.9, 1.0)]) == choose_arm(["rl"], [])


@pytest.mark.parametrize("arms", [[], ["rl", NOTHING], ["rl", "rl"]])
def test_arms_must_be_some_and_differ(arms: list[str]) -> None:
    with pytest.raises(LedgerError, match="cannot choose"):
        choose_arm(arms, [])


def test_a_try_without_a_price_is_refused() -> None:
    with pytest.raises(LedgerError, match="finite"):
        choose_arm(["rl"], [Try("rl", math.nan, 1.0)])


def test_over_many_cycles_the_money_goes_to_the_arm_that_pays_and_then_to_none() -> None:
    """Arms of true gain per dollar 0.0025, 0.04 and 0.005 at first; later nothing gains any more."""
    draws, tries, chosen = np.random.default_rng(5), [], []
    truth = {"prompt": (0.001, 0.4), "rl": (0.08, 2.0), "sft": (0.01, 2.0)}
    for cycle in range(200):
        arm = choose_arm(list(truth), tries, usd_per_score=30.0).arm
        chosen.append(arm)
        if arm == NOTHING:
            break
        gain, usd = truth[arm]
        tries.append(Try(arm, max(0.0, draws.normal(gain, 0.01)) if cycle < 60 else 0.0, usd))
    assert chosen[:60].count("rl") > 40
    assert chosen[:60].count("sft") < 10
    assert chosen[-1] == NOTHING
    assert 60 < len(chosen) < 120
