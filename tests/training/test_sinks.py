"""The contract of sinks: figures in, a record that goes on where it stopped, an error that says what to install."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evergrad.training.sinks import SINKS, RunInfo, Sink, SinkConfig, SinkError, SinkFan, build_sink
from evergrad.training.sinks.jsonl import Jsonl

FIGURES = {"loss": 1.5, "lr": 1e-3}


def installed(name: str) -> bool:
    package = SINKS[name].package
    return package is None or importlib.util.find_spec(package) is not None


def run_in(folder: Path, step: int = 0) -> RunInfo:
    return RunInfo("my-run", folder, {"seed": 0, "data": {"file": "a.jsonl"}, "epochs": None}, step)


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_takes_figures_and_goes_on_with_the_same_record(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed(name):
        pytest.skip(f"{SINKS[name].package} is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    sink = build_sink(name, {})
    sink.check()
    first = sink.open(run_in(tmp_path))
    for step in (1, 2, 3):
        first.log(step, FIGURES)
    first.close(done=False)
    second = sink.open(run_in(tmp_path, step=2))
    second.log(3, FIGURES)
    second.close(done=True)
    assert any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_named_with_how_to_install_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = build_sink(name, {})
    if sink.package is None:
        sink.check()
        return

    def missing(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr("importlib.import_module", missing)
    for call in (sink.check, lambda: sink.open(run_in(tmp_path))):
        with pytest.raises(SinkError, match=rf"needs the package {sink.package}.*pip install {sink.package}"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_sink_or_option_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        SinkConfig(name="tensorbord")
    with pytest.raises(ValueError, match="did you mean 'project'"):
        SinkConfig(name="wandb", options={"projekt": "a"})
    with pytest.raises(ValueError, match="sink 'wandb': mode"):
        SinkConfig(name="wandb", options={"mode": "sometimes"})


def test_lines_that_are_done_again_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n{"step": 3, "lo')
    writer = Jsonl().open(run_in(tmp_path, step=1))
    writer.log(2, {"loss": 0.25})
    writer.close(done=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.25},
    ]


class _Breaks(Sink):
    """Opens, and fails at its second step."""

    def open(self, run: RunInfo) -> Any:
        return _BreaksLater()


class _BreaksLater:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.seen.append(step)
        if step > 1:
            raise ConnectionError("gone")

    def close(self, done: bool) -> None:
        raise ConnectionError("still gone")


def test_a_sink_that_fails_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    told: list[str] = []
    fan = SinkFan([_Breaks(), Jsonl()], run_in(tmp_path), told.append)
    for step in (1, 2, 3):
        fan.log(step, {"loss": 1.0, "bad": math.nan, "flag": True, "name": "x"})
    fan.close(done=True)
    assert told == ["the sink '_breaks' failed and is left out from step 2 on: gone"]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": step, "loss": 1.0} for step in (1, 2, 3)]


def test_a_sink_that_does_not_open_closes_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr("evergrad.training.sinks.jsonl._Appender.close", lambda self, done: closed.append(done))
    monkeypatch.setattr(_Breaks, "open", lambda self, run: (_ for _ in ()).throw(SinkError("no")))
    with pytest.raises(SinkError, match="no"):
        SinkFan([Jsonl(), _Breaks()], run_in(tmp_path), print)
    assert closed == [False]
