"""A measurement whose engine is killed is no finding: nothing of it is kept, and it is made again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.loop.conftest import TINY_RUN, Start, half_written, workers

RUN = TINY_RUN.replace("n = 12", "n = 96").replace("threads = 1", "threads = 1\nmax_restarts = 0")


def reports(run: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (run / "evals").glob("*.json")}


def test_an_engine_that_is_killed_in_a_measurement_leaves_no_report_and_the_version_is_measured_again(
    tmp_path: Path, start: Start
) -> None:
    (tmp_path / "t.toml").write_text(RUN)
    run = tmp_path / "run"
    process = start("run", "t.toml", "--run-dir", str(run))
    assert process.stdout is not None
    for line in process.stdout:
        if "measuring t-c1-rl on" in line:
            break
    engines = [each for each in workers(process.pid) if "evergrad.inference" in each.cmdline()]
    # The one that serves starts at the first promotion; the candidate's weights are in the one that rolls out.
    os.kill(min(engines, key=lambda each: each.create_time()).pid, signal.SIGKILL)
    told, _ = process.communicate(timeout=900)
    assert process.returncode == 1, told
    assert "engine died (signal 9)" in told
    assert "t-c1-rl--letters@v1" not in reports(run), "what it could not answer is no score of the candidate"
    assert all(each["missing"] == [] for each in reports(run).values())
    page, figures = run / "report.html", run / "report.json"
    assert page.stat().st_mtime_ns >= figures.stat().st_mtime_ns, "drawn on the way out, too"
    assert json.loads(figures.read_text())["timeline"]

    again = start("run", "t.toml", "--run-dir", str(run))
    told, _ = again.communicate(timeout=900)
    assert again.returncode == 0, told
    found = reports(run)
    assert found["t-c1-rl--letters@v1"]["missing"] == []
    assert len(found["t-c1-rl--letters@v1"]["scores"]) == 96
    (cycle,) = json.loads(figures.read_text())["cycles"]
    assert "missing" not in "; ".join(cycle["reasons"])
    assert half_written(run) == []
