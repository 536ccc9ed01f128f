"""Reads whole files: every line looked at before the first one is trained, every problem named where it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evergrad.config import nearest
from evergrad.training.data.config import DataConfig
from evergrad.training.data.encode import EncodedRow, Encoder
from evergrad.training.data.problems import SHOWN, DataError, Problem, shown
from evergrad.training.data.rows import FORMATS, PREFERENCES, Conversation, Pair, Row, Text, detect, parse
from evergrad.training.data.template import RowRefused
from evergrad.training.data.tokens import Tokens
from evergrad.types import InputError

Overlong = Literal["refuse", "truncate_left", "truncate_right", "drop"]
Sequences = tuple[EncodedRow, ...]


@dataclass
class Examination:
    """What a look at a whole file found."""

    path: str
    format: str | None = None
    """The one that was named, or that the first line has."""
    sha256: str = ""
    """Of the file's bytes."""
    rows: int = 0
    """Lines that hold a row, sound or not."""
    unit: Literal["tokens", "characters"] = "characters"
    """Of ``lengths`` and ``trained``: characters as long as no model was given, but for rows of tokens."""
    lengths: list[int] = field(default_factory=list)
    """Of each sound row as it is trained; of a pair's longer answer, prompt included."""
    trained: list[int] = field(default_factory=list)
    """How much of each sound row carries a loss; of a pair's both answers."""
    total: int = 0
    """Sum over all sequences; a pair has two."""
    encoded: list[Sequences] = field(default_factory=list)
    """The sound rows, once a model was given."""
    first: Row | None = None
    dropped: list[int] = field(default_factory=list)
    """Lines of rows that were longer than the limit and left out."""
    truncated: list[int] = field(default_factory=list)
    """Lines of rows that were longer than the limit and cut."""
    problems: list[Problem] = field(default_factory=list)
    """The first ``SHOWN`` of them."""
    total_problems: int = 0

    def add(self, *problems: Problem) -> None:
        self.problems += problems[: max(0, SHOWN - len(self.problems))]
        self.total_problems += len(problems)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A file that can be trained on."""

    path: str
    format: str
    sha256: str
    rows: tuple[Sequences, ...]
    """One entry a row: its sequence, or the two of a pair, the preferred one first."""
    dropped: tuple[int, ...] = ()
    truncated: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for row in self.rows for each in row)

    @property
    def trained_tokens(self) -> int:
        return sum(each.trained_tokens for row in self.rows for each in row)


def load_dataset(path: str, settings: DataConfig, encoder: Encoder, limit: int | None, *, pairs: bool) -> Dataset:
    """All rows of ``path``, encoded.

    Args:
        limit: Longest sequence in tokens that the model takes; ``settings.max_tokens`` lowers it.
        pairs: Whether the method learns from pairs of answers.

    Raises:
        DataError: the file is missing, empty, has a line that cannot be trained on, or no row is left; names the first problem
            and counts the others.
    """
    limit = min((each for each in (settings.max_tokens, limit) if each is not None), default=None)
    found = examine(Path(path), settings.format, encoder, limit, settings.overlong, pairs=pairs)
    if not found.problems and not found.encoded:
        fix = "raise data.max_tokens, or set data.overlong to truncate_left or truncate_right"
        found.add(Problem(0, "", f"all {found.rows} rows are longer than the limit and were dropped", "", fix))
    if found.problems:
        raise DataError(path, found.problems, found.total_problems)
    rows, dropped, truncated = tuple(found.encoded), tuple(found.dropped), tuple(found.truncated)
    return Dataset(path, str(found.format), found.sha256, rows, dropped, truncated)


def examine(
    path: Path,
    form: str = "auto",
    encoder: Encoder | None = None,
    limit: int | None = None,
    overlong: Overlong = "refuse",
    *,
    pairs: bool | None = None,
) -> Examination:
    """Looks at every line of a file, and stops at none.

    Args:
        form: A line of ``FORMATS``, or ``auto``.
        encoder: Of the model to train; without one, rows are checked as text alone.
        pairs: Whether the file must hold pairs (True) or must not (False); None takes either.

    Raises:
        InputError: no such file, or no such format.
    """
    if form != "auto" and form not in FORMATS:
        raise InputError(f"unknown format '{form}'", hint=nearest(form, ("auto", *FORMATS)))
    if not path.is_file():
        folder = path.is_dir()
        told, hint = ("this is a folder", "name one file in it") if folder else ("data file not found", "check the path")
        raise InputError(told, where=str(path.absolute()), hint=hint)
    found = Examination(str(path), None if form == "auto" else form, unit="tokens" if encoder else "characters")
    for line, data in _read_lines(path, found):
        found.rows += 1
        if isinstance(data, Problem):
            found.add(data)
            continue
        row = _row(found, line, data, pairs)
        if row is not None:
            found.first = found.first or row
            _measure(found, row, encoder, limit, overlong)
    if not found.rows:
        found.add(Problem(0, "", "the file is empty", "", "write one JSON object a line"))
    return found


def _row(found: Examination, line: int, data: Mapping[str, Any], pairs: bool | None) -> Row | None:
    """The line's row under the file's format, which the first line decides."""
    if found.format is None:
        found.format = detect(data)
        if found.format is None:
            found.add(_no_format(line, data))
            return None
    if pairs is not None and (found.format in PREFERENCES) != pairs:
        found.add(_wrong_method(line, found.format, pairs))
        return None
    other = detect(data)
    if other not in (None, found.format):
        what = f"a row of format '{other}' in a file of format '{found.format}'"
        found.add(Problem(line, "", what, shown(list(data)), "put rows of one format into one file"))
        return None
    row, problems = parse(line, data, found.format)
    found.add(*problems)
    return row


def _no_format(line: int, data: Mapping[str, Any]) -> Problem:
    ways = "; ".join(f"{name}: {', '.join(form.required)}" for name, form in FORMATS.items())
    known = {key for form in FORMATS.values() for key in form.required}
    close = [nearest(key, known) for key in data if key not in known and "did you mean" in nearest(key, known)]
    fix = close[0] if close else f"use the keys of one format ({ways})"
    return Problem(line, "", "its keys fit no format, or several", shown(list(data)), fix)


def _wrong_method(line: int, form: str, pairs: bool) -> Problem:
    if pairs:
        return Problem(
            line, "", f"the method learns from pairs of answers, and the file is of format '{form}'", "", "set method = 'sft'"
        )
    return Problem(
        line, "", f"the method learns from one answer a row, and the file holds pairs ('{form}')", "", "set method = 'dpo'"
    )


def _measure(found: Examination, row: Row, encoder: Encoder | None, limit: int | None, overlong: Overlong) -> None:
    if encoder is None:
        found.unit = "tokens" if isinstance(row.content, Tokens) else "characters"
        sizes = _sizes(row.content)
        found.lengths.append(max(size for size, _ in sizes))
        found.trained.append(sum(trained for _, trained in sizes))
        found.total += sum(size for size, _ in sizes)
        return
    try:
        sequences = encoder.encode(row)
    except RowRefused as refusal:
        found.add(Problem(row.line, refusal.field, refusal.what, refusal.value, refusal.fix))
        return
    longest = max(len(each.token_ids) for each in sequences)
    if limit is not None and longest > limit:
        if overlong == "refuse":
            fix = (
                "shorten it, raise max_tokens as far as the model goes, or set overlong = truncate_left, truncate_right or drop"
            )
            found.add(Problem(row.line, "", f"{longest} tokens, and the limit is {limit}", "", fix))
            return
        cut = () if overlong == "drop" else _cut(sequences, limit, overlong)
        if not cut:
            found.dropped.append(row.line)
            return
        sequences = cut
        found.truncated.append(row.line)
    found.encoded.append(sequences)
    found.lengths.append(max(len(each.token_ids) for each in sequences))
    found.trained.append(sum(each.trained_tokens for each in sequences))
    found.total += sum(len(each.token_ids) for each in sequences)


def _cut(sequences: Sequences, limit: int, overlong: Overlong) -> Sequences:
    """The sequences cut to ``limit`` tokens; none when nothing to train is left of one of them.

    From the left a pair loses the same tokens on both sides, so that its answers still follow one prompt.
    """
    excess = max(len(each.token_ids) for each in sequences) - limit
    cut = []
    for each in sequences:
        start = excess if overlong == "truncate_left" else 0
        end = min(len(each.token_ids), start + limit)
        moved = [(max(a, start + 1) - start, min(b, end) - start, weight) for a, b, weight in each.spans]
        spans = tuple((a, b, weight) for a, b, weight in moved if b > a)
        if not spans:
            return ()
        cut.append(EncodedRow(each.line, each.token_ids[start:end], spans, each.preference))
    return tuple(cut)


def _sizes(content: Conversation | Text | Tokens | Pair) -> list[tuple[int, int]]:
    """Length and trained part of each sequence in characters of the file's own text, or in the tokens that it has."""
    if isinstance(content, Pair):
        return [*_sizes(content.chosen), *_sizes(content.rejected)]
    if isinstance(content, Tokens):
        return [(len(content.token_ids), sum(content.trained))]
    if isinstance(content, Text):
        return [(len(content.prompt) + len(content.completion), len(content.completion))]
    sizes = [len(str(message.get("content", ""))) for message in content.messages]
    return [(sum(sizes), sum(size for size, weight in zip(sizes, content.weights, strict=True) if weight))]


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Twice(ValueError):
    """The same key twice in one object."""


def _read_lines(path: Path, found: Examination) -> Iterator[tuple[int, Mapping[str, Any] | Problem]]:
    """Number and object of each line that is not blank; the file's hash is known at the end."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            digest.update(raw)
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, _read_line(number, raw)
    found.sha256 = digest.hexdigest()


def _read_line(number: int, raw: bytes) -> Mapping[str, Any] | Problem:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Problem(
            number,
            "",
            f"not UTF-8 at byte {error.start + 1}",
            repr(raw[error.start : error.start + 4]),
            "save the file as UTF-8",
        )
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except _Twice as error:
        return Problem(number, "", str(error), "", "keep one of the two")
    except json.JSONDecodeError as error:
        fix = "write one JSON object a line"
        if text.strip() in ("[", "]", "{", "}"):
            fix += ", each on a single line; a JSON array or an indented object is no JSONL"
        return Problem(number, "", f"not JSON at column {error.colno}: {error.msg}", shown(text.strip()), fix)
    except (ValueError, RecursionError) as error:
        return Problem(number, "", f"not JSON: {error}", shown(text.strip()), "write one JSON object a line")
    if not isinstance(data, dict):
        return Problem(
            number, "", "must be a JSON object", shown(data), 'write {"messages": […]} or another format, one a line'
        )
    if "\\ud" in text.lower():
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Problem(
                number,
                "",
                "holds half of a surrogate pair, which is no character",
                "",
                "escape the whole character, or remove it",
            )
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"the key '{next(name for name in names if names.count(name) > 1)}' twice in one object")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
