"""Which way of getting better a cycle tries, or none: arms compete for the money by what their tries have gained so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from evergrad.ledger import NOTHING, Choice, Try, choose_arm
from evergrad.loop._figures import count, usd
from evergrad.loop._folder import LoopState
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._spending import budget_left
from evergrad.loop.config import RunConfig
from evergrad.registry import Registry


def tries_on(state: LoopState, suite: str) -> list[Try]:
    """What later cycles have gained on a suite, and for how much; what was not promoted has gained nothing."""
    return [
        Try(row["arm"], max(0.0, row["score_after"] - row["score_before"]) if row["verdict"] == "promoted" else 0.0, row["usd"])
        for row in state.cycles
        if row.get("arm") is not None and row["usd"] is not None and row["suite"].partition("#")[0] == suite
    ]


def open_arms(config: RunConfig, state: LoopState, registry: Registry, suite: str) -> dict[str, str]:
    """The arms that have something left to try, with the system prompt that each would try: empty for one that trains.

    A text is tried once over the weights that serve, on any draw of ``suite``. Other weights may make more of it, so their
    promotion opens all texts again.
    """
    found = dict.fromkeys((name for name in config.arm_names if not config.prompts_of(name)), "")
    serves = registry.resolve(PRODUCTION)
    if serves is None:
        return found
    served = registry.get(serves)
    candidates = [registry.get(row["candidate"]) for row in state.cycles if row["suite"].partition("#")[0] == suite]
    tried = {each.system_prompt for each in (served, *candidates) if each.weights_uri == served.weights_uri}
    left = {name: [text for text in config.prompts_of(name) if text not in tried] for name in config.arm_names}
    found |= {name: texts[0] for name, texts in left.items() if texts}
    return {name: found[name] for name in config.arm_names if name in found}  # in their order, which breaks ties


def choose(
    config: RunConfig,
    state: LoopState,
    suite: str,
    spent: float | None,
    arms: Sequence[str],
    *,
    urgent: bool = False,
) -> Choice:
    """The arm of the next cycle.

    Args:
        config: With its arms, worth and hurdle.
        state: With the cycles so far.
        suite: What is deployed now; only tries on it count.
        spent: Dollars of the whole run.
        arms: Those that have something left to try.
        urgent: The world says that the service fails: what arms gained before says nothing of what they would gain now.
    """
    tries = [] if urgent else tries_on(state, suite)
    worth = None if config.worth is None else config.worth.usd_per_score
    left = budget_left(config, spent)
    if not arms:
        return Choice(NOTHING, (), 0.0)
    return choose_arm(arms, tries, usd_per_score=worth, hurdle=config.budget.hurdle, budget_left=left)


def told(choice: Choice) -> str:
    """The choice in a sentence."""
    if not choice.values:
        return "every prompt was tried over these weights, and there is no other arm"
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
