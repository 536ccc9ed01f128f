"""The machine from outside: decisions on record, pauses that hold, and what status and explain say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evergrad.config import load_config
from evergrad.ledger import Ledger
from evergrad.loop._folder import LoopState, RunFolder, Stage, lock_folder
from evergrad.loop._timeline_plot import timeline_png, timeline_svg
from evergrad.loop.config import RunConfig
from evergrad.loop.controller import run_loop
from evergrad.loop.decisions import Decision, take
from evergrad.loop.pausing import is_running, lift_pause, pause_of, request_pause
from evergrad.loop.status import status_of
from evergrad.registry import Registry
from evergrad.service.cli import command
from evergrad.types import EvergradError


@pytest.fixture
def run(tiny_config: Path) -> Path:
    """The folder of a run that stands after two decisions, with nobody at it."""
    path = tiny_config.parent / "run"
    folder = RunFolder(path, load_config(RunConfig, tiny_config, ["budget.usd=0.5"]))
    state = LoopState(wall_s=90.0)
    take(state, Decision(Stage.WARM_START, "train", "first start"), at_s=1.0, usd=0.001)
    take(state, Decision(Stage.LEARN, "warmed up", "t-c1-sft after 12 steps", {"loss": 0.25, "steps": 12}), at_s=9.0, usd=0.002)
    state.step = 2
    folder.save_state(state)
    folder.close()
    Ledger(path / "ledger.sqlite").close()
    Registry(path / "registry.sqlite").close()
    return path


def test_a_decision_and_its_move_are_one_write() -> None:
    state = LoopState()
    take(state, Decision(Stage.WATCH, "retired", "saturated"), at_s=2.0, usd=None)
    take(state, Decision(Stage.DECIDE, "next cycle", "the tool contract changed", {"fired": ["contract"]}), at_s=3.0, usd=None)
    assert [(each["number"], each["cycle"], each["stage"], each["following"]) for each in state.decisions] == [
        (1, 1, "decide", "watch"),
        (2, 1, "watch", "decide"),
    ]
    assert (state.cycle, state.stage, state.trigger, state.trigger_kinds) == (
        2,
        Stage.DECIDE,
        "the tool contract changed",
        ["contract"],
    )


def test_a_pause_is_one_until_it_is_lifted(tmp_path: Path) -> None:
    assert pause_of(tmp_path) is None
    first = request_pause(tmp_path, "maintenance")
    assert request_pause(tmp_path, "another") == first == pause_of(tmp_path)
    assert lift_pause(tmp_path) == first
    assert lift_pause(tmp_path) is None
    (tmp_path / "pause.json").write_text("[]")
    with pytest.raises(EvergradError, match="not a pause"):
        pause_of(tmp_path)


def test_status_says_what_is_done_decided_spent_and_next(run: Path) -> None:
    status = status_of(run)
    assert (status.running, status.stage, status.doing) == (
        "stopped",
        "learn",
        "reinforcement learning, 2 of up to 3 steps",
    )
    assert status.last is not None
    assert status.last["why"] == "t-c1-sft after 12 steps"
    assert (status.usd, status.budget_usd, status.minutes, status.serves) == (0.0, 0.5, 1.5, None)
    assert "evergrad loop resume" in status.following
    lock = lock_folder(run)
    assert status_of(run).running == "running"
    assert status_of(run).following == "the candidate is measured against what serves"
    request_pause(run, "maintenance")
    assert status_of(run).running == "pausing"
    lock.close()
    assert not is_running(run)
    assert status_of(run).running == "paused"
    assert "maintenance" in status_of(run).following


def test_status_names_what_is_merged(run: Path) -> None:
    state = json.loads((run / "state.json").read_text())
    state |= {"stage": "merge", "step": 0, "merge": {"parent": "t-c1-rl", "other": "t-c2-rl", "share": 0.5}}
    (run / "state.json").write_text(json.dumps(state))
    assert status_of(run).doing == "merging weights 50% of the way from t-c1-rl to t-c2-rl"


def test_the_commands_show_pause_and_explain(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["loop", "status", "--run", str(run)]) == 0
    assert "#2 in cycle 1, warm_start: warmed up" in capsys.readouterr().out
    assert command(["loop", "explain", "--run", str(run)]) == 0
    assert "first start" in capsys.readouterr().out
    assert command(["loop", "explain", "2", "--run", str(run)]) == 0
    assert "0.25" in capsys.readouterr().out
    assert command(["loop", "explain", "2", "--run", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evidence"] == {"loss": 0.25, "steps": 12}
    assert command(["loop", "explain", "3", "--run", str(run)]) != 0
    assert "it has 2" in capsys.readouterr().err
    assert command(["loop", "pause", "--run", str(run), "--reason", "maintenance"]) == 0
    assert "nobody is running it now" in capsys.readouterr().out
    assert command(["loop", "pause", "--run", str(run)]) == 0
    assert "paused already" in capsys.readouterr().out


def test_a_paused_run_starts_nothing_whoever_runs_it(run: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request_pause(run, "maintenance")
    before = (run / "state.json").read_bytes()
    assert run_loop(tiny_config, ["budget.usd=0.5"], run) == run
    told = capsys.readouterr().out
    assert "paused since" in told
    assert f"evergrad loop resume --run {run}" in told
    assert "starting" not in told
    assert (run / "state.json").read_bytes() == before


def test_the_two_names_of_run_are_one_command() -> None:
    from evergrad.service.cli import app, loop_app

    assert {each.callback for each in app.registered_commands} & {each.callback for each in loop_app.registered_commands}


def a_report() -> dict[str, Any]:
    """Two cycles: the first promotes, the second refuses a candidate that forgets and that gold does not confirm."""
    steps = [
        (1, "decide", "train", "warm_start", {}),
        (1, "measure", "promoted", "watch", {}),
        (1, "watch", "next cycle", "decide", {"fired": ["contract", "fall"]}),
        (2, "decide", "train", "warm_start", {}),
        (2, "measure", "refused", "watch", {"guards": [{"suite": "s@v1", "holds": False}]}),
    ]
    keys = ("cycle", "stage", "decided", "following", "evidence")
    return {
        "decisions": [{**dict(zip(keys, step, strict=True)), "why": "because"} for step in steps],
        "cycles": [
            {"cycle": 1, "score_before": 0.5, "score_after": 1.0, "verdict": "promoted"},
            {
                "cycle": 2,
                "score_before": 0.0,
                "score_after": 0.9,
                "verdict": "refused",
                "evidence": {"integrity": {"gold": 0.3}},
            },
        ],
        "scores": [
            {"label": "live, cycle 1", "cycle": 1, "check": check, "suite": suite, "mean": mean}
            for check, (suite, mean) in enumerate([("s@v1", 1.0), ("s@v2", 0.0)])
        ],
        "timeline": [{"at_s": 9.0, "cycle": 1, "event": "the world changes: s@v1 is now s@v2"}],
        "cost": {"by_cycle": {"cycle-1": 0.25, "cycle-2": 0.5}},
    }


def test_the_timeline_shows_triggers_rulings_changes_and_gold() -> None:
    picture = timeline_svg(a_report())
    for told in ("contract", "fall", "promoted", "forgets", "gold 30%", "s@v1 → s@v2", "live s@v2", "first start"):
        assert told in picture, told
    assert timeline_png(a_report()).startswith(b"\x89PNG")


@pytest.mark.parametrize("cycles", [0, 1])
def test_before_a_second_cycle_there_is_no_line_of_time(cycles: int) -> None:
    data = a_report()
    data["decisions"] = [each for each in data["decisions"] if each["cycle"] <= cycles]
    assert timeline_svg(data) == ""
    assert timeline_png(data) == b""
