"""How every benchmark ends: one JSON object that says on what machine and at which commit it was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def keep(result: dict[str, Any], threads: int) -> None:
    """Completes ``result`` (:func:`described`), keeps it under ``results/``, and prints it as the last line."""
    whole = described(result, threads)
    line = json.dumps(whole)
    RESULTS.mkdir(exist_ok=True)
    name = f"{whole['benchmark']}-{whole['measured_at'].replace(':', '')}.json"
    (RESULTS / name).write_text(line + "\n", encoding="utf-8")
    print(line)


def described(result: dict[str, Any], threads: int) -> dict[str, Any]:
    """With machine, commit and time."""
    return {
        **result,
        "threads": threads,
        "machine": machine(),
        "commit": commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """What a figure has to be compared with."""
    import torch  # late, as some benchmarks measure their own memory

    cpu = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.processor(),
        "cores": cores(),
        "load_average": round(os.getloadavg()[0], 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def commit() -> str:
    """Of the code that was measured; empty outside of a clone."""
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=RESULTS.parent).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
