"""MEASURE: the candidate against the incumbent on tasks that training never saw; then the gate's word, then the alias.

Consumes the weights that LEARN left; waits for paired evaluations on every suite; a promotion unblocks serving.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evergrad.evals import Costs, evaluate, gate, report_from_json, suite_hash
from evergrad.inference import EngineClient
from evergrad.loop._folder import Stage, write_json
from evergrad.loop._scores import keep_row, row_of, score_row
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.rollouts import greedy_rollout
from evergrad.types import EvalReport, ModelVersion, Rollout, Task, Verdict, strict_json


async def measure(session: Session) -> Stage:
    """Registers, evaluates, rules, promotes. Reports and verdicts on record are reused, so a crash repeats nothing."""
    state = session.state
    session.writer.discard()
    await session.follow()
    settings = [state.deployed, *state.known]
    learned = any(step["kind"] == "rl" and step["cycle"] == state.cycle for step in state.steps)
    candidate = await session.register("rl" if learned else "sft", session.contracts())
    if _serves_already(session, candidate):
        session.event(f"no RL step was done, so there is nothing to measure: {candidate.version_id} serves already")
        return Stage.WATCH
    incumbent = _incumbent(session, candidate)
    before, after = {}, {}
    for each in settings:
        suite = session.suite(each)
        before[suite] = await report_for(session, incumbent, each, session.serving.client)
        after[suite] = await report_for(session, candidate, each, session.engine)
    suite = session.suite(state.deployed)
    costs = Costs(_task_costs(session, candidate, suite), _task_costs(session, incumbent, suite))
    with session.clock.phase("gate"):
        anchor = _anchor(session, settings, incumbent)
        verdict = gate(after, before, session.config.gate, primary=suite, anchor=anchor, costs=costs)
    await _rule(session, candidate, verdict)
    _record_cycle(session, verdict, before, after)
    state.incumbent = None
    return Stage.WATCH


def _serves_already(session: Session, candidate: ModelVersion) -> bool:
    """Whether the candidate is what serves and was so before this stage: then it was the warm start's, and met no RL."""
    return (
        candidate.version_id == session.version_id("sft")
        and session.registry.resolve(PRODUCTION) == candidate.version_id
        and session.state.incumbent in (None, candidate.version_id)
    )


def _incumbent(session: Session, candidate: ModelVersion) -> ModelVersion:
    """The version to beat: what serves now, or what served before a crash between the promotion and the end of the stage."""
    state, serves = session.state, session.registry.resolve(PRODUCTION)
    assert serves is not None, "the first cycle introduces a version before it measures"
    if state.incumbent is None or serves not in (state.incumbent, candidate.version_id):
        # Somebody moved the alias meanwhile: evidence against a version that serves no longer would promote nothing.
        state.incumbent = serves
        session.save_state()
    return session.registry.get(state.incumbent)


def _task_costs(session: Session, version: ModelVersion, suite: str) -> dict[str, float]:
    """Task id to USD, of those tries that have a price."""
    row = row_of(session.state, version.version_id, suite)
    return dict(zip(row["task_ids"], row["task_usd"], strict=True)) if row and row["task_usd"] else {}


def _anchor(session: Session, settings: Sequence[Mapping[str, Any]], incumbent: ModelVersion) -> dict[str, EvalReport]:
    """Reports of the first version that ever served, on the suites it was measured on, lest small losses add up.

    While it is the incumbent itself, it has nothing to add.
    """
    first = session.registry.history(PRODUCTION)[0].version_id
    if first == incumbent.version_id:
        return {}
    found = {session.suite(each): _stored(session, first, each) for each in settings}
    return {suite: report for suite, report in found.items() if report is not None}


async def introduce(session: Session, version: ModelVersion) -> None:
    """Serves the first version, which has no incumbent to beat, and measures it."""
    with session.clock.phase("weight_sync"):
        await session.serving.load(version)
    session.registry.promote(PRODUCTION, version.version_id, bootstrap=True)
    session.state.serving = version.version_id
    session.event(f"{version.version_id} serves as the first version, at {session.serving.client.base_url}/v1")
    await report_for(session, version, session.state.deployed, session.serving.client)


async def _rule(session: Session, candidate: ModelVersion, verdict: Verdict) -> None:
    """Moves the alias when the verdict says so, as soon as the serving engine has proved that it holds the version."""
    write_json(session.folder.path / "verdicts" / f"{candidate.version_id}.json", dataclasses.asdict(verdict))
    told = "; ".join(verdict.reasons)
    if not verdict.promote:
        if strict_json(verdict) not in map(strict_json, session.registry.verdicts(candidate.version_id)):
            session.registry.record_verdict(verdict)
        session.event(f"refused {candidate.version_id}: {told}")
        return
    with session.clock.phase("weight_sync"):
        await session.serving.load(candidate)
    if session.registry.resolve(PRODUCTION) != candidate.version_id:
        session.registry.promote(PRODUCTION, candidate.version_id, verdict)
    session.state.serving = candidate.version_id
    session.event(f"promoted {candidate.version_id}: {told}")


async def report_for(session: Session, version: ModelVersion, settings: Mapping[str, Any], client: EngineClient) -> EvalReport:
    """The report of ``version`` on one suite: from the record, or measured now on the engine that holds the version."""
    stored = _stored(session, version.version_id, settings)
    if stored is not None:
        return stored
    session.require_holder(client, version)
    suite, taskset, tasks = session.suite(settings), session.taskset(settings), _gate_tasks(session, settings)
    session.console.note(f"  measuring {version.version_id} on {suite}, {len(tasks)} tasks")
    rollouts: list[Rollout] = []

    async def run(task: Task) -> Rollout:
        rollout = await greedy_rollout(
            task,
            taskset,
            client,
            session.renderer,
            rollout_id=f"{version.version_id}-{task.task_id}",
            group_id=f"eval-{version.version_id}-{suite}",
        )
        rollouts.append(rollout)
        session.console.advance(f"{sum(each.success for each in rollouts) / len(rollouts):.0%}")
        return rollout

    concurrency, fingerprint = session.config.eval.concurrency, taskset.fingerprint
    usd, started = session.spent_usd(), time.monotonic()
    with session.clock.phase("eval"), session.console.stage(f"evaluate {version.version_id} on {suite}", len(tasks)):
        report = await evaluate(version.version_id, suite, tasks, run, fingerprint=fingerprint, concurrency=concurrency)
    spent = None if usd is None else (session.spent_usd() or 0.0) - usd
    session.record_rollouts(f"eval-{version.version_id}--{suite}", rollouts)
    _record_score(session, score_row(report, rollouts, spent, time.monotonic() - started))
    # Last, for the file is what says that this need not be done again: by then the row is in the state.
    write_json(_report_path(session, version.version_id, suite), dataclasses.asdict(report))
    return report


def _gate_tasks(session: Session, settings: Mapping[str, Any]) -> tuple[Task, ...]:
    return session.taskset(settings).tasks("gate", session.config.eval.n, seed=session.config.seed)


def _report_path(session: Session, version_id: str, suite: str) -> Path:
    return session.folder.path / "evals" / f"{version_id}--{suite.replace('/', '_')}.json"


def _stored(session: Session, version_id: str, settings: Mapping[str, Any]) -> EvalReport | None:
    """The report on record, if it measured these tasks with the verifier as it is now."""
    path = _report_path(session, version_id, session.suite(settings))
    if not path.exists():
        return None
    report = report_from_json(json.loads(path.read_text(encoding="utf-8")))
    fingerprint = session.taskset(settings).fingerprint
    return report if report.suite_hash == suite_hash(_gate_tasks(session, settings), fingerprint=fingerprint) else None


def _record_score(session: Session, row: Mapping[str, Any]) -> None:
    keep_row(session.state, row)
    parts = "".join(f"{name} {value:.2f}, " for name, value in row["slices"].items())
    session.event(f"{row['label']}: {row['mean']:.3f} ({parts}n = {row['n']}, {row['seconds']:.0f} s)")
    session.save_state()


def _record_cycle(
    session: Session, verdict: Verdict, before: Mapping[str, EvalReport], after: Mapping[str, EvalReport]
) -> None:
    """The cycle's line in the report: what it gained, on what evidence, for how much."""
    state, suite = session.state, session.suite(session.state.deployed)
    usd, started = session.spent_usd(), state.cycle_started
    others = {name: {"before": before[name].mean, "after": after[name].mean} for name in after if name != suite}
    state.cycles.append(
        {
            "cycle": state.cycle,
            "trigger": state.trigger,
            "suite": suite,
            "score_before": before[suite].mean,
            "score_after": after[suite].mean,
            "slices_before": before[suite].slice_means(),
            "slices_after": after[suite].slice_means(),
            "other_suites": others,
            "ci95": verdict.evidence.get("ci95"),
            "n": len(after[suite].scores),
            "verdict": "promoted" if verdict.promote else "refused",
            "reasons": list(verdict.reasons),
            "candidate": verdict.candidate_id,
            "incumbent": verdict.incumbent_id,
            "evidence": dict(verdict.evidence),
            "usd": None if usd is None or started["usd"] is None else usd - started["usd"],
            "wall_s": session.wall_s() - (started["wall_s"] or 0.0),
        }
    )
