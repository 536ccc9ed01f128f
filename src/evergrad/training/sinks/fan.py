"""All sinks of a run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from evergrad.training.sinks.base import RunInfo, Sink, Writer


class SinkFan:
    """Hands each step's figures to every sink. One that fails is named once and left out: figures shown elsewhere are not worth
    a run.

    Args:
        tell: Takes one line for the person who watches.

    Raises:
        SinkError: a sink does not open; those before it are closed again.
    """

    def __init__(self, sinks: Iterable[Sink], run: RunInfo, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._open: dict[str, Writer] = {}
        try:
            for sink in sinks:
                self._open[self._free_name(type(sink).__name__.lower())] = sink.open(run)
        except BaseException:
            self.close(done=False)
            raise

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """The numbers among ``figures``; those that are not finite are left out, since few places can show them."""
        finite = {
            name: float(value)
            for name, value in figures.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        }
        for name, writer in list(self._open.items()):
            try:
                writer.log(step, finite)
            except Exception as error:
                del self._open[name]
                self._tell(f"the sink '{name}' failed and is left out from step {step} on: {error}")
                with suppress(Exception):
                    writer.close(done=False)

    def close(self, done: bool) -> None:
        """Ends all records. Call it once."""
        for name, writer in self._open.items():
            try:
                writer.close(done)
            except Exception as error:
                self._tell(f"the sink '{name}' did not close: {error}")
        self._open = {}

    def _free_name(self, name: str) -> str:
        return name if name not in self._open else f"{name}-{sum(each.startswith(name) for each in self._open) + 1}"
