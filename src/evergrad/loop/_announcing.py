"""What a ruling will rest on, settled before the candidate is measured: its suites, its tasks, its past, its plan."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from evergrad.evals import Aim, Overlaps, Plan, announce, plan_from_json, report_from_json, suite_hash
from evergrad.loop._folder import write_json
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.loop.looks import looks_folder
from evergrad.loop.traffic.converting import request_of
from evergrad.registry import Registry
from evergrad.types import EvalReport, ModelVersion, Task, Verdict

_MAY_CHANGE = ("looks_by_hand", "price_book", "contamination")
"""What of a plan the world may change between a crash and the next try at the same ruling."""


@dataclass(frozen=True, slots=True)
class GateSuite:
    """One suite of a ruling: the environment under some settings, and which draw of its gate tasks."""

    name: str
    settings: Mapping[str, Any]
    draw: int = 0


def verdicts_before(registry: Registry, candidate_id: str, incumbent_id: str | None) -> list[Verdict]:
    """The gate's verdicts before this ruling: the whole state of the series, kept nowhere else.

    After a crash the verdict of this very ruling may be on record already; it is no part of its own past. One that a promotion
    by hand rests on once more is the same try.
    """
    earlier: list[Verdict] = []
    for verdict in registry.verdicts():
        if "suite_hashes" not in verdict.evidence:
            continue  # by hand
        if (verdict.candidate_id, verdict.incumbent_id) == (candidate_id, incumbent_id):
            break
        if verdict not in earlier:
            earlier.append(verdict)
    return earlier


def verdict_on_record(registry: Registry, candidate_id: str, incumbent_id: str) -> Verdict | None:
    """The gate's verdict on this pair, from before a crash: a pair is ruled on once, whatever was looked at since."""
    found = (each for each in registry.verdicts(candidate_id) if "suite_hashes" in each.evidence)
    return next((each for each in found if each.incumbent_id == incumbent_id), None)


def gate_suites(session: Session, history: Sequence[Verdict]) -> list[GateSuite]:
    """What is measured, the primary suite first: on tasks that no verdict has looked at, while there are such.

    Guards keep their tasks, so that the anchor's reports stay comparable; once the primary suite has moved on to fresh
    tasks, its first ones are a guard like any other.
    """
    state = session.state
    guards = [GateSuite(session.suite(each), each) for each in (state.deployed, *session.known)]
    name = guards[0].name
    used = sum(str(verdict.evidence.get("primary", "")).partition("#")[0] == name for verdict in history)
    draw = fresh_draw(session, state.deployed, used)
    return [GateSuite(f"{name}#{draw + 1}", state.deployed, draw), *guards] if draw else guards


def write_plan(
    session: Session,
    candidate: ModelVersion,
    incumbent: ModelVersion,
    suites: Sequence[GateSuite],
    anchors: Mapping[str, EvalReport],
    history: Sequence[Verdict],
    *,
    aim: Aim = "score",
) -> Plan:
    """Writes down what will be ruled on, before the candidate is measured; the file keeps the name of its content.

    A ruling that a crash interrupted keeps the plan that it had.
    """
    hashes = {each.name: hash_of(session, each.settings, each.draw) for each in suites}
    planned = announce(
        candidate.version_id,
        incumbent.version_id,
        hashes,
        suites[0].name,
        session.config.gate,
        history=history,
        anchors={suite: report.version_id for suite, report in anchors.items()},
        price_book=session.ledger.price_book.hash,
        looks_by_hand=_looks(session, suites[0]),
        audit=session.config.audit,
        contamination=_contamination(session, candidate, suites),
        aim=aim,
    )
    ruled = verdict_on_record(session.registry, candidate.version_id, incumbent.version_id)
    plan = _announced_before(session.folder.path, planned, ruled) or planned
    path = plan_path(session.folder.path, plan)
    if not path.exists():
        write_json(
            path,
            {
                "plan": dataclasses.asdict(plan),
                "hash": plan.hash,
                "announced_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            },
        )
    return plan


def _announced_before(run: Path, plan: Plan, ruled: Verdict | None) -> Plan | None:
    """The plan of this very ruling that is on disk; a look by hand or a new price since does not make it another ruling."""
    files = sorted((run / "plans").glob(f"{plan.candidate_id}-*.json"))
    earlier = [plan_from_json(json.loads(path.read_text(encoding="utf-8"))["plan"]) for path in files]
    if ruled is not None:
        return next((each for each in earlier if each.hash == ruled.evidence.get("plan_hash")), None)
    same = (each for each in earlier if dataclasses.replace(plan, **{key: getattr(each, key) for key in _MAY_CHANGE}) == each)
    return next(same, None)


def _contamination(session: Session, candidate: ModelVersion, suites: Sequence[GateSuite]) -> dict[str, Any]:
    """Which gate tasks are, or nearly are, among the live tasks that the candidate and its ancestors were trained on. The
    environment's own training tasks share none with the gate by their split; live ones come from outside of it."""
    if session.traffic is None:
        return {}
    ancestors = [each.version_id for each in session.registry.ancestors(candidate.version_id)]
    trained = session.traffic.tasks(used_by=ancestors)
    if not trained:
        return {}
    measured = {task.task_id: request_of(task) for each in suites for task in gate_tasks(session, each.settings, each.draw)}
    overlaps, found = Overlaps(measured), dict[str, str]()
    for live in trained:
        overlap = overlaps.find(request_of(session.taskset(session.state.deployed).task(live.row)))
        if overlap is not None:
            found[overlap.reference] = overlap.kind
    return {"trained_on": len(trained), "gate_tasks": len(measured), "overlaps": dict(sorted(found.items()))}


def _looks(session: Session, suite: GateSuite) -> int:
    """Evaluations by hand that touched a task of ``suite``; ``evergrad eval`` puts them down in the folder."""
    tasks = {task.task_id for task in gate_tasks(session, suite.settings, suite.draw)}
    looks = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(looks_folder(session.folder.path).glob("*.json")))
    return sum(not tasks.isdisjoint(each["tasks"]) for each in looks)


def plan_path(run: Path, plan: Plan) -> Path:
    return run / "plans" / f"{plan.candidate_id}-{plan.hash}.json"


def anchor_reports(
    session: Session, suites: Sequence[GateSuite], candidate: ModelVersion, incumbent: ModelVersion
) -> dict[str, EvalReport]:
    """By suite, the report of the first version that served for it, lest small losses add up.

    While that is the incumbent itself, it has nothing to add.
    """
    first: dict[str, str] = {}
    for event in session.registry.history(PRODUCTION):
        if event.version_id == candidate.version_id:
            break  # promoted by this ruling, before a crash
        made_for = str(session.registry.get(event.version_id).metadata.get("suite", ""))
        first.setdefault(made_for, event.version_id)
    found = {
        each.name: stored_report(session, first[each.name], each.settings)
        for each in suites
        if each.draw == 0 and first.get(each.name, incumbent.version_id) != incumbent.version_id
    }
    return {suite: report for suite, report in found.items() if report is not None}


def gate_tasks(session: Session, settings: Mapping[str, Any], draw: int = 0) -> tuple[Task, ...]:
    """A suite's tasks for measuring versions; no two draws share one."""
    n = session.config.eval.n
    return session.taskset(settings).tasks("gate", n * (draw + 1), seed=session.config.seed)[-n:]


def fresh_draw(session: Session, settings: Mapping[str, Any], used: int) -> int:
    """The draw that follows ``used`` others; an earlier one where the environment has no more tasks."""
    n = session.config.eval.n
    found = sum(1 for _ in islice(session.taskset(settings).stream("gate", session.config.seed), n * (used + 1)))
    return used if found == n * (used + 1) else used % max(1, found // n)


def suite_name(session: Session, settings: Mapping[str, Any], draw: int) -> str:
    return f"{session.suite(settings)}#{draw + 1}" if draw else session.suite(settings)


def hash_of(session: Session, settings: Mapping[str, Any], draw: int = 0) -> str:
    return suite_hash(gate_tasks(session, settings, draw), fingerprint=session.taskset(settings).fingerprint)


def report_path(run: Path, version_id: str, suite: str) -> Path:
    return run / "evals" / f"{version_id}--{suite.replace('/', '_')}.json"


def stored_report(session: Session, version_id: str, settings: Mapping[str, Any], draw: int = 0) -> EvalReport | None:
    """The report on record, if it measured these tasks with the verifier as it is now."""
    path = report_path(session.folder.path, version_id, suite_name(session, settings, draw))
    if not path.exists():
        return None
    report = report_from_json(json.loads(path.read_text(encoding="utf-8")))
    return report if report.suite_hash == hash_of(session, settings, draw) else None
