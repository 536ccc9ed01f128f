"""Whole runs on the tiny model: configurations, and a way to start ``evergrad run`` as a user does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

LETTERS = Path(__file__).parents[2] / "examples" / "letters.py"

TINY_RUN = f"""
name = "t"
model = "tiny"
seed = 5

[environment]
name = "{LETTERS}"

[placement]
threads = 1

[learn.warm_start]
demonstrations = 96
batch_size = 8
settings = {{ difficulty = "easy" }}
lr = 1e-2

[learn.rl]
steps = 3
groups_per_step = 4
group_size = 4
lr = 1e-3

[trainer]
method = "full"

[eval]
n = 12

[gate]
min_n = 12

[watch]
requests = 4
"""

TWO_CYCLES = f"""
name = "t"
model = "tiny"
seed = 5

[environment]
name = "{LETTERS}"
settings = {{ contract = "v1" }}

[budget]
cycles = 2

[placement]
threads = 1

[learn.warm_start]
demonstrations = 96
batch_size = 8
settings = {{ difficulty = "easy" }}
lr = 1e-2

[learn.rl]
steps = 12
groups_per_step = 4
group_size = 8
lr = 1e-3
stop_at_reward = 0.97

[adapt.warm_start]
demonstrations = 160
replay = 160
batch_size = 8
lr = 3e-3

[adapt.rl]
steps = 12
stop_at_reward = 0.97
groups_per_step = 4
group_size = 8
lr = 5e-4

[trainer]
method = "full"

[eval]
n = 48

[gate]
min_n = 48
guard_margin = 0.2
max_cost_increase = 9999

[watch]
requests = 16

[[traffic.changes]]
after_cycle = 1
settings = {{ contract = "v2" }}
"""


@pytest.fixture
def tiny_config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY_RUN)
    return path


PATIENCE_S = 1800.0
"""Of a wait in a test of a whole run; only a hang takes so long, however busy the machine is."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the command line in a process of its own; whatever is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        def prepare() -> None:
            # A shell that runs the tests in the background has them ignore SIGINT; a user's terminal does not.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if before is not None:
                before()

        process = subprocess.Popen(
            [sys.executable, "-m", "evergrad.service.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200"},
            preexec_fn=prepare,
        )
        started.append(process)
        return process

    yield run  # type: ignore[misc]
    for process in started:
        for child in workers(process.pid):
            child.kill()
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[str]) -> str:
    """What a command has printed that ended well."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    return output


@pytest.fixture
def redactor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a redactor, as commands that are started from here on know it: addresses of mail are taken out."""
    (tmp_path / "redactor.py").write_text(
        "import re\n\n\ndef redact(text):\n    return re.sub(r'[a-z]+@example[.]com', '<EMAIL_ADDRESS>', text)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "redactor:redact"


def workers(pid: int) -> list[psutil.Process]:
    """The children of a controller that are engines or trainers."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if "evergrad." in " ".join(_command(child))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def worker(pid: int, module: str) -> psutil.Process | None:
    """The first child that runs ``module``."""
    return next((child for child in workers(pid) if module in _command(child)), None)


def half_written(run: Path) -> list[Path]:
    """What a write begins beside its place: folders and rollouts (``.partial``), plain files (``.tmp``), reports."""
    begun = re.compile(r"\.partial|^\.report\.|\.tmp$")
    return [path for path in run.rglob("*") if begun.search(path.name)]
