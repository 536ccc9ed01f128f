"""The controller, killed in each state of its machine, decides as one that was left alone, and every second is billed once.

Slow: a run of two cycles with a canary, once undisturbed, and once killed in every state of every cycle.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from evergrad.ledger import Ledger
from evergrad.loop._folder import Stage
from evergrad.loop.pausing import request_pause
from evergrad.registry import Registry
from tests.loop.conftest import PATIENCE_S, TWO_CYCLES, Start, finish, half_written, workers

pytestmark = pytest.mark.slow

CANARY = """
[canary]
shares = [0.5]
outcomes = 4
"""
# What a try costs is time, and no two runs take the same.
RUN = TWO_CYCLES.replace("requests = 16", "requests = 12").replace("max_cost_increase = 9999\n", "") + CANARY


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(RUN)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody disturbs, filled by the first test that needs it."""
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def undisturbed(alone: Path, config: Path, start: Start) -> Path:
    if not alone.exists():
        finish(start("loop", "run", str(config), "--run-dir", str(alone)))
    return alone


def state_of(run: Path) -> dict[str, Any]:
    path = run / "state.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"cycle": 1, "stage": "decide", "decisions": []}


def kill(process: subprocess.Popen[str]) -> None:
    children = workers(process.pid)
    process.kill()
    process.wait()
    psutil.wait_procs(children, timeout=30)


def test_killed_in_every_state_it_decides_the_same_and_is_billed_once(undisturbed: Path, config: Path, start: Start) -> None:
    run = config.parent / "killed"
    assert kill_in_every_state(config, run, start) == {stage.value for stage in Stage} - {"merge", "done"}
    assert decisions(run) == decisions(undisturbed)
    assert result(run) == result(undisturbed)
    assert_billed_once(run, undisturbed)
    assert half_written(run) == []


def kill_in_every_state(config: Path, run: Path, start: Start, cycle: int | None = None) -> set[str]:
    """Runs to the end, killed once in each state, of ``cycle`` or of any, where it is first seen there; the states in which it
    was."""
    killed = set[str]()
    process = start("loop", "run", str(config), "--run-dir", str(run))
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline, f"stuck in {state_of(run)['stage']} after {sorted(killed)}"
        # Before anything is saved the first state has begun as soon as the stores are there.
        begun = (run / "registry.sqlite").exists()
        state = state_of(run)
        stage = state["stage"]
        if begun and stage not in killed and stage != Stage.DONE.value and cycle in (None, state["cycle"]):
            kill(process)
            killed.add(stage)
            process = start("loop", "run", str(config), "--run-dir", str(run))
            deadline = time.monotonic() + PATIENCE_S
        time.sleep(0.001)
    finish(process)
    return killed


def decisions(run: Path) -> list[tuple[Any, ...]]:
    """Every decision with its evidence, without what it took: time, money, and the hashes of reports, which name seconds."""
    told = []
    for each in state_of(run)["decisions"]:
        evidence = {key: value for key, value in each["evidence"].items() if key not in ("costs", "reports", "plan_hash")}
        told.append((each["number"], each["cycle"], each["stage"], each["decided"], each["why"], each["following"], evidence))
    return told


def result(run: Path) -> dict[str, Any]:
    with Registry(run / "registry.sqlite") as registry:
        moves = [(event.action, event.version_id) for event in registry.history("production")]
        verdicts = [(each.candidate_id, each.promote, each.reasons) for each in registry.verdicts()]
    scores = [(row["label"], row["mean"], row["n"]) for row in state_of(run)["scores"]]
    return {"moves": moves, "verdicts": verdicts, "scores": scores}


def assert_billed_once(run: Path, alone: Path) -> None:
    """Seconds differ from run to run; that each is charged once, to the same subjects and phases, does not."""
    with Ledger(run / "ledger.sqlite") as ledger, Ledger.for_reading(alone / "ledger.sqlite") as other:
        ledger.check_conservation()
        keys = Counter(entry.idempotency_key for entry in ledger.entries())
        assert set(keys.values()) == {1}
        assert ledger.total_usd() == sum(entry.usd for entry in ledger.entries() if entry.usd is not None)
        lines, expected = ({(entry.subject, entry.phase) for entry in each.entries()} for each in (ledger, other))
        # A restart costs the run itself: processes start, and engines are given the weights that serve.
        restarts = {(subject, phase) for subject, phase in lines | expected if phase in ("unattributed", "setup", "idle")}
        assert lines - restarts - {("t", "weight_sync")} == expected - restarts
        starts = sum((entry.subject, entry.phase) == ("t", "setup") for entry in ledger.entries())
        assert starts > 4, "nobody was killed: proves nothing"
    work = ("kind", "cycle", "step", "sampled_tokens", "loss", "reward")
    steps = [[{key: step.get(key) for key in work} for step in state_of(each)["steps"]] for each in (run, alone)]
    assert steps[0] == steps[1]


def test_paused_in_the_middle_it_stays_so_and_goes_on_to_the_same_end(undisturbed: Path, config: Path, start: Start) -> None:
    run = config.parent / "paused"
    process = start("run", str(config), "--run-dir", str(run))
    deadline = time.monotonic() + PATIENCE_S
    while state_of(run)["stage"] != Stage.LEARN.value:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    request_pause(run, "maintenance")
    assert "paused since" in finish(process)
    stood = state_of(run)
    assert stood["stage"] == Stage.LEARN.value
    assert "paused since" in finish(start("run", str(config), "--run-dir", str(run)))
    assert state_of(run) == stood, "a restart does not lift a pause"
    finish(start("loop", "resume", "--run", str(run)))
    assert decisions(run) == decisions(undisturbed)
    assert result(run) == result(undisturbed)
