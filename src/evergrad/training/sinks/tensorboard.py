"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from evergrad.training.sinks.base import RunInfo, Sink, Writer


class TensorBoard(Sink):
    """Event files for ``tensorboard --logdir``."""

    package: ClassVar[str | None] = "tensorboard"
    module: ClassVar[str] = "torch.utils.tensorboard"
    folder: str = "tensorboard"
    """Path, inside the run folder unless it is absolute."""

    def open(self, run: RunInfo) -> Writer:
        # ``purge_step`` hides what an earlier session wrote from that step on.
        purge = run.step + 1 if run.step else None
        return _Events(self.imported().SummaryWriter(str(run.folder / self.folder), purge_step=purge))


class _Events:
    def __init__(self, events: Any) -> None:
        self._events = events

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self, done: bool) -> None:
        self._events.close()
