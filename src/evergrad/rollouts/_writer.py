"""Rollouts on disk: one JSONL file a step, readable while it is written, under its own name once it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from evergrad.types import EvergradError, Rollout, plain

PARTIAL = ".partial"
_ALWAYS = frozenset({"rollout_id", "task_id", "source", "outcome", "reward", "turns"})
"""What every line has; readers rely on it."""


class RolloutWriter:
    """Appends rollouts to ``folder/step-XXXXXX.jsonl.partial`` and renames it when its step is complete.

    A file of the same step that an interrupted run left is begun anew.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._file: IO[str] | None = None
        self._step: int | None = None

    def write(self, step: int, rollout: Rollout) -> None:
        """Adds one line, flushed, so that a reader sees it at once.

        Raises:
            EvergradError: the disk refuses, e.g. because it is full.
        """
        try:
            if step != self._step:
                self._begin(step)
            assert self._file is not None
            self._file.write(rollout_json(rollout) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error

    def complete(self, step: int) -> Path:
        """Closes the step's file and gives it its own name; a step without rollouts gets an empty file.

        Raises:
            EvergradError: the disk refuses.
        """
        final = self.folder / step_name(step)
        try:
            if step != self._step:
                self._begin(step)
            assert self._file is not None
            self._file.flush()
            os.fsync(self._file.fileno())
            self.close()
            os.replace(final.with_name(final.name + PARTIAL), final)
        except OSError as error:
            raise self._refused(error) from error
        return final

    def close(self) -> None:
        """Leaves what is written so far as a partial file."""
        file, self._file, self._step = self._file, None, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Removes partial files: rollouts that came too late for a batch of the phase that has ended."""
        self.close()
        for partial in self.folder.glob(f"step-*{PARTIAL}"):
            partial.unlink(missing_ok=True)

    def _begin(self, step: int) -> None:
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.folder / (step_name(step) + PARTIAL), "w", encoding="utf-8")  # noqa: SIM115 (kept open)
        self._step = step

    def _refused(self, error: OSError) -> EvergradError:
        what = f"rollouts cannot be written: {error.strerror or error}"
        return EvergradError(what, where=str(self.folder), hint="free disk space, then resume")


def step_name(step: int) -> str:
    """
    >>> step_name(7)
    'step-000007.jsonl'
    """
    return f"step-{step:06d}.jsonl"


def rollout_json(rollout: Rollout) -> str:
    """One line of strict JSON; a number that is not finite is written as the string ``"NaN"`` or ``"Infinity"``."""
    record = asdict(rollout)
    record["success"] = rollout.success
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(plain(record), allow_nan=False, separators=(",", ":"))


def read_rollouts(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of one file, partial or complete; a last line that is still being written is left out.

    Raises:
        EvergradError: no such file, or a whole line that is no rollout.
    """
    path = Path(path)
    if not path.is_file():
        raise EvergradError("no such rollouts file", where=str(path))
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            where, hint = f"{path}:{number}", "remove that line, or put back a copy of the file"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise EvergradError(f"not a rollout: {error}", where=where, hint=hint) from error
            missing = _ALWAYS - record.keys() if isinstance(record, dict) else _ALWAYS
            if missing:
                raise EvergradError(f"not a rollout: no {', '.join(sorted(missing))} in it", where=where, hint=hint)
            yield record
