"""Rows that another tool has made into token ids already, under the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

IGNORED = -100
"""The label of a token that carries no loss."""


class Noting(Protocol):
    """Where what is wrong with a line is noted."""

    def note(self, field: str, what: str, value: Any, fix: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids that are taken as they are.

    >>> Tokens((7, 8, 9), (False, True, True)).spans
    [(1, 3, 1.0)]
    """

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """Which of them carry a loss; same length."""

    @property
    def spans(self) -> list[tuple[int, int, float]]:
        """Start, end and weight of each stretch that carries a loss."""
        found, at = [], 0
        for trained, stretch in groupby(self.trained):
            end = at + len(list(stretch))
            if trained:
                found.append((at, end, 1.0))
            at = end
        return found


def read_tokens(finder: Noting, data: Mapping[str, Any]) -> Tokens | None:
    """A row of ``input_ids``; without ``labels`` all of them are trained. What ``attention_mask`` calls padding is left out."""
    ids = _numbers(finder, "input_ids", data["input_ids"])
    if ids is None:
        return None
    columns = {"labels": ids, "attention_mask": [1] * len(ids), "position_ids": list(range(len(ids)))}
    for field, default in columns.items():
        given = default if data.get(field) is None else _numbers(finder, field, data[field], least=IGNORED)
        if given is None:
            return None
        if len(given) != len(ids):
            finder.note(field, f"has {len(given)} entries for {len(ids)} tokens", given, "write one for each of input_ids")
            return None
        columns[field] = given
    return _read_columns(finder, ids, columns["labels"], columns["attention_mask"], columns["position_ids"])


def _read_columns(
    finder: Noting, ids: Sequence[int], labels: Sequence[int], mask: Sequence[int], positions: Sequence[int]
) -> Tokens | None:
    shown = [place for place, seen in enumerate(mask) if seen == 1]
    odd = next((place for place, seen in enumerate(mask) if seen not in (0, 1)), None)
    if odd is not None:
        finder.note(f"attention_mask[{odd}]", "must be 0 or 1", mask[odd], "0 is padding, 1 a token of the row")
        return None
    if not shown or shown != list(range(shown[0], shown[-1] + 1)):
        what = "leaves a hole in the row" if shown else "leaves nothing of the row"
        finder.note("attention_mask", what, list(mask), "0 is for padding before the first token or after the last one")
        return None
    first, end = shown[0], shown[-1] + 1
    if [place - positions[first] for place in positions[first:end]] != list(range(end - first)):
        finder.note("position_ids", "do not count up", list(positions), "write one sequence a row: rows are packed here")
        return None
    for place in range(first, end):
        if labels[place] not in (IGNORED, ids[place]):
            fix = f"write the token itself, or {IGNORED} where it carries no loss; labels are not shifted"
            finder.note(f"labels[{place}]", f"is not the token there, {ids[place]}", labels[place], fix)
            return None
    if all(label == IGNORED for label in labels[first + 1 : end]):
        finder.note("labels", "no token of it would be trained", list(labels), "give it a token to learn, or drop the row")
        return None
    return Tokens(tuple(ids[first:end]), tuple(label != IGNORED for label in labels[first:end]))


def _numbers(finder: Noting, field: str, value: Any, least: int = 0) -> list[int] | None:
    if not isinstance(value, list) or not value:
        finder.note(field, "must be a list of whole numbers, not empty", value, "write [1, 2, 3, …]")
        return None
    for place, each in enumerate(value):
        if isinstance(each, bool) or not isinstance(each, int) or each < least:
            finder.note(f"{field}[{place}]", f"must be a whole number of {least} or more", each, "write token ids")
            return None
    return value
