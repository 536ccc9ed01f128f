"""Which rows each step trains: a function of the seed and the step alone, so that the step is all a resumed run must know."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from random import Random

from evergrad.rollouts import derive_seed
from evergrad.training.data import EncodedRow

Sequences = tuple[EncodedRow, ...]


class Plan:
    """The order of ``rows`` rows over a run; every epoch has each row once, in an order of its own.

    >>> plan = Plan(rows=5, batch_size=2, seed=0, epochs=2)
    >>> plan.steps, sorted(plan.batch(0) + plan.batch(1) + plan.batch(2))
    (6, [0, 1, 2, 3, 4])
    """

    def __init__(self, *, rows: int, batch_size: int, seed: int, epochs: int = 1, steps: int | None = None) -> None:
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self.steps_per_epoch = math.ceil(rows / batch_size)
        self.steps = steps if steps is not None else epochs * self.steps_per_epoch
        self._shuffled: tuple[int, list[int]] = (-1, [])

    def epoch(self, step: int) -> int:
        """Epoch of a step, both counted from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Numbers of the rows that a step trains; the last step of an epoch may have fewer."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._shuffled[0] != epoch:
            order = list(range(self._rows))
            Random(derive_seed(self._seed, "rows", epoch)).shuffle(order)
            self._shuffled = (epoch, order)
        return self._shuffled[1][place * self._batch_size : (place + 1) * self._batch_size]


def hold_out(rows: Sequence[Sequences], share: float, seed: int) -> tuple[list[Sequences], list[Sequences]]:
    """The rows to train and those to measure: at least ``share`` of them, and never one whose equal is trained.

    Which these are depends on the seed and what the rows hold, not on their order.
    """
    if not share:
        return list(rows), []
    marks = [hashlib.sha256(f"{seed}/{content(row)}".encode()).digest() for row in rows]
    wanted, chosen, count = math.ceil(share * len(rows)), set[bytes](), 0
    for mark, many in sorted(Counter(marks).items()):
        if count >= wanted:
            break
        chosen.add(mark)
        count += many
    kept = [row for row, mark in zip(rows, marks, strict=True) if mark not in chosen]
    held = [row for row, mark in zip(rows, marks, strict=True) if mark in chosen]
    return kept, held


def content(row: Sequences) -> str:
    """What a row holds, apart from the line that it stands in."""
    return "/".join(f"{list(each.token_ids)}{each.spans}{each.preference}" for each in row)
