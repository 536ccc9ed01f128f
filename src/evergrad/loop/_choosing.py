"""Which way of getting better a cycle tries, or none: arms compete for the money by what their tries have gained so far."""

from __future__ import annotations

import dataclasses
from typing import Any

from evergrad.ledger import NOTHING, Choice, Try, choose_arm
from evergrad.loop._figures import count, usd
from evergrad.loop._folder import LoopState
from evergrad.loop._spending import budget_left
from evergrad.loop.config import RunConfig


def tries_on(state: LoopState, suite: str) -> list[Try]:
    """What later cycles have gained on a suite, and for how much; what was not promoted has gained nothing."""
    return [
        Try(row["arm"], max(0.0, row["score_after"] - row["score_before"]) if row["verdict"] == "promoted" else 0.0, row["usd"])
        for row in state.cycles
        if row.get("arm") is not None and row["usd"] is not None and row["suite"].partition("#")[0] == suite
    ]


def choose(config: RunConfig, state: LoopState, suite: str, spent: float | None, *, urgent: bool = False) -> Choice:
    """The arm of the next cycle.

    Args:
        config: With its arms, worth and hurdle.
        state: With the cycles so far.
        suite: What is deployed now; only tries on it count.
        spent: Dollars of the whole run.
        urgent: The world says that the service fails: what arms gained before says nothing of what they would gain now.
    """
    tries = [] if urgent else tries_on(state, suite)
    worth = None if config.worth is None else config.worth.usd_per_score
    left = budget_left(config, spent)
    return choose_arm(config.arm_names, tries, usd_per_score=worth, hurdle=config.budget.hurdle, budget_left=left)


def told(choice: Choice) -> str:
    """The choice in a sentence."""
    best = choice.values[0]
    if not best.tries:
        return f"{choice.arm} was not tried on this suite yet" if choice.arm != NOTHING else "no arm can be paid for"
    promised = f"{best.arm} may gain {best.gain_bound:.3f} at most for {usd(best.usd_bound)} at least"
    if choice.arm == NOTHING:
        return (
            f"doing nothing is worth most: {promised}, {count(best.value)} where more than {count(choice.needs)} is asked for"
        )
    return f"{promised}, the best of {len(choice.values)} and nothing"


def evidence(choice: Choice) -> dict[str, Any]:
    """The figures of a choice, for the record; JSON has no infinity, so what was never tried has no value."""
    values = [
        {**dataclasses.asdict(each), **({} if each.tries else {"gain_bound": None, "value": None})} for each in choice.values
    ]
    return {"arm": choice.arm, "arms": values, "needs": choice.needs}
