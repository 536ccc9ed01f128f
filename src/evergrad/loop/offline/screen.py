"""What a person sees while a data file is trained: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from evergrad.loop._console import LOG_WIDTH

_LINES = 20
"""Lines of progress that a run leaves in a log, besides those of its checkpoints."""


class TrainScreen:
    """Prints notes; between them, the step's figures."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = LOG_WIDTH  # a file has no width of its own
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._steps = 0

    def note(self, text: str, style: str = "") -> None:
        """One line, on top of the bar if there is one."""
        self._console.print(escape(text), style=style or None, soft_wrap=True)

    @contextmanager
    def training(self, steps: int, done: int) -> Iterator[None]:
        """A bar over the steps of the run."""
        self._steps = steps
        with Progress(
            TextColumn("train"),
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
            self._progress, self._bar = progress, progress.add_task("", total=steps, completed=done, note="")
            try:
                yield
            finally:
                self._progress = self._bar = None

    def step(self, step: int, figures: Mapping[str, Any], left_s: float) -> None:
        """The figures of a step, counted from 1."""
        heldout = f"  held-out {figures['heldout_loss']:.4f}" if "heldout_loss" in figures else ""
        text = (
            f"loss {figures['loss']:.4f}{heldout}  lr {figures['lr']:.2g}  {figures['tokens_per_s']:,.0f} tok/s  "
            f"{figures['memory_gib']:.2f} GiB"
        )
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=step, note=escape(text))
        every = max(1, self._steps // _LINES)
        if heldout or (not self._console.is_terminal and (step == 1 or step % every == 0 or step == self._steps)):
            self.note(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}  {_clock(left_s)} left")

    def summary(self, report: Mapping[str, Any], folder: str) -> None:
        """What came out, in a few lines."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False, title=str(report["name"]), title_justify="left")
        table.add_column("")
        table.add_column("")
        loss, heldout, cost = report["loss"], report["heldout"], report["cost"]["total_usd"]
        table.add_row("loss", f"{_number(loss['first'])} → {_number(loss['last'])}")
        if heldout["history"]:
            first, last, best = heldout["history"][0], heldout["history"][-1], heldout["best"]
            words = f"{_number(first['loss'])} → {_number(last['loss'])}, lowest {_number(best['loss'])} at step {best['step']}"
            table.add_row(f"held-out loss, {heldout['rows']} rows", words)
        table.add_row("steps", f"{report['steps']:,}, {report['tokens']:,} tokens, {report['tokens_per_s'] or 0:,.0f} tok/s")
        table.add_row("time and cost", f"{_clock(report['wall_s'])}, {'unknown' if cost is None else f'${cost:.4f}'}")
        table.add_row("model" if report["trained"] == "full" else "adapter", f"{folder}/{report['final']}")
        self._console.print(table)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    """
    >>> _clock(7.4), _clock(7265)
    ('0:07', '2:01:05')
    """
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
