"""What a person sees while the loop runs: a line per event, and a bar with rate, time left and dollars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class LoopConsole:
    """Prints events; on a terminal the current stage has a progress bar beneath them."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def note(self, text: str, style: str = "") -> None:
        """One line, on top of the bar if there is one."""
        self._console.print(escape(text), style=style or None)

    def event(self, at_s: float, usd: float | None, text: str) -> None:
        """A milestone with its time and the dollars spent so far."""
        money = f"${usd:.4f}" if usd is not None else "$ unknown"
        self.note(f"[{int(at_s) // 60:2d}:{int(at_s) % 60:02d}  {money}] {text}", style="bold")

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[None]:
        """A bar for ``total`` units of work; :meth:`advance` moves it."""
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as progress:
            self._progress, self._bar = progress, progress.add_task(escape(title), total=total, completed=done, note="")
            try:
                yield
            finally:
                self._progress = self._bar = None

    def advance(self, note: str = "", units: int = 1) -> None:
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, advance=units, note=escape(note))
