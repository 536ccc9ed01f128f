"""A line of JSON a step, in a file that the run appends to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from evergrad.training.sinks.base import RunInfo, Sink, Writer


class Jsonl(Sink):
    """``metrics.jsonl`` in the run folder. A run that goes on takes out the steps that it does again."""

    file: str = Field(default="metrics.jsonl", min_length=1)
    """Path, inside the run folder unless it is absolute."""

    def open(self, run: RunInfo) -> Writer:
        path = run.folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_after(path, run.step)
        return _Appender(path)


class _Appender:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **figures}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, done: bool) -> None:
        self._file.close()


def _forget_after(path: Path, step: int) -> None:
    """Rewrites the file, whole or not at all, with the steps up to ``step``; a line cut short by a kill goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)
