"""The gold audit on its way through a rollout, an evaluation and a cycle; and a run that waits for its verifier's repair."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from evergrad.envs import Taskset
from evergrad.evals import AuditConfig, evaluate
from evergrad.loop import _gold_audit
from evergrad.loop._checking import check_inputs
from evergrad.loop._console import LoopConsole
from evergrad.loop._folder import LoopState, write_text
from evergrad.loop._session import Session
from evergrad.loop._watching import _wait_for_repair
from evergrad.loop.config import RunConfig
from evergrad.loop.pausing import Paused, pause_of
from evergrad.registry import base_model
from evergrad.rollouts import Renderer, greedy_rollout, scripted
from evergrad.types import InputError, Outcome, Rollout, RolloutGroup, Task, Verdict
from tests.loop.conftest import LETTERS

QUEUES = str(Path(__file__).parents[2] / "examples" / "queues.py")
SOURCE = Path(QUEUES).read_text()
CATCH_ALL = "h"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(base_model("tiny")))


async def said(renderer: Renderer, taskset: Taskset, task: Task, text: str, *, audit: bool) -> Rollout:
    speaker = scripted([text], renderer)
    return await greedy_rollout(task, taskset, speaker, renderer, rollout_id=task.task_id, group_id="g", audit=audit)


async def test_gold_is_asked_of_audited_rollouts_alone(renderer: Renderer) -> None:
    taskset = Taskset(QUEUES, {"contract": "v3"})
    task = next(each for each in taskset.tasks("gate", 20) if each.metadata["queue"] != CATCH_ALL)
    fooled = await said(renderer, taskset, task, CATCH_ALL, audit=True)
    assert (fooled.reward, fooled.gold) == (1.0, 0.0)
    assert (await said(renderer, taskset, task, task.metadata["queue"], audit=True)).gold == 1.0
    assert (await said(renderer, taskset, task, CATCH_ALL, audit=False)).gold is None
    silent = await said(renderer, taskset, task, "a long answer that nobody can cut to four tokens", audit=True)
    assert (silent.outcome, silent.gold) == (Outcome.POLICY_FAULT, 0.0)
    assert fooled.contract == taskset.contract_hash


@pytest.mark.parametrize("gold", ["raise RuntimeError('out of office')", "return 3.0", "return 'yes'", "return float('nan')"])
async def test_a_broken_gold_is_a_fault_and_no_score(renderer: Renderer, tmp_path: Path, gold: str) -> None:
    write_text(tmp_path / "broken.py", SOURCE.replace('return float(answer == self.facts["queue"])\n', f"{gold}\n"))
    taskset = Taskset(str(tmp_path / "broken.py"), {})
    rollout = await said(renderer, taskset, taskset.tasks("gate", 1)[0], "a", audit=True)
    assert rollout.outcome is Outcome.VERIFIER_FAULT
    assert "gold" in rollout.fault


async def test_an_evaluation_keeps_the_gold_of_its_audited_tasks(renderer: Renderer) -> None:
    taskset = Taskset(QUEUES, {"contract": "v3"})
    tasks = taskset.tasks("gate", 20)
    session: Any = SimpleNamespace(config=SimpleNamespace(audit=AuditConfig(share=0.25)))
    audits = _gold_audit.audits_task(session, tasks)

    async def run(task: Task) -> Rollout:
        return await said(renderer, taskset, task, CATCH_ALL, audit=audits(task))

    report = await evaluate("v", "queues@v3", tasks, run)
    right = {task.task_id: float(task.metadata["queue"] == CATCH_ALL) for task in tasks}
    assert report.mean == 1.0
    assert len(report.gold) == 5
    assert all(right[task_id] == gold for task_id, gold in report.gold.items())


class Loop:
    """As much of a session as the audit of a cycle needs."""

    distrust, convict = Session.distrust, Session.convict

    def __init__(self, audit: AuditConfig | None = None, root: Path | None = None) -> None:
        self.config = SimpleNamespace(audit=audit or AuditConfig(training_share=0.5))
        self.state = LoopState(deployed={"contract": "v3"})
        self.audited: list[Rollout] = []
        self.told: list[str] = []
        self.folder = SimpleNamespace(path=root)

    def taskset(self, settings: Any) -> Taskset:
        return Taskset(QUEUES, settings)

    def suite(self, settings: Any) -> str:
        return self.taskset(settings).suite

    def event(self, text: str) -> None:
        self.told.append(text)

    def save_state(self) -> None: ...


def judged(rollout_id: str, reward: float, gold: float | None) -> Rollout:
    return Rollout(rollout_id, "g", "t", (), Outcome.SCORED, reward, gold=gold)


def test_training_is_audited_on_the_deployed_contract_and_whatever_ends_first() -> None:
    session: Any = Loop()
    audits = _gold_audit.audits_training(session, {"contract": "v3"})
    assert audits is not None
    assert 0.4 < sum(audits(f"c7-g{i}/0") for i in range(1000)) / 1000 < 0.6
    assert _gold_audit.audits_training(session, {"contract": "v1"}) is None
    for order in ((2, 1), (1, 2)):
        session.state.audited = []
        for number in order:
            rollouts = (judged(f"g{number}/0", 1.0, number / 2), judged(f"g{number}/1", 1.0, None))
            _gold_audit.keep_audited(session, RolloutGroup(f"g{number}", rollouts))
        assert _gold_audit.audited_figures(session) == {"audited": 2, "audited_reward": 1.0, "audited_gold": 0.75}
        assert session.state.audited == [[1.0, 0.5], [1.0, 1.0]]
    assert _gold_audit.audited_figures(session) == {}


def test_training_ends_when_its_rewards_are_not_gold() -> None:
    session: Any = Loop()
    session.state.audited = [[1.0, 1.0]] * 40
    assert _gold_audit.distrusted_by_training(session) is None
    session.state.audited += [[1.0, 0.0]] * 20
    assert "the verifier overstates what is being learned" in (_gold_audit.distrusted_by_training(session) or "")
    assert session.distrust({"contract": "v3"}) is not None
    assert session.distrust({"contract": "v2"}) is None
    assert len(session.told) == 1


def test_the_gates_alarm_convicts_and_a_repair_clears() -> None:
    session: Any = Loop()
    integrity = {"alarm": True, "reward": 1.0, "gold": 0.25, "audited": 48, "e_value": 900.0}
    _gold_audit.convict_by_verdict(session, Verdict(False, (), {"integrity": {**integrity, "alarm": False}}, "c"))
    assert session.distrust({"contract": "v3"}) is None
    _gold_audit.convict_by_verdict(session, Verdict(False, (), {"integrity": integrity}, "c"))
    assert "gold 0.250 on 48 audited tries" in (session.distrust({"contract": "v3"}) or "")
    session.state.distrusted["queues@v3"]["fingerprint"] = "before the repair"
    assert session.distrust({"contract": "v3"}) is None


def test_a_run_whose_deployed_rewards_are_wrong_pauses_itself(tmp_path: Path) -> None:
    session: Any = Loop(root=tmp_path)
    with pytest.raises(Paused, match="repair the verifier, then resume"):
        _wait_for_repair(session, "gold 0.25")
    pause = pause_of(tmp_path)
    assert pause is not None
    assert "queues@v3" in pause.reason


def test_an_audit_that_cannot_be_made_is_refused_before_anything_starts() -> None:
    data = {"environment": {"name": str(LETTERS)}, "model": "tiny", "audit": {}}
    with pytest.raises(InputError, match="no gold verifier"):
        check_inputs(RunConfig.model_validate(data), LoopConsole())
    with pytest.raises(ValueError, match=r"audit\.share = 0\.1 of eval\.n = 96"):
        RunConfig.model_validate({**data, "audit": {"share": 0.1}})
    with pytest.raises(ValueError, match="two recipes for cycle 3"):
        RunConfig.model_validate({**data, "audit": None, "trials": [{"cycle": 3}, {"cycle": 3}]})
