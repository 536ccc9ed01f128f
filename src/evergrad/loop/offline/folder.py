"""The folder of a training run: its lock, what it was started with, and its checkpoints.

A checkpoint is one folder, made by a rename: the trainer's own state and, beside it, where the run stood. Nothing else is
needed to go on, and nothing else is believed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.loop._folder import differences, lock_folder, to_toml, write_json, write_text
from evergrad.loop.offline.config import TrainConfig
from evergrad.types import EvergradError, InputError

if TYPE_CHECKING:
    from evergrad.training.trainer import Trainer

FREE = ("checkpoint", "sinks", "price_book")
"""Tables of the configuration that may change while a run goes on: they decide no weight."""


@dataclass
class Progress:
    """Where a run stands; saved in every checkpoint."""

    step: int = 0
    """Optimizer steps done; the next batch is this one, counted from 0."""
    tokens: int = 0
    """Positions of all rows that were trained so far, context included."""
    wall_s: float = 0.0
    """Seconds of all attempts up to here, those included whose steps were lost, as in the ledger."""
    train_s: float = 0.0
    """Seconds in these optimizer steps."""
    first_loss: float | None = None
    last_loss: float | None = None
    heldout: list[dict[str, float]] = field(default_factory=list)
    """``step``, ``loss`` and what else was measured on the held-out rows, in order."""

    def best(self, count: int) -> list[int]:
        """Steps of the lowest held-out losses that a checkpoint was made with, the earlier of equal ones first."""
        measured = [entry for entry in self.heldout if entry["step"] and is_number(entry["loss"])]
        return [int(entry["step"]) for entry in sorted(measured, key=lambda entry: (entry["loss"], entry["step"]))[:count]]


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


class TrainFolder:
    """Opens ``path`` for one process, new or to go on.

    Args:
        data: What the run learns from, by role: path, hash and number of rows of each data file, and under ``model`` the
            folder and hash of the base weights.

    Raises:
        InputError: the folder holds a run of another configuration or of other data; names what changed.
        EvergradError: another process runs in it.
    """

    def __init__(self, path: Path, config: TrainConfig, data: Mapping[str, Mapping[str, Any]]) -> None:
        self.path = path
        if (path / "registry.sqlite").exists():
            raise InputError("this folder holds a run of 'evergrad run'", where=str(path), hint="choose another --run-dir")
        self._lock = lock_folder(path)
        try:
            resolved = config.model_dump(mode="json", exclude_none=True)
            if self.steps() or self.report.exists():
                self._check_config(resolved)
                self._check_data(data)
            else:
                # There is nothing to go on from: the run is this one, whatever was tried before.
                shutil.rmtree(self.reference, ignore_errors=True)
            write_text(path / "config.toml", to_toml(resolved))
            write_json(path / "data.json", data)
            for leftover in self._checkpoints.glob(".removed-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._lock.close()

    @property
    def final(self) -> Path:
        """The trained model or adapter."""
        return self.path / "final"

    @property
    def reference(self) -> Path:
        """What the reference thinks of the data, for methods that compare with one."""
        return self.path / "reference"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def steps(self) -> list[int]:
        """Steps of the checkpoints that there are, ascending."""
        names = [path.name for path in self._checkpoints.glob("step-*")] if self._checkpoints.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name)))

    def begin_save(self, trainer: Trainer, progress: Progress, keep: Iterable[int]) -> Future[None]:
        """Writes the checkpoint of ``progress.step``, whole or not at all, and then removes those of steps not in ``keep``.

        Training may go on at once: several ranks write meanwhile, one has written by then. One at a time.

        Raises:
            TransferError: the disk refused, here or in the future; the checkpoints so far are untouched.
        """
        from evergrad.transfer import whole_folder

        kept, record = {progress.step, *keep}, dataclasses.asdict(progress)
        with ExitStack() as opened:
            partial = opened.enter_context(whole_folder(self._checkpoint(progress.step)))
            written = trainer.begin_save(partial / "trainer")
            closing = opened.pop_all()

        def finish() -> None:
            with closing:
                written.result()
                write_json(partial / "progress.json", record)
            self._keep(kept)

        if written.done():  # of one process: nothing is left to wait for
            finish()
            return written
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            return executor.submit(finish)
        finally:
            executor.shutdown(wait=False)

    def load(self, trainer: Trainer) -> Progress:
        """Takes the trainer to the last checkpoint and says where that is; a new folder is at the beginning.

        Raises:
            EvergradError: the checkpoint is damaged; the hint says how to go on from an earlier one.
        """
        steps = self.steps()
        if not steps:
            return Progress()
        last = self._checkpoint(steps[-1])
        try:
            progress = Progress(**json.loads((last / "progress.json").read_text(encoding="utf-8")))
            trainer.load(last / "trainer")
        except (OSError, ValueError, TypeError, EvergradError) as error:
            before = f"step {steps[-2]}" if len(steps) > 1 else "the start"
            raise EvergradError(
                f"the checkpoint cannot be read: {error}", where=str(last), hint=f"remove it to go on from {before}"
            ) from error
        return progress

    def _keep(self, steps: set[int]) -> None:
        """Removes every checkpoint but those of ``steps``; one that goes is gone at once, not bit by bit."""
        for step in set(self.steps()) - steps:
            aside = self._checkpoints / f".removed-{secrets.token_hex(4)}"
            self._checkpoint(step).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _checkpoint(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:06d}"

    def _check_config(self, resolved: Mapping[str, Any]) -> None:
        before = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        free = dict.fromkeys(FREE)
        changed = sorted(differences({**before, **free}, {**resolved, **free}))
        if changed:
            raise InputError(
                f"this folder holds a run of another configuration: {', '.join(changed)} changed",
                where=str(self.path),
                hint="undo the change to go on, or choose another --run-dir to start anew",
            )

    def _check_data(self, data: Mapping[str, Mapping[str, Any]]) -> None:
        before = json.loads((self.path / "data.json").read_text(encoding="utf-8"))
        for role, now in data.items():
            then = before.get(role, {})
            if role == "model" and then != now:
                raise InputError(
                    f"the base model is not the one that this run began with, of {then.get('folder')}",
                    where=str(now["folder"]),
                    hint="put its weights back to go on, or choose another --run-dir to start anew",
                )
            if then.get("sha256") != now.get("sha256"):
                raise InputError(
                    f"the {role} data has changed since this run began: {then.get('rows')} rows with sha256 "
                    f"{str(then.get('sha256'))[:12]}… then, {now['rows']} rows with {now['sha256'][:12]}… now",
                    where=str(now["file"]),
                    hint="put the old file back to go on, or choose another --run-dir to start anew",
                )
