"""What a success costs two versions on different base models: both are loaded, and take turns at the same tasks.

Consumes a candidate on another base model than what serves; waits for both to answer; unblocks the gate's ruling on the saving.

The candidate answers from a second serving engine, made as the one that serves is: engines that roll out may be several, of
another make, or compute in integers, and would say nothing of what serving costs. A first turn of each, which counts for
nothing, warms both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evergrad.evals import BLOCKS, EvalError, Run, Turns, evaluate_by_turns
from evergrad.loop._announcing import GateSuite, gate_tasks, stored_report
from evergrad.loop._evaluating import keep_report, player, report_for
from evergrad.loop._folder import write_json
from evergrad.loop._playing import require_alive
from evergrad.loop._serving import Standby
from evergrad.loop._session import Session
from evergrad.types import EvalReport, ModelVersion, Rollout

Reports = dict[str, EvalReport]


async def measure_by_turns(
    session: Session, candidate: ModelVersion, incumbent: ModelVersion, suites: Sequence[GateSuite]
) -> tuple[Reports, Reports]:
    """Reports of incumbent and candidate on all suites; on the first, the primary one, they take turns, which is put on record.

    Raises:
        WorkerDied: an engine ended meanwhile; nothing of what it was at is kept.
    """
    primary, *guards = suites
    names = (candidate.version_id, incumbent.version_id)
    to_play = turns_on_record(session.folder.path, *names, primary.name) is None or None in _stored(session, primary, *names)
    to_guard = [each for each in guards if None in _stored(session, each, candidate.version_id)]
    if to_play or to_guard:
        with session.clock.phase("weight_sync"):
            standby = await session.serving.stand_by(candidate)
        if to_play:
            session.safe_point()
            await _take_turns(session, standby, incumbent, primary)
        for each in to_guard:
            session.safe_point()
            await report_for(session, candidate, each.settings, standby.client, each.draw)
    return await _reports(session, incumbent, suites), await _reports(session, candidate, suites)


def _stored(session: Session, suite: GateSuite, *version_ids: str) -> list[EvalReport | None]:
    return [stored_report(session, each, suite.settings, suite.draw) for each in version_ids]


async def _reports(session: Session, version: ModelVersion, suites: Sequence[GateSuite]) -> Reports:
    """Those on record; of the version that serves, what is missing is measured now."""
    return {each.name: await report_for(session, version, each.settings, session.serving.client, each.draw) for each in suites}


async def _take_turns(session: Session, standby: Standby, incumbent: ModelVersion, suite: GateSuite) -> None:
    """Plays the primary suite. A report that is on record already stays as it is: certificates rest on it."""
    names, tasks = (standby.version.version_id, incumbent.version_id), gate_tasks(session, suite.settings, suite.draw)
    clients = (standby.client, session.serving.client)
    session.console.note(f"  {names[0]} and {names[1]} take {BLOCKS} turns each on {suite.name}, {len(tasks)} tasks")
    rollouts: tuple[list[Rollout], list[Rollout]] = ([], [])

    def run_of(version: ModelVersion, side: int) -> Run:
        return player(session, version, suite.settings, suite.name, tasks, clients[side], rollouts[side])

    async def before_turn(side: int) -> None:
        await clients[side].reset_prefix_cache()

    runs, first = (run_of(standby.version, 0), run_of(incumbent, 1)), tasks[: len(tasks) // BLOCKS]
    stage = session.console.stage(f"evaluate {' and '.join(names)} by turns", 2 * (len(first) + len(tasks)))
    with session.clock.phase("eval"), stage:
        for run, own in zip(runs, rollouts, strict=True):
            # Whatever fails here fails again where it counts.
            await asyncio.gather(*(run(task) for task in first), return_exceptions=True)
            own.clear()
        usd, started = session.spent_usd(), time.monotonic()
        try:
            reports, turns = await evaluate_by_turns(
                names,
                suite.name,
                tasks,
                runs,
                fingerprint=session.taskset(suite.settings).fingerprint,
                blocks=BLOCKS,
                before_turn=before_turn,
                concurrency=session.config.eval.concurrency,
            )
        except EvalError:
            await _require_both_alive(session, standby)
            raise
        if any(report.missing for report in reports):
            await _require_both_alive(session, standby)
        spent = None if usd is None else (session.spent_usd() or 0.0) - usd
    per_second = None if spent is None else spent / (time.monotonic() - started)
    for report, own, seconds in zip(reports, rollouts, (sum(turns.candidate), sum(turns.incumbent)), strict=True):
        if _stored(session, suite, report.version_id) == [None]:
            keep_report(session, report, own, None if per_second is None else per_second * seconds, seconds)
    _record_turns(session, names, suite.name, turns, per_second)


async def _require_both_alive(session: Session, standby: Standby) -> None:
    await standby.require_alive()
    await require_alive(session)


def turns_path(run: Path, candidate_id: str, incumbent_id: str, suite: str) -> Path:
    return run / "turns" / f"{candidate_id}--{incumbent_id}--{suite.replace('/', '_')}.json"


def _record_turns(session: Session, names: tuple[str, str], suite: str, turns: Turns, usd_per_second: float | None) -> None:
    content = {
        "candidate": names[0],
        "incumbent": names[1],
        "suite": suite,
        "usd_per_second": usd_per_second,
        "blocks": turns.blocks,
        "seconds": {"candidate": turns.candidate, "incumbent": turns.incumbent},
    }
    write_json(turns_path(session.folder.path, *names, suite), content)


def turns_on_record(run: Path, candidate_id: str, incumbent_id: str, suite: str) -> Turns | None:
    """What candidate and incumbent took as they took turns; ``None`` where they did not."""
    found = _read(turns_path(run, candidate_id, incumbent_id, suite))
    if found is None:
        return None
    blocks = tuple(tuple(block) for block in found["blocks"])
    return Turns(blocks, tuple(found["seconds"]["candidate"]), tuple(found["seconds"]["incumbent"]))


def saved_per_attempt(run: Path, candidate_id: str, incumbent_id: str, suite: str) -> float | None:
    """Dollars that an attempt costs the candidate less than the incumbent; ``None`` where they took no turns, or without a
    price."""
    found = _read(turns_path(run, candidate_id, incumbent_id, suite))
    if found is None or found["usd_per_second"] is None:
        return None
    seconds, attempts = found["seconds"], sum(map(len, found["blocks"]))
    return float(found["usd_per_second"] * (sum(seconds["incumbent"]) - sum(seconds["candidate"])) / attempts)


def _read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
