"""Finds a run's folder, and reads the plain files in it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evergrad.config import nearest
from evergrad.types import EvergradError, InputError

RUNS = Path("runs")
REGISTRY, LEDGER = "registry.sqlite", "ledger.sqlite"


def find_run(folder: Path | None, *, root: Path = RUNS, holds: Sequence[str] = (REGISTRY,)) -> Path:
    """``folder`` if it holds a run, or the newest run under ``root``.

    Args:
        holds: Files of which a run that will do has one; a training on data has a ledger, but no registry.

    Raises:
        InputError: no such folder, or it holds no run; names the runs that there are.
    """
    runs = sorted({path.parent for name in holds for path in root.glob(f"*/{name}")}) if root.is_dir() else []
    if folder is None:
        if not runs:
            raise InputError(
                "no run yet", where=f"{root}/", hint="start one with 'evergrad run CONFIG.toml', or name one with --run DIR"
            )
        return max(runs, key=_last_change)
    if any((folder / name).is_file() for name in holds):
        return folder
    if (folder / LEDGER).is_file():
        raise InputError(
            "a training on data has no versions, rollouts or certificates",
            where=str(folder),
            hint="'evergrad cost' reads it; the others want a folder of 'evergrad run'",
        )
    what = "the folder holds no run" if folder.is_dir() else "run folder not found"
    names = [str(run) for run in runs]
    raise InputError(what, where=str(folder), hint=nearest(str(folder), names) if names else "start one with 'evergrad run'")


def run_config(run: Path) -> dict[str, Any]:
    """The run's resolved configuration, as plain data with a model and an environment.

    Raises:
        EvergradError: the file is missing or broken.
    """
    path = run / "config.toml"
    hint = "put back a copy of it; 'evergrad run' with the configuration of this run writes it when it is absent"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvergradError("the run has no config.toml", where=str(path), hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise EvergradError(f"not valid TOML: {error}", where=str(path), hint=hint) from error
    environment = data.get("environment")
    if not isinstance(environment, dict) or not isinstance(environment.get("name"), str):
        raise EvergradError("no environment.name in the configuration of the run", where=str(path), hint=hint)
    if not isinstance(data.get("model"), str) or not isinstance(environment.get("settings", {}), dict):
        raise EvergradError("not the configuration of a run: model or settings are wrong", where=str(path), hint=hint)
    return data


def rollout_files(run: Path) -> list[Path]:
    """The run's rollout files, oldest first, the one still being written included."""
    folder = run / "rollouts"
    files = [*folder.glob("*.jsonl"), *folder.glob("*.jsonl.partial")] if folder.is_dir() else []
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _last_change(run: Path) -> int:
    return max(path.stat().st_mtime_ns for path in run.iterdir() if path.is_file())
