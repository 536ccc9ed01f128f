"""What is wrong with a line of a data file, for the person who has to mend it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evergrad.types import InputError

SHOWN = 20
"""Problems that are named one by one; the rest is a count."""
_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    >>> Problem(3, "messages[1].role", "no role of a message", "'asistant'", "did you mean 'assistant'?").told("my.jsonl")
    "my.jsonl:3: messages[1].role: no role of a message, got 'asistant'. Next: did you mean 'assistant'?"
    """

    line: int
    """Counted from 1, blank lines included, as an editor counts; 0 for the file as a whole."""
    field: str
    """Path inside the line's object, such as ``messages[1].role``; empty for the line as a whole."""
    what: str
    value: str
    """The offending value as :func:`shown` writes it; empty where there is none to show."""
    fix: str

    def place(self, path: str) -> str:
        """File and line, as editors and ``grep -n`` write them."""
        return f"{path}:{self.line}" if self.line else path

    @property
    def complaint(self) -> str:
        """The field, what is wrong with it, and its value."""
        got = f", got {self.value}" if self.value else ""
        return f"{self.field}: {self.what}{got}" if self.field else f"{self.what}{got}"

    def told(self, path: str) -> str:
        """All of it in one line."""
        return f"{self.place(path)}: {self.complaint}. Next: {self.fix}"


class DataError(InputError):
    """A data file that cannot be trained on as it stands; ``problems`` holds the first of them."""

    def __init__(self, path: str, problems: Sequence[Problem], total: int) -> None:
        self.problems, self.total = tuple(problems), total
        first = problems[0]
        others = f"; {total - 1} more: evergrad data check {path}" if total > 1 else ""
        super().__init__(first.complaint, where=first.place(path), hint=first.fix + others)


def shown(value: Any) -> str:
    """``value`` as it stands in the file, short enough for one line.

    >>> shown({"role": "user"}), shown("a" * 80)[-5:]
    ('{"role": "user"}', 'aaaa…')
    """
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else repr(value)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
