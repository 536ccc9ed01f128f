"""MEASURE: the candidate against the incumbent on tasks that training never saw; then the gate's word, then the alias.

Consumes the weights that LEARN left; waits for paired evaluations on every suite; a promotion unblocks serving.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from evergrad.evals import evaluate, gate, report_from_json, wilson_interval
from evergrad.inference import EngineClient
from evergrad.loop._folder import Stage, write_json
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.rollouts import run_rollout
from evergrad.types import EvalReport, ModelVersion, Rollout, Sampling, Task, Verdict


async def measure(session: Session) -> Stage:
    """Registers, evaluates, rules, promotes. Reports and verdicts on record are reused, so a crash repeats nothing."""
    state = session.state
    settings = [state.deployed, *state.known]
    candidate = await session.register("rl" if session.recipe.rl.steps else "sft", session.contracts())
    if state.incumbent is None:
        state.incumbent = session.registry.resolve(PRODUCTION)
        session.save_state()
    assert state.incumbent is not None, "the first cycle introduces a version before it measures"
    incumbent = session.registry.get(state.incumbent)
    before, after = {}, {}
    for each in settings:
        suite = session.suite(each)
        before[suite] = await report_for(session, incumbent, each, session.serving.client)
        after[suite] = await report_for(session, candidate, each, session.engine)
    with session.clock.phase("gate"):
        verdict = gate(after, before, session.config.gate, primary=session.suite(state.deployed))
    await _rule(session, candidate, verdict)
    _record_cycle(session, verdict, before, after)
    state.incumbent = None
    return Stage.WATCH


async def introduce(session: Session, version: ModelVersion) -> None:
    """Serves the first version, which has no incumbent to beat, and measures it."""
    session.registry.promote(PRODUCTION, version.version_id, bootstrap=True)
    with session.clock.phase("weight_sync"):
        await session.serving.follow()
    session.event(f"{version.version_id} serves as the first version, at {session.serving.client.base_url}/v1")
    await report_for(session, version, session.state.deployed, session.serving.client)


async def _rule(session: Session, candidate: ModelVersion, verdict: Verdict) -> None:
    """Moves the alias when the verdict says so; serving follows at once."""
    write_json(session.folder.path / "verdicts" / f"{candidate.version_id}.json", dataclasses.asdict(verdict))
    if not verdict.promote:
        session.registry.record_verdict(verdict)
        session.event(f"refused {candidate.version_id}: {'; '.join(verdict.reasons)}")
        return
    if session.registry.resolve(PRODUCTION) != candidate.version_id:
        session.registry.promote(PRODUCTION, candidate.version_id, verdict)
    with session.clock.phase("weight_sync"):
        await session.serving.follow()
    session.event(f"promoted {candidate.version_id}: {'; '.join(verdict.reasons)}")


async def report_for(session: Session, version: ModelVersion, settings: Mapping[str, Any], client: EngineClient) -> EvalReport:
    """The report of ``version`` on one suite: from the record, or measured now on the engine that holds the version."""
    suite = session.suite(settings)
    path = session.folder.path / "evals" / f"{version.version_id}--{suite.replace('/', '_')}.json"
    if path.exists():
        return report_from_json(json.loads(path.read_text(encoding="utf-8")))
    taskset = session.taskset(settings)
    tasks = taskset.tasks("gate", session.config.eval.n, seed=session.config.seed)
    rollouts: list[Rollout] = []

    async def run(task: Task) -> Rollout:
        rollout = await run_rollout(
            task,
            taskset,
            client,
            session.renderer,
            Sampling(temperature=0.0, max_tokens=task.limits.max_tokens_per_turn),
            rollout_id=f"{version.version_id}-{task.task_id}",
            group_id=f"eval-{version.version_id}-{suite}",
            source="eval",
        )
        rollouts.append(rollout)
        session.console.advance(f"{sum(each.success for each in rollouts) / len(rollouts):.0%}")
        return rollout

    usd, started = session.spent_usd(), time.monotonic()
    with session.clock.phase("eval"), session.console.stage(f"evaluate {version.version_id} on {suite}", len(tasks)):
        report = await evaluate(version.version_id, suite, tasks, run, concurrency=session.config.eval.concurrency)
    session.record_rollouts(f"eval-{version.version_id}--{suite}", rollouts)
    write_json(path, dataclasses.asdict(report))
    spent = None if usd is None else (session.spent_usd() or 0.0) - usd
    _record_score(session, report, rollouts, spent, time.monotonic() - started)
    return report


def _record_score(session: Session, report: EvalReport, rollouts: Sequence[Rollout], usd: float | None, seconds: float) -> None:
    successes = sum(score >= 1.0 for score in report.scores.values())
    mean, slices = report.mean or 0.0, report.slice_means()
    # What an evaluation cost is shared out by tokens: they are what the machine's time goes into.
    paired = [
        (
            report.scores[rollout.task_id],
            rollout.usage.prompt_tokens - rollout.usage.cached_tokens + rollout.usage.completion_tokens,
        )
        for rollout in rollouts
        if rollout.task_id in report.scores and rollout.outcome.trainable
    ]
    tokens = [own for _, own in paired]
    session.state.scores.append(
        {
            "label": f"{report.version_id} on {report.suite}",
            "suite": report.suite,
            "version_id": report.version_id,
            "mean": mean,
            "ci95": list(wilson_interval(successes, len(report.scores))),
            "n": len(report.scores),
            "slices": slices,
            "usd": usd,
            "seconds": round(seconds, 1),
            "usd_per_success": usd / successes if successes and usd is not None else None,
            "tokens": sum(tokens),
            "task_scores": [score for score, _ in paired],
            "task_usd": [usd * own / max(1, sum(tokens)) for own in tokens] if usd is not None else None,
            "outcomes": dict(report.outcomes),
        }
    )
    parts = ", ".join(f"{name} {value:.2f}" for name, value in slices.items())
    session.event(f"{report.version_id} on {report.suite}: {mean:.3f} ({parts}; n = {len(report.scores)}, {seconds:.0f} s)")


def _record_cycle(
    session: Session, verdict: Verdict, before: Mapping[str, EvalReport], after: Mapping[str, EvalReport]
) -> None:
    """The cycle's line in the report: what it gained, on what evidence, for how much."""
    state, suite = session.state, session.suite(session.state.deployed)
    usd = session.spent_usd()
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
            "usd": None if usd is None else usd - state.cycle_started["usd"],
            "wall_s": session.wall_s() - state.cycle_started["wall_s"],
        }
    )
