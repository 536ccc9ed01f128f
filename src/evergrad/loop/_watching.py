"""WATCH: live traffic against the served version, and what in it starts the next cycle.

Consumes live rollouts, and with each check what customers' stored conversations have come to since; waits for
``watch.requests`` rollouts per check; a trigger unblocks the next cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evergrad.loop._folder import LoopState, Stage
from evergrad.loop._playing import play
from evergrad.loop._scores import customers_row, keep_row, live_row, speaking_row
from evergrad.loop._session import Session
from evergrad.loop._spending import unspent
from evergrad.loop.decisions import Decision
from evergrad.loop.pausing import Paused, request_pause
from evergrad.loop.quarantine import breaking_changes
from evergrad.loop.traffic import CustomerOutcomes
from evergrad.loop.triggers import Live, drift_of, fired
from evergrad.types import ModelVersion, Rollout

REFERENCE_TASKS = 96
"""Of the environment's own requests, with which those of customers are compared."""


async def watch(session: Session) -> Decision:
    """Checks traffic until something triggers a cycle, or nothing more can happen in this run."""
    state, config = session.state, session.config
    await session.follow()
    while config.watch.requests:
        session.safe_point()
        await session.follow()
        asked = {**state.deployed, **state.customers}
        rollouts = await serve_traffic(session, asked, config.watch.requests, check=state.watch_checks)
        triggers = await _judge(session, rollouts)
        state.watch_checks += 1
        distrust = session.distrust(state.deployed)
        if triggers and distrust is None:
            return _next_cycle(session, triggers)
        if not _apply_change(session):
            if distrust is not None:
                _wait_for_repair(session, distrust)
            if state.watch_checks >= config.watch.every:
                break
        session.save_state()
    return _next_cycle(session, {"schedule": "schedule"})


def _wait_for_repair(session: Session, why: str) -> None:
    """Pauses the run: neither training nor traffic says anything while the rewards of what is deployed are wrong.

    Raises:
        Paused: always.
    """
    suite = session.suite(session.state.deployed)
    reason = f"the rewards of {suite} are not to be trusted ({why}); repair the verifier, then resume"
    session.event(f"the run pauses itself: {reason}")
    session.save_state()
    raise Paused(request_pause(session.folder.path, reason))


async def serve_traffic(session: Session, settings: Mapping[str, Any], requests: int, *, check: int) -> list[Rollout]:
    """Plays ``requests`` customers against the serving endpoint; every one becomes a live rollout on record.

    Raises:
        WorkerDied: the engine ended meanwhile; the check is made again when it is back.
    """
    name, version = f"live-{session.state.cycle:03d}-{check:03d}", session.serving.version
    assert version is not None
    with session.clock.phase("serve"):
        return await play(
            session,
            settings,
            requests,
            session.serving.client,
            name=name,
            source="live",
            system_prompt=lambda session_id: version.system_prompt,
        )


async def _judge(session: Session, rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Adds one check to what traffic has shown so far; the triggers that it sets off."""
    state, version, config = session.state, session.serving.version, session.config.watch
    assert version is not None
    suite = session.suite(state.deployed)
    measured = speaking_row(state, version, suite)
    successes, requests = count_traffic(state, version.version_id, suite, rollouts)
    customers = await _customers(session, version, suite)
    drift, drifted = await _drift(session, rollouts)
    live = Live(
        successes=state.live["successes"],
        requests=state.live["requests"],
        expected=measured["success_rate"] if measured else None,
        n_gate=measured["n"] if measured else 0,
        new_failures=state.new_failures,
        contract_changed=session.taskset(state.deployed).contract_hash not in version.metadata["contracts"].values(),
        drift=drift,
        drifted=drifted,
        check=state.watch_checks + 1,
        customers=customers,
    )
    share = f" ({successes / requests:.0%})" if requests else ""
    unmeasured = "" if measured else f"; {version.version_id} was never measured, so nothing to compare with"
    session.event(f"live traffic on {suite}: {successes}/{requests} succeed{share}{unmeasured}")
    keep_row(state, live_row(state.cycle, state.watch_checks, suite, version.version_id, rollouts))
    return fired(live, config)


async def _customers(session: Session, version: ModelVersion, suite: str) -> CustomerOutcomes | None:
    """How customers' stored conversations with the served version ended; its new failures are added to those of the cycle."""
    state, served = session.state, session.served_traffic
    if served is None:
        return None
    with session.clock.phase("serve"):
        found = await served.outcomes(session.taskset(state.deployed), version.version_id)
    # By their ids: a conversation fails once, whichever version served before it and whoever takes a score back.
    new = set(found.failed) - set(state.customers_failed)
    state.new_failures += len(new)
    state.customers_failed += sorted(new)
    if judged := len(found.scores):
        session.event(
            f"customers of {version.version_id} on {suite}: {found.successes}/{judged} conversations succeeded "
            f"({found.by_customers} by their own score, {found.pending} not judged yet)"
        )
        keep_row(state, customers_row(state.cycle, suite, version.version_id, found.scores))
    return found


async def _drift(session: Session, rollouts: Sequence[Rollout]) -> tuple[float | None, str]:
    """Whether requests are others than they were; customers' as soon as there are as many new ones as a check has requests."""
    state, config, served = session.state, session.config.watch, session.served_traffic
    if config.drift_alpha is None:
        return None, ""
    customers = None
    if served is not None:
        before, late, last = await served.requests(state.customers_seen, REFERENCE_TASKS)
        if len(late) >= config.requests:
            state.customers_seen = last
            customers = (before, late) if len(before) >= config.requests else None
    return drift_of(rollouts, _reference(session), session.config.seed, customers)


def count_traffic(state: LoopState, version_id: str, suite: str, rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Adds a check to the counts of this version on this suite; successes and requests of the check alone.

    Faults of tools or verifier say nothing of the policy: left out.
    """
    judged = [rollout for rollout in rollouts if rollout.outcome.trainable]
    successes = sum(rollout.success for rollout in judged)
    if (state.live.get("version_id"), state.live.get("suite")) != (version_id, suite):
        state.live = {"version_id": version_id, "suite": suite, "successes": 0, "requests": 0}
    state.live["successes"] += successes
    state.live["requests"] += len(judged)
    state.new_failures += len(judged) - successes
    return successes, len(judged)


def _reference(session: Session) -> list[str]:
    """What the environment itself has customers ask, as it is deployed."""
    tasks = session.taskset(session.state.deployed).tasks("train", REFERENCE_TASKS, session.config.seed)
    return [next((each.content for each in task.prompt if each.role == "user"), "") for task in tasks]


def _apply_change(session: Session) -> bool:
    """Lets the world change as configured; ``False`` when no change is due."""
    state = session.state
    due = [change for change in session.config.traffic.changes if change.after_cycle <= state.cycle]
    if len(due) <= state.changes_applied:
        return False
    change = due[state.changes_applied]
    state.changes_applied += 1
    if change.settings:
        state.known.append(dict(state.deployed))
        state.deployed = {**state.deployed, **change.settings}
        session.event(f"the world changes: {session.suite(state.known[-1])} is now {session.suite(state.deployed)}")
        broken = breaking_changes(session.taskset(state.known[-1]).contract(), session.taskset(state.deployed).contract())
        if broken:
            session.console.note(f"  what breaks old calls: {'; '.join(broken)}")
    if change.customers:
        state.customers = {**state.customers, **change.customers}
        session.console.note(f"  customers change, and nobody tells the run: {state.customers}")
    return True


def _next_cycle(session: Session, triggers: Mapping[str, str]) -> Decision:
    """What follows the watch, by the triggers that fired (name to words), while there is a budget for it."""
    state = session.state
    live = [row for row in state.scores if row["label"].startswith("live")]
    evidence = {"fired": list(triggers), "triggers": dict(triggers), "live": live[-1] if live else None}
    spent = session.out_of_budget() or ("all cycles are done" if state.cycle >= session.config.budget.cycles else None)
    if spent:
        session.event(f"the run ends: {spent}{unspent(session.config, session.spent_usd())}")
        return Decision(Stage.DONE, "ended", spent, evidence)
    return Decision(Stage.DECIDE, "next cycle", "; ".join(triggers.values()), evidence)
