"""One version on one suite, or two that take turns: tried, reported, put on record, and never measured twice."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from evergrad.evals import GIVEN_UP, EvalError, Run, evaluate, give_up_on
from evergrad.inference import InferenceClient
from evergrad.loop._announcing import gate_tasks, report_path, stored_report, suite_name
from evergrad.loop._folder import write_json
from evergrad.loop._gold_audit import audits_task
from evergrad.loop._playing import require_alive
from evergrad.loop._scores import keep_row, score_row
from evergrad.loop._session import Session
from evergrad.rollouts import greedy_rollout
from evergrad.types import EvalReport, ModelVersion, Rollout, Task


async def report_for(
    session: Session,
    version: ModelVersion,
    settings: Mapping[str, Any],
    client: InferenceClient,
    draw: int = 0,
    rival: EvalReport | None = None,
) -> EvalReport:
    """The report of ``version`` on one suite: from the record, or measured now on the engine that holds the version.

    With a ``rival``, the measurement is given up once the version is shown to score less; such a report serves no other end.

    Raises:
        WorkerDied: an engine ended meanwhile; no report is kept then, so that the version is measured again, and not refused.
    """
    stored = stored_report(session, version.version_id, settings, draw)
    if stored is not None and (rival is not None or GIVEN_UP not in stored.outcomes):
        return stored
    suite, taskset, tasks = suite_name(session, settings, draw), session.taskset(settings), gate_tasks(session, settings, draw)
    session.console.note(f"  measuring {version.version_id} on {suite}, {len(tasks)} tasks")
    rollouts: list[Rollout] = []
    run = player(session, version, settings, suite, tasks, client, rollouts)
    concurrency, fingerprint = session.config.eval.concurrency, taskset.fingerprint
    usd, started = session.spent_usd(), time.monotonic()
    with session.clock.phase("eval"), session.console.stage(f"evaluate {version.version_id} on {suite}", len(tasks)):
        give_up = give_up_on(rival.scores, session.config.gate.alpha) if rival is not None else None
        try:
            report = await evaluate(
                version.version_id, suite, tasks, run, fingerprint=fingerprint, concurrency=concurrency, give_up=give_up
            )
        except EvalError:
            await require_alive(session)  # not one task gave a score
            raise
        if report.missing and GIVEN_UP not in report.outcomes:
            await require_alive(session)
    spent = None if usd is None else (session.spent_usd() or 0.0) - usd
    keep_report(session, report, rollouts, spent, time.monotonic() - started)
    return report


def player(
    session: Session,
    version: ModelVersion,
    settings: Mapping[str, Any],
    suite: str,
    tasks: tuple[Task, ...],
    client: InferenceClient,
    rollouts: list[Rollout],
) -> Run:
    """How ``version`` tries a task of a suite on the engine that holds it; what comes of each try is added to ``rollouts``.

    Raises:
        EvergradError: ``client`` holds another version.
    """
    session.require_holder(client, version)
    taskset, audits, renderer = session.taskset(settings), audits_task(session, tasks), session.renderer_for(version)

    async def run(task: Task) -> Rollout:
        rollout = await greedy_rollout(
            task.with_system_prompt(version.system_prompt),
            taskset,
            client,
            renderer,
            rollout_id=f"{version.version_id}-{task.task_id}",
            group_id=f"eval-{version.version_id}-{suite}",
            audit=audits(task),
        )
        rollouts.append(rollout)
        session.console.advance(f"{sum(each.success for each in rollouts) / len(rollouts):.0%}")
        return rollout

    return run


def keep_report(session: Session, report: EvalReport, rollouts: Sequence[Rollout], usd: float | None, seconds: float) -> None:
    """Puts a report on record, with what it cost and took."""
    session.record_rollouts(f"eval-{report.version_id}--{report.suite}", rollouts)
    _record_score(session, score_row(report, rollouts, usd, seconds))
    # Last, for the file is what says that this need not be done again: by then the row is in the state.
    write_json(report_path(session.folder.path, report.version_id, report.suite), dataclasses.asdict(report))


def _record_score(session: Session, row: Mapping[str, Any]) -> None:
    keep_row(session.state, row)
    parts = "".join(f"{name} {value:.2f}, " for name, value in row["slices"].items())
    session.event(f"{row['label']}: {row['mean']:.3f} ({parts}n = {row['n']}, {row['seconds']:.0f} s)")
    session.save_state()
