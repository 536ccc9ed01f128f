"""Trackio: Hugging Face's local dashboard with W&B's interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from evergrad.training.sinks.base import RunInfo, Sink, SinkError, Writer
from evergrad.training.sinks.identity import run_identity


class Trackio(Sink):
    """A Trackio run, kept in Trackio's own folder (``TRACKIO_DIR``); ``trackio show`` opens it."""

    package: ClassVar[str | None] = "trackio"
    module: ClassVar[str] = "trackio"
    project: str = "evergrad"

    def open(self, run: RunInfo) -> Writer:
        trackio = self.imported()
        # Trackio knows runs by name alone, and a name may be used in more than one folder.
        name = f"{run.name}-{run_identity(run.folder, 'trackio')[:6]}"
        try:
            trackio.init(project=self.project, name=name, config=dict(run.config), resume="allow", embed=False)
        except Exception as error:  # its errors are many, and none of them is ours
            raise SinkError(f"Trackio does not start: {error}"[:300], hint="try 'trackio show', or remove the sink") from error
        return _Run(trackio)


class _Run:
    def __init__(self, trackio: Any) -> None:
        self._trackio = trackio

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self, done: bool) -> None:
        self._trackio.finish()
