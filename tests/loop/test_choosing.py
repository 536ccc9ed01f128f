"""Which arm the next cycle tries: what was learned before the world changed does not count, and what was learned since does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from evergrad.loop._choosing import choose, told
from evergrad.loop._folder import LoopState, Stage
from evergrad.loop.config import RunConfig

CONFIG = RunConfig.model_validate({"environment": {"name": "reasoning"}})


def ended(state: LoopState, arm: str, verdict: str, fired: str, *, gain: float = 0.0, usd: float = 0.01) -> None:
    """A cycle that tried ``arm``, and what set off the next one."""
    row = {"cycle": state.cycle, "arm": arm, "suite": "s", "score_before": 0.2, "score_after": 0.2 + gain}
    state.cycles.append({**row, "verdict": verdict, "usd": usd})
    decided: dict[str, Any] = {"cycle": state.cycle, "stage": Stage.WATCH.value, "evidence": {"fired": [fired]}}
    state.decisions.append(decided)
    state.cycle, state.trigger_kinds = state.cycle + 1, [fired]


def chosen(state: LoopState, *arms: str) -> str:
    return choose(CONFIG, state, "s", None, arms, urgent="contract" in state.trigger_kinds).arm


def test_while_the_service_fails_each_arm_is_tried_before_any_comes_again() -> None:
    state = LoopState(cycle=2)
    ended(state, "cheap", "promoted", "contract", gain=0.4)
    tried = []
    for _ in range(3):
        tried.append(chosen(state, "cheap", "dear", "dearest"))
        ended(state, tried[-1], "refused", "contract")
    assert tried == ["cheap", "dear", "dearest"], "what cheap gained before is forgotten, that it failed since is not"


def test_a_promotion_ends_what_was_known_of_the_failure() -> None:
    state = LoopState(cycle=2)
    ended(state, "a", "refused", "contract")
    ended(state, "b", "promoted", "contract", gain=0.5)
    assert chosen(state, "a", "b") == "a", "another failure: nothing was tried against it"


@pytest.mark.parametrize("seed", range(20))
def test_no_arm_starves_while_the_service_fails(seed: int) -> None:
    draws, state = random.Random(seed), LoopState(cycle=2)
    arms = [f"arm-{number}" for number in range(draws.randint(2, 5))]
    for _ in range(draws.randint(0, 4)):
        ended(state, draws.choice(arms), "refused", "schedule", usd=draws.uniform(0.001, 1.0))
    ended(state, arms[0], draws.choice(["refused", "promoted"]), "contract")
    tried = set()
    for _ in arms:
        arm = chosen(state, *arms)
        tried.add(arm)
        ended(state, arm, "refused", "contract", usd=draws.uniform(0.001, 1.0))
    assert tried == set(arms)


def test_the_words_say_since_when_an_arm_was_not_tried() -> None:
    state = LoopState(cycle=2)
    ended(state, "a", "refused", "schedule")
    ended(state, "a", "refused", "contract")
    choice = choose(CONFIG, state, "s", None, ["a"], urgent=True)
    assert told(choice, urgent=True) == "a was not tried since this began"
