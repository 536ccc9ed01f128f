"""What a person sees while the loop runs: a line per event, and a bar with rate, time left and dollars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from evergrad.loop._figures import usd as dollars

LOG_WIDTH = 120


def open_console() -> Console:
    """Standard output; wide enough for the tables where it is a file, which has no width of its own."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


def progress_bar(console: Console) -> Progress:
    """Units done, time gone and left, and the task's ``note``; nothing where ``console`` is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class LoopConsole:
    """Prints events; on a terminal the current stage has a progress bar beneath them."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or open_console()
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def note(self, text: str, style: str = "", *, whole: bool = False) -> None:
        """One line, on top of the bar if there is one; ``whole`` keeps a command in it from being broken."""
        self._console.print(escape(text), style=style or None, soft_wrap=whole)

    def event(self, at_s: float, usd: float | None, text: str) -> None:
        """A milestone with its time and the dollars spent so far."""
        money = f"${usd:.4f}" if usd is not None else "$ unknown"
        self.note(f"[{int(at_s) // 60:2d}:{int(at_s) % 60:02d}  {money}] {text}", style="bold")

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[None]:
        """A bar for ``total`` units of work; :meth:`advance` moves it."""
        with progress_bar(self._console) as progress:
            self._progress, self._bar = progress, progress.add_task(escape(title), total=total, completed=done, note="")
            try:
                yield
            finally:
                self._progress = self._bar = None

    def advance(self, note: str = "", units: int = 1) -> None:
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, advance=units, note=escape(note))

    def summary(self, report: Mapping[str, Any], run: Path) -> None:
        """The run in two tables, what it gained and what it cost, the figures that a reader takes away, and what to do next."""
        cycles = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, title=f"{report.get('name')}: what each cycle gained", title_justify="left"
        )
        for head in ("#", "suite", "before → after", "gain, 95%", "n", "verdict", "cost"):
            cycles.add_column(head, justify="left" if head in ("suite", "verdict") else "right", no_wrap=True)
        for cycle in report.get("cycles", []):
            low, high = cycle["ci95"] or (None, None)
            cycles.add_row(
                str(cycle["cycle"]),
                cycle["suite"],
                f"{_figure(cycle['score_before'], '.3f')} → {_figure(cycle['score_after'], '.3f')}",
                f"{_figure(low, '+.2f')} … {_figure(high, '+.2f')}",
                str(cycle["n"]),
                cycle["verdict"],
                dollars(cycle["usd"]),
            )
            for suite, other in cycle["other_suites"].items():
                cycles.add_row("", suite, f"{_figure(other['before'], '.3f')} → {_figure(other['after'], '.3f')}")
        cost = report["cost"]
        money = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="what it cost", title_justify="left")
        money.add_column("phase")
        money.add_column("cost", justify="right")
        for phase, usd in sorted(cost["by_phase"].items(), key=lambda item: -(item[1] or 0.0)):
            money.add_row(phase, dollars(usd))
        money.add_row("total", dollars(cost["total_usd"]), style="bold")
        if cycles.row_count:
            self._console.print(cycles)
        else:
            self.note(f"{report.get('name')}: no cycle came to a ruling")
        self._console.print(money)
        worth = report["intelligence_per_dollar"]
        low, high = worth["ci95"] or (None, None)
        self.note(
            f"served version: {dollars(report['usd_per_million_tokens'])} per million tokens, "
            f"{dollars(report['usd_per_success'])} per success, "
            f"{_figure(worth['value'], ',.0f')} successes per dollar "
            f"(95%: {_figure(low, ',.0f')} to {_figure(high, ',.0f')}), {report['wall_s'] / 60:.1f} minutes in all"
        )
        if any("production" in version["aliases"] for version in report["versions"]):
            self.note(f"serve it: evergrad serve --run {run}", whole=True)


def _figure(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
