"""WATCH: live traffic against the served version, and what in it starts the next cycle.

Consumes live rollouts; waits for ``watch.requests`` of them per check; a trigger unblocks the next cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evergrad.loop._folder import LoopState, Stage
from evergrad.loop._playing import play
from evergrad.loop._scores import keep_row, live_row, p_of_so_few, speaking_row
from evergrad.loop._session import Session
from evergrad.types import Rollout


async def watch(session: Session) -> Stage:
    """Checks traffic until something triggers a cycle, or nothing more can happen in this run."""
    state, config = session.state, session.config
    await session.follow()
    while config.watch.requests:
        await session.follow()
        rollouts = await serve_traffic(session, state.deployed, config.watch.requests, check=state.watch_checks)
        trigger = _judge(session, rollouts)
        state.watch_checks += 1
        if trigger:
            return _next_cycle(session, trigger)
        if not _apply_change(session):
            break
        session.save_state()
    return _next_cycle(session, "schedule")


async def serve_traffic(session: Session, settings: Mapping[str, Any], requests: int, *, check: int) -> list[Rollout]:
    """Plays ``requests`` customers against the serving endpoint; every one becomes a live rollout on record."""
    name = f"live-{session.state.cycle:03d}-{check:03d}"
    with session.clock.phase("serve"):
        return await play(session, settings, requests, session.serving.client, name=name, source="live")


@dataclass(frozen=True)
class WatchReport:
    """One look at live traffic."""

    requests: int
    successes: int
    expected: float | None
    """Success rate on the gate split; ``None`` for a version that was never measured."""
    p_value: float
    """Chance of so few successes at the expected rate (exact, one-sided)."""
    contract_changed: bool

    def trigger(self, alpha: float) -> str | None:
        """Why the next cycle should start, or ``None``."""
        reasons = []
        if self.contract_changed:
            reasons.append("the tool contract changed")
        if self.expected is not None and self.p_value < alpha:
            promoted = f"promoted at {self.expected:.2f}, p = {self.p_value:.1e}"
            reasons.append(f"live success fell to {self.successes}/{self.requests} ({promoted})")
        return "; ".join(reasons) or None


def judge_traffic(rollouts: Sequence[Rollout], expected: float | None, n_gate: int, contract_changed: bool) -> WatchReport:
    """Compares live outcomes with the success rate that ``n_gate`` tasks of the gate gave.

    Faults of tools or verifier say nothing of the policy: left out.
    """
    judged = [rollout for rollout in rollouts if rollout.outcome.trainable]
    successes = sum(rollout.success for rollout in judged)
    if expected is None or not judged:
        return WatchReport(len(judged), successes, expected, 1.0, contract_changed)
    p_value = p_of_so_few(successes, len(judged), expected, n_gate)
    return WatchReport(len(judged), successes, expected, p_value, contract_changed)


def _judge(session: Session, rollouts: Sequence[Rollout]) -> str | None:
    state, version = session.state, session.serving.version
    assert version is not None
    suite = session.suite(state.deployed)
    changed = session.taskset(state.deployed).contract_hash not in version.metadata["contracts"].values()
    measured = speaking_row(state, version, suite)
    expected, n_gate = (measured["success_rate"], measured["n"]) if measured else (None, 0)
    report = judge_traffic(rollouts, expected, n_gate, changed)
    share = f" ({report.successes / report.requests:.0%})" if report.requests else ""
    unmeasured = "" if measured else f"; {version.version_id} was never measured, so nothing to compare with"
    session.event(f"live traffic on {suite}: {report.successes}/{report.requests} succeed{share}{unmeasured}")
    keep_row(state, live_row(state.cycle, state.watch_checks, suite, version.version_id, rollouts))
    return report.trigger(session.config.watch.alpha)


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
