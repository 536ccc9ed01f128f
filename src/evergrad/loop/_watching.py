"""WATCH: live traffic against the served version, and what in it starts the next cycle.

Consumes live rollouts; waits for ``watch.requests`` of them per check; a trigger unblocks the next cycle.
"""

from __future__ import annotations

from typing import Any

from evergrad.loop._folder import LoopState, Stage
from evergrad.loop._playing import play
from evergrad.loop._serving import judge_traffic
from evergrad.loop._session import Session
from evergrad.types import Rollout


async def watch(session: Session) -> Stage:
    """Checks traffic until something triggers a cycle, or nothing more can happen in this run."""
    state, config = session.state, session.config
    while config.watch.requests:
        rollouts = await serve_traffic(session, state.deployed, config.watch.requests, check=state.watch_checks)
        state.watch_checks += 1
        trigger = _judge(session, rollouts)
        if trigger:
            return _next_cycle(session, trigger)
        if not _apply_change(session):
            break
        session.save_state()
    return _next_cycle(session, "schedule")


async def serve_traffic(session: Session, settings: dict[str, Any], requests: int, *, check: int) -> list[Rollout]:
    """Plays ``requests`` customers against the serving endpoint; every one becomes a live rollout on record."""
    name = f"live-{session.state.cycle:03d}-{check:03d}"
    with session.clock.phase("serve"):
        return await play(session, settings, requests, session.serving.client, name=name, seed=check, source="live")


def _judge(session: Session, rollouts: list[Rollout]) -> str | None:
    version = session.serving.version
    assert version is not None
    trained_on = version.metadata["contracts"].values()
    changed = session.taskset(session.state.deployed).contract_hash not in trained_on
    report = judge_traffic(rollouts, _promoted_score(session, version.version_id), changed)
    share = report.successes / report.requests if report.requests else 0.0
    session.event(
        f"live traffic on {session.suite(session.state.deployed)}: {report.successes}/{report.requests} succeed ({share:.0%})"
    )
    session.state.scores.append(
        {
            "label": f"live, cycle {session.state.cycle}",
            "suite": session.suite(session.state.deployed),
            "version_id": version.version_id,
            "mean": share,
            "n": report.requests,
        }
    )
    return report.trigger(session.config.watch.alpha)


def _promoted_score(session: Session, version_id: str) -> float:
    """The mean that the served version had on the gate split, on the contract it was last trained for."""
    measured = [score["mean"] for score in session.state.scores if score["version_id"] == version_id and "ci95" in score]
    return float(measured[-1]) if measured else 0.0


def _apply_change(session: Session) -> bool:
    """Lets the world change as configured; ``False`` when no change is due."""
    state = session.state
    due = [change for change in session.config.traffic.changes if change.after_cycle <= state.cycle]
    if len(due) <= state.changes_applied:
        return False
    change = due[state.changes_applied]
    state.changes_applied += 1
    state.known.append(dict(state.deployed))
    state.deployed = {**state.deployed, **change.settings}
    session.event(f"the world changes: {session.suite(state.known[-1])} is now {session.suite(state.deployed)}")
    return True


def _next_cycle(session: Session, trigger: str) -> Stage:
    state = session.state
    spent = session.out_of_budget() or ("all cycles are done" if state.cycle >= session.config.budget.cycles else None)
    if spent:
        session.event(f"the run ends: {spent}")
        return Stage.DONE
    begin_next_cycle(state, trigger)
    return Stage.WARM_START


def begin_next_cycle(state: LoopState, trigger: str) -> None:
    """Counts up the cycle; its progress starts from nothing."""
    state.cycle, state.trigger, state.group, state.watch_checks = state.cycle + 1, trigger, 0, 0
