"""Weights & Biases, offline unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from evergrad.training.sinks.base import RunInfo, Sink, SinkError, Writer
from evergrad.training.sinks.identity import run_identity


class Wandb(Sink):
    """A W&B run. ``offline`` keeps it in the run folder, for ``wandb sync`` later; ``online`` needs a login."""

    package: ClassVar[str | None] = "wandb"
    module: ClassVar[str] = "wandb"
    project: str = "evergrad"
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"

    def open(self, run: RunInfo) -> Writer:
        wandb = self.imported()
        try:
            opened = wandb.init(
                project=self.project,
                entity=self.entity,
                mode=self.mode,
                name=run.name,
                id=run_identity(run.folder, "wandb"),
                resume="allow",
                dir=str(run.folder),
                config=dict(run.config),
            )
        except Exception as error:  # its errors are many, and none of them is ours
            raise SinkError(f"W&B does not start: {error}"[:300], hint="wandb login, or set mode = 'offline'") from error
        return _Run(opened)


class _Run:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)
