"""A run that is killed, whoever of it and whenever, ends with the weights of a run that was left alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.loop.conftest import PATIENCE_S, Start, finish, half_written, worker, workers


def weights_hash(run: Path) -> str:
    """Over every bit of the final candidate's tensors; a file's header may order its notes as it likes."""
    digest = hashlib.sha256()
    (path,) = (run / "versions" / "t-c1-rl").glob("*.safetensors")
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody disturbs, filled by the first test that needs it."""
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def undisturbed(alone: Path, tiny_config: Path, start: Start) -> str:
    if not alone.exists():
        finish(start("run", str(tiny_config), "--run-dir", str(alone)))
    return weights_hash(alone)


def wait_for(moment: str, run: Path, process: subprocess.Popen[str]) -> None:
    """Returns when the run has come to a moment of its second RL step (or warm start)."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if reached(moment, run):
            return
        time.sleep(0.002)
    raise AssertionError(f"the run never came to {moment}")


def reached(moment: str, run: Path) -> bool:
    """Whether the run is at the moment, or, on a fast machine, just past it."""
    if moment in ("rollouts", "training") and (run / "rollouts" / "step-000001.jsonl").exists():
        return True
    if moment == "warm start":
        return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") >= 3
    if moment == "rollouts":
        return (run / "rollouts" / "step-000001.jsonl.partial").exists()
    if moment == "training":
        partial = run / "rollouts" / "step-000001.jsonl.partial"
        return partial.exists() and partial.read_text().count("\n") >= 16
    return any((run / "checkpoints").glob("*learn-00002*")) or any((run / "checkpoints").glob(".*learn-00002*"))


MOMENTS = ("warm start", "rollouts", "training", "saving")
VICTIMS = ("controller", "evergrad.inference", "evergrad.training")
# The others go the same way and take minutes more: `make test-slow`.
EVERY_TIME = {("controller", "rollouts")}
PAIRS = [
    pytest.param(victim, moment, marks=() if (victim, moment) in EVERY_TIME else pytest.mark.slow)
    for victim in VICTIMS
    for moment in MOMENTS
]


@pytest.mark.parametrize(("victim", "moment"), PAIRS)
def test_killed_and_resumed_equals_left_alone(
    undisturbed: str, tiny_config: Path, start: Start, victim: str, moment: str
) -> None:
    run = tiny_config.parent / "killed"
    process = start("run", str(tiny_config), "--run-dir", str(run))
    wait_for(moment, run, process)
    children = workers(process.pid)
    if victim == "controller":
        process.kill()
        process.wait()
        psutil.wait_procs(children, timeout=15)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        finish(start("run", str(tiny_config), "--run-dir", str(run)))
    else:
        child = worker(process.pid, victim)
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        assert "died (signal 9)" in finish(process)
    assert weights_hash(run) == undisturbed
    assert_whole(run)
    learned = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(step["kind"], step["step"]) for step in learned] == [("sft", n) for n in range(1, 13)] + [
        ("rl", n) for n in (1, 2, 3)
    ]
    assert any(step["informative_groups"] for step in learned if step["kind"] == "rl"), "nothing was learned: proves nothing"


def assert_whole(run: Path) -> None:
    """Nothing half-written is left, and no task was trained on twice."""
    assert half_written(run) == []
    trained = Counter()
    for path in sorted(run.glob("rollouts/step-*.jsonl")):
        trained.update({json.loads(line)["task_id"] for line in path.read_text().splitlines()})
    assert len(trained) == 12
    assert set(trained.values()) == {1}
    json.loads((run / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in report.json"))


@pytest.mark.slow
def test_of_groups_under_way_none_is_left_out_and_none_comes_twice(tiny_config: Path, start: Start) -> None:
    """With stale tokens allowed, groups wait and run when the controller is killed: bits may differ then, numbers may not."""
    tiny_config.write_text(tiny_config.read_text().replace("steps = 3\n", "steps = 5\nmax_off_policy_steps = 2\n"))
    run = tiny_config.parent / "killed"
    process = start("run", str(tiny_config), "--run-dir", str(run))
    wait_for("saving", run, process)
    process.kill()
    process.wait()
    finish(start("run", str(tiny_config), "--run-dir", str(run)))
    learned = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in learned if step["kind"] == "rl"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert max(step["staleness_max"] for step in steps) in (1, 2)
    recorded = Counter()
    for path in sorted(run.glob("rollouts/step-*.jsonl")):
        recorded.update(json.loads(line)["group_id"] for line in path.read_text().splitlines())
    # Every group stands on record once, whole, and no number is missing.
    assert recorded == {f"c1-g{number}": 4 for number in range(len(recorded))}
    assert len(recorded) >= 20
    assert half_written(run) == []


TRAINERS = {"full": 'method = "full"', "lora": 'method = "lora"', "two ranks": 'method = "full"\nranks = 2'}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_at_each_of_six_steps_one_after_the_other(tiny_config: Path, tmp_path: Path, start: Start, trainer: str) -> None:
    """Each session is killed when its next step is on record, whether that is saved yet or not; what it lost is done again."""
    text = tiny_config.read_text().replace('method = "full"', TRAINERS[trainer])
    tiny_config.write_text(text.replace("steps = 3", "steps = 6"))
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "alone")))
    run = tmp_path / "killed"
    for step in range(1, 7):
        process = start("run", str(tiny_config), "--run-dir", str(run))
        deadline = time.monotonic() + PATIENCE_S
        while steps_on_record(run) < step:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        children = workers(process.pid)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(children, timeout=15)[1]
    finish(start("run", str(tiny_config), "--run-dir", str(run)))
    assert steps_on_record(run) == 6
    assert weights_hash(run) == weights_hash(tmp_path / "alone")


def steps_on_record(run: Path) -> int:
    """Of reinforcement learning."""
    path = run / "metrics.jsonl"
    return path.read_text().count('"kind": "rl"') if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["warm start", "rollouts"])
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_and_the_run_goes_on_later(
    undisturbed: str, tiny_config: Path, start: Start, moment: str, signal_number: int
) -> None:
    run = tiny_config.parent / "interrupted"
    process = start("run", str(tiny_config), "--run-dir", str(run))
    wait_for(moment, run, process)
    children = workers(process.pid)
    process.send_signal(signal_number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert output.endswith("the same command goes on from where it was\ninterrupted\n")
    if moment == "rollouts":
        assert f"t-c1-sft can serve already: evergrad serve --run {run}" in output
        assert (run / "report.html").stat().st_mtime >= (run / "state.json").stat().st_mtime
    psutil.wait_procs(children, timeout=15)
    assert not any(child.is_running() for child in children)
    finish(start("run", str(tiny_config), "--run-dir", str(run)))
    assert weights_hash(run) == undisturbed


def test_a_finished_run_starts_nothing(undisturbed: str, alone: Path, tiny_config: Path, start: Start) -> None:
    before = {path: path.stat().st_mtime_ns for path in alone.glob("versions/*/*")}
    assert "is finished" in finish(start("run", str(tiny_config), "--run-dir", str(alone)))
    assert {path: path.stat().st_mtime_ns for path in alone.glob("versions/*/*")} == before
    assert weights_hash(alone) == undisturbed
