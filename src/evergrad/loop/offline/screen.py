"""What a person sees while a data file is trained: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from evergrad.loop._console import open_console, progress_bar
from evergrad.loop._figures import clock, usd

_LINES = 20
"""Lines of progress that a run leaves in a log, besides those of its checkpoints."""


class TrainScreen:
    """Prints notes; between them, the step's figures."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or open_console()
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
        with progress_bar(self._console) as progress:
            self._progress, self._bar = progress, progress.add_task("train", total=steps, completed=done, note="")
            try:
                yield
            finally:
                self._progress = self._bar = None

    def step(self, step: int, figures: Mapping[str, Any], left_s: float) -> None:
        """The figures of a step, counted from 1."""
        heldout = f"  held-out {figures['heldout_loss']:.4f}" if "heldout_loss" in figures else ""
        accuracy = f"  {figures['pair_accuracy']:.0%} of pairs right" if "pair_accuracy" in figures else ""
        text = (
            f"loss {figures['loss']:.4f}{heldout}{accuracy}  lr {figures['lr']:.2g}  {figures['tokens_per_s']:,.0f} tok/s  "
            f"{figures['memory_gib']:.2f} GiB"
        )
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=step, note=escape(text))
        every = max(1, self._steps // _LINES)
        if heldout or (not self._console.is_terminal and (step == 1 or step % every == 0 or step == self._steps)):
            self.note(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}  {clock(left_s)} left")

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
        table.add_row("time and cost", f"{clock(report['wall_s'])}, {usd(cost)}")
        table.add_row("model" if report["trained"] == "full" else "adapter", f"{folder}/{report['final']}")
        self._console.print(table)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
