"""What a ruling rests on: its past out of the registry, fresh tasks for the primary suite, anchors, a plan on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evergrad.envs import Taskset
from evergrad.evals import GateConfig, gate, plan_from_json, report_hash
from evergrad.ledger import PriceBook
from evergrad.loop._announcing import (
    anchor_reports,
    fresh_draw,
    gate_suites,
    gate_tasks,
    hash_of,
    report_path,
    stored_report,
    suite_name,
    verdict_on_record,
    verdicts_before,
    write_plan,
)
from evergrad.loop._folder import write_json
from evergrad.loop.looks import record_look
from evergrad.registry import Registry
from evergrad.types import EvalReport, ModelVersion, Verdict
from tests.loop.conftest import LETTERS

V1, V2 = {"contract": "v1"}, {"contract": "v2"}
N = 8


class Standing(SimpleNamespace):
    """What of a session says where the run stands; every verifier is trusted."""

    @property
    def known(self) -> list[dict[str, Any]]:
        return list(self.state.known)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Any]:
    tasksets = {contract: Taskset(str(LETTERS), {"contract": contract}) for contract in ("v1", "v2")}
    with Registry(tmp_path / "registry.sqlite") as registry:
        for version_id, suite in (("first", "letters@v1"), ("second", "letters@v1"), ("third", "letters@v2")):
            registry.register(version(version_id, suite))
        registry.promote("production", "first", bootstrap=True)
        yield Standing(
            config=SimpleNamespace(eval=SimpleNamespace(n=N), seed=3, gate=GateConfig(min_n=N), audit=None),
            state=SimpleNamespace(deployed=V1, known=[]),
            registry=registry,
            traffic=None,
            folder=SimpleNamespace(path=tmp_path),
            ledger=SimpleNamespace(price_book=PriceBook.load()),
            taskset=lambda settings: tasksets[settings["contract"]],
            suite=lambda settings: f"letters@{settings['contract']}",
        )


def version(version_id: str, suite: str = "letters@v1") -> ModelVersion:
    return ModelVersion(version_id, None, 1, "uri", "tiny", "recipe", "", {"suite": suite})


def measured(session: Any, version_id: str, settings: dict[str, str], successes: int, draw: int = 0) -> EvalReport:
    """Puts a report on record in which the last ``successes`` tasks succeed."""
    suite, tasks = suite_name(session, settings, draw), gate_tasks(session, settings, draw)
    scores = {task.task_id: float(index >= N - successes) for index, task in enumerate(tasks)}
    report = EvalReport(version_id, suite, scores, hash_of(session, settings, draw))
    write_json(report_path(session.folder.path, version_id, suite), dataclasses.asdict(report))
    return report


def rule(session: Any, candidate: str, incumbent: str, successes: int = 1) -> Verdict:
    """One whole ruling, as the loop makes it, on invented scores."""
    new, old = session.registry.get(candidate), session.registry.get(incumbent)
    history = verdicts_before(session.registry, candidate, incumbent)
    suites = gate_suites(session, history)
    anchors = anchor_reports(session, suites, new, old)
    plan = write_plan(session, new, old, suites, anchors, history)
    after = {each.name: measured(session, candidate, dict(each.settings), successes, each.draw) for each in suites}
    before = {each.name: measured(session, incumbent, dict(each.settings), 1, each.draw) for each in suites}
    return gate(after, before, session.config.gate, primary=suites[0].name, anchor=anchors, history=history, plan=plan)


def test_a_ruling_is_the_same_before_and_after_it_is_on_record(session: Any) -> None:
    """As after a crash between the record and the end of the stage, for a refusal and for a promotion."""
    refused = rule(session, "second", "first")
    session.registry.record_verdict(refused)
    assert rule(session, "second", "first") == refused
    promoted = rule(session, "third", "first", successes=N)
    assert not any("plan" in reason for reason in promoted.reasons)
    assert promoted.evidence["series"]["trial"] == 2
    forced = dataclasses.replace(promoted, promote=True)
    session.registry.promote("production", "third", forced)
    assert rule(session, "third", "first", successes=N) == promoted
    assert len(list((session.folder.path / "plans").iterdir())) == 2, "one plan a ruling, however often it was begun"


def look(session: Any) -> None:
    record_look(session.folder.path, "first", [task.task_id for task in gate_tasks(session, V1)])


def new_prices(session: Any) -> None:
    session.ledger.price_book = SimpleNamespace(hash="another")


@pytest.mark.parametrize("meanwhile", [look, new_prices])
@pytest.mark.parametrize("recorded", [False, True])
def test_what_happens_between_a_crash_and_the_next_try_makes_no_second_trial(
    session: Any, meanwhile: Callable[[Any], None], recorded: bool
) -> None:
    verdict = rule(session, "second", "first")
    if recorded:
        session.registry.record_verdict(verdict)
    meanwhile(session)
    assert rule(session, "second", "first") == verdict
    assert verdict_on_record(session.registry, "second", "first") == (verdict if recorded else None)
    assert len(list((session.folder.path / "plans").iterdir())) == 1
    if recorded:
        assert rule(session, "third", "first").evidence["series"]["trial"] == 2


def test_another_verifier_between_two_tries_is_another_plan(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(session, "second", "first")
    monkeypatch.setattr(Taskset, "fingerprint", "another")
    assert not any("plan" in reason for reason in rule(session, "second", "first").reasons)
    assert len(list((session.folder.path / "plans").iterdir())) == 2


def test_moves_by_hand_are_no_part_of_the_series(session: Any) -> None:
    by_hand = Verdict(True, ("by hand",), {"by_hand": True}, "second", "first")
    session.registry.promote("production", "second", by_hand)
    assert verdicts_before(session.registry, "third", "second") == []
    assert rule(session, "third", "second").evidence["series"]["trial"] == 1


def test_every_ruling_on_a_suite_has_fresh_tasks_and_guards_keep_theirs(session: Any) -> None:
    seen: set[str] = set()
    for count, candidate in enumerate(("second", "third")):
        verdict = rule(session, candidate, "first")
        primary = verdict.evidence["primary"]
        assert primary == ("letters@v1" if count == 0 else "letters@v1#2")
        assert verdict.evidence["holdout"]["uses_before"] == 0
        tasks = {task.task_id for task in gate_tasks(session, V1, count)}
        assert len(tasks) == N
        assert not tasks & seen
        seen |= tasks
        session.registry.record_verdict(verdict)
    guards = {(guard["suite"], guard["against"]) for guard in verdict.evidence["guards"]}
    assert guards == {("letters@v1", "incumbent")}


def test_a_changed_contract_is_a_suite_of_its_own(session: Any) -> None:
    session.registry.record_verdict(rule(session, "second", "first"))
    session.state.deployed, session.state.known = V2, [V1]
    history = list(session.registry.verdicts())
    assert [each.name for each in gate_suites(session, history)] == ["letters@v2", "letters@v1"]


def test_tasks_that_run_out_are_used_again_and_counted(session: Any) -> None:
    few = [task for _, task in zip(range(2 * N + 3), session.taskset(V1).stream("gate", 3), strict=False)]
    session.taskset = lambda settings: SimpleNamespace(stream=lambda split, seed: iter(few))
    assert [fresh_draw(session, V1, used) for used in range(5)] == [0, 1, 0, 1, 0]


def test_the_anchor_is_the_first_that_served_for_a_suite_and_stays(session: Any) -> None:
    reports = {name: measured(session, name, V1, 4) for name in ("first", "second")}
    measured(session, "third", V2, 4)
    moves = [("second", "first"), ("third", "second")]
    for name, serving in moves:
        session.registry.promote("production", name, Verdict(True, ("why",), {}, name, serving))
    session.state.deployed, session.state.known = V2, [V1]
    suites = gate_suites(session, [])
    next_one, third = version("next"), session.registry.get("third")
    found = anchor_reports(session, suites, next_one, third)
    assert {suite: report_hash(each) for suite, each in found.items()} == {"letters@v1": report_hash(reports["first"])}, (
        "of v2 the incumbent is the first itself"
    )
    assert anchor_reports(session, suites, third, session.registry.get("first")) == {}, "as it was before third was promoted"


def test_the_plan_is_on_disk_under_the_hash_of_its_content(session: Any) -> None:
    verdict = rule(session, "second", "first")
    (path,) = (session.folder.path / "plans").iterdir()
    kept = json.loads(path.read_text())
    assert path.name == f"second-{kept['hash']}.json"
    assert plan_from_json(kept["plan"]).hash == kept["hash"] == verdict.evidence["plan_hash"]
    assert kept["plan"]["price_book"] == PriceBook.load().hash
    assert kept["announced_at"] > "2026"


def test_a_report_on_other_tasks_is_not_taken_from_the_record(session: Any) -> None:
    report = measured(session, "first", V1, 4)
    assert stored_report(session, "first", V1) == report
    assert stored_report(session, "first", V1, draw=1) is None
    session.config.seed = 4
    assert stored_report(session, "first", V1) is None


def test_looks_by_hand_at_the_tasks_of_a_ruling_are_counted_in_its_plan(session: Any) -> None:
    run, names = session.folder.path, [task.task_id for task in gate_tasks(session, V1)]
    record_look(run, "first", names[:1])
    record_look(run, "first", names)
    record_look(run, "first", [task.task_id for task in gate_tasks(session, V1, 1)])
    verdict = rule(session, "second", "first")
    assert verdict.evidence["holdout"]["looks_by_hand"] == 2, "the third was at the tasks of the next ruling"
