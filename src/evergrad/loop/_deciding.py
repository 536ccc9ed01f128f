"""DECIDE: whether this cycle trains at all.

Consumes the trigger and what is on record; waits for nothing; unblocks WARM_START; or MEASURE where a system prompt is tried,
and MERGE where weights are merged, which train nothing; or WATCH where nothing would be bought: the suite is saturated and
nothing could serve it for less, its verifier was convicted by a gold audit and has not been repaired since, or no way of
getting better is worth its price.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from evergrad.evals import SATURATED_ABOVE, is_saturated
from evergrad.ledger import NOTHING
from evergrad.loop._choosing import Proposal, choose, evidence, open_arms, told
from evergrad.loop._folder import Stage
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.loop.decisions import Decision
from evergrad.loop.triggers import URGENT


async def decide(session: Session) -> Decision:
    """The first stage of each cycle."""
    state, suite = session.state, session.suite(session.state.deployed)
    state.arm, state.merge = None, {}
    serves = session.registry.resolve(PRODUCTION)
    served = session.registry.get(serves) if serves is not None else None
    state.system_prompt = served.system_prompt if served is not None else ""
    _turn_to(session, served.base_model if served is not None else session.config.model)
    why = session.distrust(state.deployed)
    if why is not None:
        text = f"no training on {suite}, whose rewards are not to be trusted: {why}"
        return _told(session, Decision(Stage.WATCH, "no training", text, {"suite": suite}))
    if session.config.is_trial(state.cycle):
        return Decision(
            Stage.WARM_START, "train", f"the configuration has a recipe for cycle {state.cycle}", _evidence(session)
        )
    row = last_score(session, suite)
    urgent = URGENT & set(state.trigger_kinds)
    arms = {} if state.cycle == 1 else open_arms(session.config, state, session.registry, suite, session.folder.path)
    saturated = row is not None and not urgent and is_saturated(row["mean"], row["n"])
    # Where no score can rise a lower cost can be had; where the service fails, what it costs is not what matters.
    aims = {"cost"} if saturated else {"score"} if urgent else {"score", "cost"}
    arms = {name: proposal for name, proposal in arms.items() if proposal.aim in aims}
    if row is not None and saturated and not arms:
        text = (
            f"{suite} is saturated and retired: {row['version_id']} scores {row['mean']:.3f} on {row['n']} tasks, above "
            f"{SATURATED_ABOVE:g}, so that no candidate could show a gain; it stays a guard"
        )
        return _told(session, Decision(Stage.WATCH, "retired", text, _evidence(session)))
    if state.cycle == 1:
        return Decision(Stage.WARM_START, "train", state.trigger, _evidence(session))
    choice = choose(session.config, state, suite, session.spent_usd(), list(arms), urgent=bool(urgent))
    figures = {**_evidence(session), **evidence(choice)}
    if choice.arm == NOTHING:
        return _told(session, Decision(Stage.WATCH, NOTHING, told(choice, urgent=bool(urgent)), figures))
    state.arm = choice.arm
    return _tries(session, arms[choice.arm], f"{state.trigger}: {told(choice, urgent=bool(urgent))}", figures)


def _tries(session: Session, proposal: Proposal, why: str, figures: dict[str, Any]) -> Decision:
    """The way of the arm that was chosen."""
    state, prompt, merge = session.state, proposal.prompt, proposal.merge
    if merge is not None:
        state.merge = dataclasses.asdict(merge)
        session.event(f"cycle {state.cycle} tries a merge, and trains nothing: {merge.told}")
        return Decision(Stage.MERGE, "merge", why, {**figures, "merge": dict(state.merge)})
    if prompt:
        state.system_prompt = prompt
        session.event(f"cycle {state.cycle} tries a system prompt, and trains nothing: {prompt.splitlines()[0][:80]}")
        return Decision(Stage.MEASURE, "prompt", why, {**figures, "system_prompt": prompt})
    if proposal.base_model:
        _turn_to(session, proposal.base_model)
        session.event(f"cycle {state.cycle} tries to serve for less: it trains {proposal.base_model} from its beginning")
        return Decision(Stage.WARM_START, "smaller", why, {**figures, "base_model": proposal.base_model})
    return Decision(Stage.WARM_START, "train", why, figures)


def _turn_to(session: Session, base_model: str) -> None:
    """The base model of what this cycle makes; a checkpoint of another one is nothing to go on from."""
    if base_model != session.base:
        session.state.checkpoint = None
    session.state.base_model = base_model


def last_score(session: Session, suite: str) -> dict[str, Any] | None:
    """The last evaluation of what serves on any draw of a suite; ``None`` where there is none."""
    served = session.registry.resolve(PRODUCTION)
    rows = [
        row
        for row in session.state.scores
        if row["version_id"] == served and "suite_hash" in row and row["suite"].partition("#")[0] == suite
    ]
    return rows[-1] if rows else None


def _told(session: Session, decision: Decision) -> Decision:
    session.event(f"cycle {session.state.cycle} does not train: {decision.why}")
    return decision


def _evidence(session: Session) -> dict[str, Any]:
    state, suite = session.state, session.suite(session.state.deployed)
    row = last_score(session, suite)
    return {
        "trigger": state.trigger,
        "triggers": list(state.trigger_kinds),
        "suite": suite,
        "serves": session.registry.resolve(PRODUCTION),
        "score": row["mean"] if row else None,
        "n": row["n"] if row else 0,
        "saturated_above": SATURATED_ABOVE,
    }
