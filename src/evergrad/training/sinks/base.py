"""What a sink is told and what it is asked."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from evergrad.config import Config
from evergrad.types import InputError


class SinkError(InputError):
    """A sink that cannot be used as it is set, most often because its package is not installed."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Whose figures they are.

    >>> RunInfo("support", Path("runs/support"), {"seed": 0}).step
    0
    """

    name: str
    folder: Path
    """The run folder, where a sink may keep its files."""
    config: Mapping[str, Any]
    """The resolved configuration, plain values."""
    step: int = 0
    """Steps already on record. A run that goes on is opened with the last of them: later ones are done again."""


class Writer(Protocol):
    """An open sink."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Takes the finite figures of one step, counted from 1; each step once, ascending."""

    def close(self, done: bool) -> None:
        """Ends the record; ``done`` is False when the run stopped early."""


class Sink(Config):
    """A frozen configuration that can be opened; its fields are the sink's options."""

    package: ClassVar[str | None] = None
    """What ``pip install`` takes; None when nothing is needed."""
    module: ClassVar[str] = ""
    """What is imported."""

    @abstractmethod
    def open(self, run: RunInfo) -> Writer:
        """Begins a record, or goes on with the one of the same run folder.

        Raises:
            SinkError: its package is not installed, or refuses; says what to do.
        """

    def check(self) -> None:
        """
        Raises:
            SinkError: its package is not installed; said before a run begins.
        """
        if self.module:
            self.imported()

    @classmethod
    def imported(cls) -> Any:
        """The sink's package.

        Raises:
            SinkError: it is not installed.
        """
        try:
            return importlib.import_module(cls.module)
        except ModuleNotFoundError as error:
            raise SinkError(
                f"the sink '{cls.__name__.lower()}' needs the package {cls.package}, which is not installed",
                hint=f"pip install {cls.package}, or remove the sink from the configuration",
            ) from error
