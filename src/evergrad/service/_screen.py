"""What the tables of the command line share: one console, and cells that nothing in them can steer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evergrad.service._edge import printable


def console(*, stderr: bool = False) -> Console:
    """Standard output, or error. Wide enough for whole ids when it is not a terminal, so that ``grep`` finds them."""
    screen = Console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not screen.file.isatty():  # not ``is_terminal``, which FORCE_COLOR makes true of a file, too
        screen.width = max(screen.width, 200)
    return screen


def cell(value: Any, style: str = "") -> Text:
    """``value`` as text that neither markup nor control characters in it can change; ``None`` is a dash."""
    return Text("–" if value is None else printable(str(value)), style=style)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = (), title: str | None = None
) -> Table:
    """A plain table; the columns named in ``right`` hold numbers."""
    made = Table(
        box=None, pad_edge=False, header_style="bold", title=cell(title, "bold") if title else None, title_justify="left"
    )
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    return made


def print_json(data: Any) -> None:
    """``data`` as strict JSON on standard output."""
    from evergrad.loop.report import to_plain

    print(json.dumps(to_plain(data), indent=2, allow_nan=False))
