"""``evergrad data``: what is in a data file, and what of it would be trained."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text as Styled

from evergrad.service._edge import printable
from evergrad.service._screen import console, table
from evergrad.training.data import Conversation, EncodedRow, Encoder, Examination, Pair, Row, Text, Tokens, examine

_BINS = 10
_BAR = 40
_PREVIEW = 2_000


def check_data(path: Path, model: str | None, form: str, limit: int | None, overlong: str) -> int:
    """Prints all that is wrong with a file, or what a trainer would see of it; returns the exit code.

    Raises:
        InputError: no such file, format or model.
    """
    screen = console()
    encoder = None
    if model is not None:
        from evergrad.loop.offline import encoder_for

        encoder, most = encoder_for(model)
        limit = min(each for each in (limit, most) if each is not None) if (limit or most) else None
    found = examine(path, form, encoder, limit, overlong)  # type: ignore[arg-type]  # the command line checked it
    if found.problems:
        for problem in found.problems:
            screen.print(Styled(printable(problem.told(str(path)))), soft_wrap=True)
        more = found.total_problems - len(found.problems)
        rest = f", of which the first {len(found.problems)} are shown" if more else ""
        screen.print(f"{_many(found.total_problems, 'problem')} in {_many(found.rows, 'row')}{rest}", style="bold red")
        return 1
    _summary(screen, found, limit)
    _histogram(screen, found)
    _preview(screen, found, encoder)
    if encoder is None and found.unit == "characters":
        screen.print("Lengths are in characters of the file. Next: --model NAME counts tokens and applies its chat template")
    return 0


def _summary(screen: Any, found: Examination, limit: int | None) -> None:
    trained, total = sum(found.trained), found.total
    rows: list[Sequence[Any]] = [
        ("format", found.format),
        ("rows", f"{_count(found.rows)}, all sound"),
        (found.unit, f"{_count(total)}, of which {_count(trained)} ({_percent(trained / max(total, 1))}) are trained"),
        ("limit", "none" if limit is None else f"{_count(limit)} tokens a row"),
        ("sha256", found.sha256),
    ]
    if found.dropped:
        rows.insert(2, ("dropped", f"{_count(len(found.dropped))} over-long: lines {_first(found.dropped)}"))
    if found.truncated:
        rows.insert(2, ("truncated", f"{_count(len(found.truncated))} over-long: lines {_first(found.truncated)}"))
    screen.print(table(("", ""), rows, title=found.path))


def _histogram(screen: Any, found: Examination) -> None:
    """Rows by length, in bins of one round width."""
    if not found.lengths:
        return
    shortest, longest = min(found.lengths), max(found.lengths)
    width = _round_up(max(1, math.ceil((longest - shortest) / _BINS)))
    first = shortest // width
    bins = [0] * (longest // width - first + 1)
    for length in found.lengths:
        bins[length // width - first] += 1
    most = max(bins)
    rows = [
        (f"{n * width:,}–{(n + 1) * width - 1:,}" if width > 1 else f"{n:,}", _count(rows), "█" * math.ceil(_BAR * rows / most))
        for n, rows in enumerate(bins, start=first)
    ]
    screen.print()
    screen.print(table((f"length in {found.unit}", "rows", ""), rows, right=(f"length in {found.unit}", "rows")))


def _round_up(number: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, …

    >>> [_round_up(n) for n in (1, 3, 7, 41)]
    [1, 5, 10, 50]
    """
    scale = int(10 ** (len(str(number)) - 1))
    return min(step * scale for step in (1, 2, 5, 10) if step * scale >= number)


def _preview(screen: Any, found: Examination, encoder: Encoder | None) -> None:
    """One row as it is trained: trained text stands out on a terminal, and between ⟦ and ⟧ everywhere."""
    screen.print()
    if encoder is None or not found.encoded:
        if found.first is not None:
            _title(screen, found.first.line)
            screen.print(_untokenized(found.first), soft_wrap=True)
        return
    sequences = found.encoded[0]
    _title(screen, sequences[0].line)
    for name, each in zip(("preferred", "the other"), sequences, strict=False):
        if len(sequences) > 1:
            screen.print(f"{name}:", style="bold")
        screen.print(_marked(each, encoder), soft_wrap=True)


def _title(screen: Any, line: int) -> None:
    screen.print(f"line {line}, what is trained between ⟦ and ⟧:", style="bold")


def _marked(row: EncodedRow, encoder: Encoder) -> Styled:
    text, at = Styled(), 0
    for start, end, _ in row.spans:
        _append(text, encoder.decode(row.token_ids[at:start]), trained=False)
        _append(text, encoder.decode(row.token_ids[start:end]), trained=True)
        at = end
    _append(text, encoder.decode(row.token_ids[at:]), trained=False)
    return text


def _untokenized(row: Row) -> Styled:
    text = Styled()
    content = row.content.chosen if isinstance(row.content, Pair) else row.content
    if isinstance(content, Tokens):
        at = 0
        for start, end, _ in content.spans:
            _append(text, "".join(f"{token} " for token in content.token_ids[at:start]), trained=False)
            _append(text, " ".join(map(str, content.token_ids[start:end])), trained=True)
            at = end
        _append(text, "".join(f" {token}" for token in content.token_ids[at:]), trained=False)
        return text
    if isinstance(content, Text):
        _append(text, content.prompt, trained=False)
        _append(text, content.completion, trained=True)
        return text
    assert isinstance(content, Conversation)
    for message, weight in zip(content.messages, content.weights, strict=True):
        _append(text, f"{message['role']}: ", trained=False)
        calls = json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else ""
        _append(text, f"{message['content']}{calls}", trained=bool(weight))
        _append(text, "\n", trained=False)
    return text


def _append(text: Styled, part: str, *, trained: bool) -> None:
    if not part:
        return
    part = printable(part if len(part) <= _PREVIEW else f"{part[:_PREVIEW]}…")
    text.append(f"⟦{part}⟧" if trained else part, style="bold green" if trained else "dim")


def _count(number: int) -> str:
    return f"{number:,}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _many(number: int, noun: str) -> str:
    return f"{_count(number)} {noun}{'' if number == 1 else 's'}"


def _first(lines: Sequence[int]) -> str:
    shown = ", ".join(str(line) for line in lines[:10])
    return shown if len(lines) <= 10 else f"{shown}, …"
