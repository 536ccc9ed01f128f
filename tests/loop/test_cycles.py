"""A run of two cycles: learn, promote, a changed contract, a fall, learn again; also killed late in it, and asynchronous."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from evergrad.loop.auditing import State, audit, read_certificate
from evergrad.loop.certificate import signing_key
from evergrad.registry import Registry
from tests.loop.conftest import PATIENCE_S, TINY_RUN, TWO_CYCLES, Start, finish, half_written, workers


@pytest.fixture
def two_cycles(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(TWO_CYCLES)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody disturbs, filled by the first test that needs it."""
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def undisturbed(alone: Path, two_cycles: Path, start: Start) -> Path:
    if not alone.exists():
        finish(start("run", str(two_cycles), "--run-dir", str(alone)))
    return alone


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_two_cycles_learn_fall_and_forget_nothing(undisturbed: Path) -> None:
    report = read(undisturbed / "report.json")
    first, second = report["cycles"]
    assert (first["trigger"], first["suite"], first["other_suites"]) == ("first start", "letters@v1", {})
    assert "the tool contract changed" in second["trigger"]
    assert "live success fell to" in second["trigger"]
    assert [cycle["verdict"] for cycle in report["cycles"]] == ["promoted", "promoted"], report["cycles"]
    assert (second["suite"], second["incumbent"]) == ("letters@v2", "t-c1-rl")
    assert second["score_after"] > second["score_before"]
    assert second["evidence"]["costs"]["limit"] == 10000
    # The old contract is guarded against the version that serves and against the first that ever did.
    guards = {(guard["suite"], guard["against"], guard["version_id"]) for guard in second["evidence"]["guards"]}
    assert guards == {("letters@v1", "incumbent", "t-c1-rl"), ("letters@v1", "anchor", "t-c1-sft")}
    kept = second["other_suites"]["letters@v1"]
    assert kept["after"] > kept["before"] - 0.2
    assert report["priced_on"] == {"version_id": "t-c2-rl", "suite": "letters@v2", "n": 48}
    assert report["usd_per_success"] > 0
    after = {"score": second["score_after"], "n": 48, "live": False}
    assert report["serving"] == {"version_id": "t-c2-rl", "suite": "letters@v2", **after}
    assert "http" not in json.dumps([report["timeline"], report["versions"]]), "the report outlives the engines"
    measured = [(score["version_id"], score["suite"]) for score in report["scores"] if score["n"] == 48]
    assert measured == [
        ("t-c1-sft", "letters@v1"),
        ("t-c1-rl", "letters@v1"),
        ("t-c1-rl", "letters@v2"),
        ("t-c2-rl", "letters@v2"),
        ("t-c2-rl", "letters@v1"),
    ]
    series = [cycle["evidence"]["series"] for cycle in report["cycles"]]
    assert [(each["trial"], each["promotions_before"]) for each in series] == [(1, 0), (2, 1)]
    assert series[1]["level"] > series[0]["level"]
    assert {place["version_id"] for place in report["frontier"]} == {"t-c1-rl", "t-c2-rl"}
    live = [score["label"] for score in report["scores"] if score["label"].startswith("live")]
    assert live == ["live, cycle 1", "live, cycle 1, check 2", "live, cycle 2"]
    assert report["wall_s"] > sum(step["seconds"] for step in report["steps"])
    assert all("task_usd" not in score for score in report["scores"])


def test_each_verdict_has_a_certificate_that_an_audit_confirms(undisturbed: Path) -> None:
    paths = sorted((undisturbed / "certificates").glob("*.json"))
    assert [path.name.rpartition("-")[0] for path in paths] == ["t-c1-rl", "t-c2-rl"]
    for path in paths:
        found = {each.check: each for each in audit(undisturbed, read_certificate(path), signing_key().public_key())}
        assert [each for each in found.values() if each.state is State.FAILS] == []
        assert found["ruling made again"].told == "the same to the last digit"
        assert path.with_suffix(".html").is_file()


MOMENTS: dict[str, Callable[[Path, dict[str, Any]], bool]] = {
    "measure": lambda run, state: state["cycle"] == 2 and (run / "evals" / "t-c1-rl--letters@v2.json").exists(),
    "watch": lambda run, state: state["cycle"] == 1 and state["stage"] == "watch",
}


def kill(process: subprocess.Popen[str], victim: str) -> None:
    children = workers(process.pid)
    if victim == "controller":
        process.kill()
        process.wait()
        psutil.wait_procs(children, timeout=15)
        return
    kind = "evergrad.training" if victim == "trainer" else "evergrad.inference"
    engines = sorted((child for child in children if kind in child.cmdline()), key=lambda child: child.create_time())
    # The serving engine starts at the first promotion, after the one that rollouts use.
    os.kill(engines[-1 if victim == "serving" else 0].pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["controller", "trainer", "engine", "serving"])
def test_killed_late_and_resumed_equals_left_alone(
    undisturbed: Path, two_cycles: Path, start: Start, victim: str, moment: str
) -> None:
    run = two_cycles.parent / "killed"
    process = start("run", str(two_cycles), "--run-dir", str(run))
    deadline = time.monotonic() + PATIENCE_S
    while not ((run / "state.json").exists() and MOMENTS[moment](run, read(run / "state.json"))):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"the run never came to {moment}"
        time.sleep(0.002)
    kill(process, victim)
    finish(start("run", str(two_cycles), "--run-dir", str(run)) if victim == "controller" else process)
    assert result_of(run) == result_of(undisturbed)
    assert half_written(run) == []


def result_of(run: Path) -> dict[str, Any]:
    """All that a run found out, without what it took."""
    report = read(run / "report.json")
    with Registry(run / "registry.sqlite") as registry:
        moves = [(event.action, event.version_id) for event in registry.history("production")]
    told = ("trigger", "score_before", "score_after", "other_suites", "verdict")
    weights = load_file(run / "versions" / "t-c2-rl" / "model.safetensors")
    return {
        "cycles": [[cycle[key] for key in told] for cycle in report["cycles"]],
        "scores": [(score["label"], score["mean"], score["ci95"], score["n"]) for score in report["scores"]],
        "moves": moves,
        "weights": {name: tensor.numpy().tobytes() for name, tensor in sorted(weights.items())},
    }


def test_an_asynchronous_run_overlaps_and_ends(tmp_path: Path, start: Start) -> None:
    config = TINY_RUN.replace("threads = 1", 'threads = 1\nmode = "disaggregated"')
    config = config.replace("group_size = 4", "group_size = 4\nmax_off_policy_steps = 1")
    (tmp_path / "async.toml").write_text(config)
    run = tmp_path / "run"
    finish(start("run", str(tmp_path / "async.toml"), "--run-dir", str(run)))
    report = read(run / "report.json")
    assert [step["step"] for step in report["steps"]] == [1, 2, 3]
    staleness = [step["staleness_mean"] for step in report["steps"]]
    assert staleness[0] == 0
    assert 0 < max(staleness) <= 1, "nothing overlapped, or the bound does not hold"
    assert report["cycles"][0]["verdict"] in ("promoted", "refused")
    assert half_written(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [True, False])
def test_two_engines_roll_out_and_one_may_die(tmp_path: Path, start: Start, synchronous: bool) -> None:
    config = TINY_RUN.replace("threads = 1", "threads = 1\nreplicas = 2")
    if not synchronous:
        config = config.replace("threads = 1", 'threads = 1\nmode = "disaggregated"')
        config = config.replace("group_size = 4", "group_size = 4\nmax_off_policy_steps = 1")
    (tmp_path / "two.toml").write_text(config)
    run = tmp_path / "run"
    process = start("run", str(tmp_path / "two.toml"), "--run-dir", str(run))
    deadline = time.monotonic() + PATIENCE_S
    while not ((run / "state.json").exists() and read(run / "state.json")["stage"] == "learn"):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    engines = [each for each in workers(process.pid) if "evergrad.inference" in each.cmdline()]
    engines[0].kill()
    told = finish(process)
    assert ("going on from the last saved state" in told) == synchronous, told
    assert ("another takes its place" in told) != synchronous, told
    report = read(run / "report.json")
    assert [step["step"] for step in report["steps"]] == [1, 2, 3]
    if synchronous:
        assert [step["lockstep_misses"] for step in report["steps"]] == [0, 0, 0]
        alone = tmp_path / "alone"
        finish(start("run", str(tmp_path / "two.toml"), "--run-dir", str(alone)))
        weights = [load_file(each / "versions" / "t-c1-rl" / "model.safetensors") for each in (run, alone)]
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert report["cycles"][0]["verdict"] in ("promoted", "refused")
