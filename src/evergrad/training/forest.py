"""Merges the samples of a batch into prefix trees, so that each distinct token is computed once.

Two samples share a node exactly as long as their tokens agree from the start, so a node's ancestors are its whole context:
a hidden state computed under the ancestor mask is the one that every sample through the node would have computed alone.
Sorted samples give the trees in depth-first order, one after another. In that order every subtree is a range, and node a is
an ancestor of node b (or b itself) iff ``a <= b < end[a]``.

Names: N nodes, R distinct (node, temperature) whose next-token distribution is wanted, P distinct (row of R, next token) whose
log-probability is, T trained (sample, position), S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from evergrad.types import TrainingSample

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Together = Literal["rollout", "group"]

_ENOUGH = 512
"""Nodes from which on a forest is computed no faster for being larger, by a CPU."""
_LITTLE = 1 / 32
"""Share of ``max_nodes`` that a cut may compute again and be worth the memory it saves: a chat template's first words."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The positions of one sample that carry a loss."""

    sample: TrainingSample
    positions: IntArray
    """Ascending, none of them 0 (a first token has no context to be predicted from)."""
    num_valid: int
    """Positions of its whole rollout with a mask, those that are not trained because they have no gradient included."""
    rollout: int | None = None
    """Items with the same number are of one rollout; None for one of its own."""


@dataclass(frozen=True, slots=True)
class Forest:
    """One micro-batch: prefix trees, what to read off them, and for whom."""

    token_ids: IntArray
    """[N] in depth-first order."""
    depths: IntArray
    """[N] position of the node in every sample that passes through it."""
    ends: IntArray
    """[N] one past the last node of the node's subtree."""
    rows: IntArray
    """[R] node whose hidden state predicts."""
    temperatures: FloatArray
    """[R]"""
    row_of_pair: IntArray
    """[P] index into R; ascending."""
    targets: IntArray
    """[P] token that is predicted."""
    pair_of_token: IntArray
    """[T] index into P."""
    items: tuple[TrainedTokens, ...]
    """[S] in the order in which their tokens are in T."""
    sample_of_token: IntArray
    """[T] index into S; ascending."""
    rollout_of_sample: IntArray
    """[S] from 0, in order of appearance."""
    group_of_rollout: IntArray
    """[rollouts] from 0, in order of appearance; a rollout without a group is one of its own."""

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    @property
    def row_of_token(self) -> IntArray:
        """[T] index into R: what the token is predicted from."""
        return self.row_of_pair[self.pair_of_token]

    @property
    def rollout_of_token(self) -> IntArray:
        """[T] index of the rollout."""
        return self.rollout_of_sample[self.sample_of_token]

    @property
    def rollout_lengths(self) -> IntArray:
        """[rollouts] valid positions in the whole batch."""
        firsts = np.unique(self.rollout_of_sample, return_index=True)[1]
        return np.asarray([self.items[first].num_valid for first in firsts.tolist()], dtype=np.int64)

    def column(self, field: str) -> FloatArray:
        """[T] what the samples say of each trained token in one of their per-token fields."""
        parts = [np.asarray(getattr(item.sample, field), dtype=np.float64)[item.positions] for item in self.items]
        return np.concatenate(parts)


def plant(trained: Sequence[TrainedTokens], max_nodes: int, *, keep: Together | None = None) -> list[Forest]:
    """Cuts samples into forests of at most ``max_nodes`` nodes each, or one sample where that alone is longer.

    Where samples share next to nothing with those before them, as groups do that have a chat template in common, a forest ends
    at half of that already, if it has enough nodes to be computed fast: larger ones only take more memory. Elsewhere a cut
    computes what is shared again. The cut depends only on the samples, not on their order. Nothing after a sample's last
    trained token is computed, nor is that token itself: it is only predicted.

    Args:
        trained: Samples with at least one position each.
        max_nodes: Distinct tokens of one forest.
        keep: What is never cut: the samples of one ``group_id``, or of one rollout.
    """
    row = _Row.of(trained, keep, max_nodes)
    return [grow(row.items(part)) for part in row.cut(max_nodes)]


def deal(
    trained: Sequence[TrainedTokens], max_nodes: int, num_shares: int, *, keep: Together | None = None
) -> list[list[list[TrainedTokens]]]:
    """Deals samples into ``num_shares`` shares of micro-batches; :func:`grow` makes a forest of each.

    The micro-batches are the fewest that give every share equally many, and as even as cuts in tree order can be: no
    contiguous cut into as many parts has a smaller largest part. They are handed out by size, so that the ones computed at
    the same time, the first of every share, the second, …, are about equally large; a share may lack its last.

    Args:
        trained: As for :func:`plant`, as are ``max_nodes`` and ``keep``.
        num_shares: Ranks that compute at the same time.
    """
    row = _Row.of(trained, keep, max_nodes)
    wanted = -(-len(row.cut(max_nodes)) // num_shares) * num_shares
    low, high = 1, max_nodes
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(row.cut(middle)) <= wanted else (middle + 1, high)
    parts = sorted(row.cut(high), key=lambda part: (-row.num_nodes(part), part.start))
    shares: list[list[list[TrainedTokens]]] = [[] for _ in range(num_shares)]
    for number, part in enumerate(parts):
        turn, place = divmod(number, num_shares)
        # Back and forth, so that no share has the largest of every turn.
        shares[place if turn % 2 == 0 else num_shares - 1 - place].append(row.items(part))
    return shares


@dataclass(frozen=True, slots=True)
class _Row:
    """What must not be cut, in tree order, and how many nodes each block adds: at the start of a forest, or after another."""

    blocks: list[list[TrainedTokens]]
    alone: list[int]
    after: list[int]
    joined: int
    """Nodes of a forest that ends before a tree."""
    trees: dict[int, int]
    """Blocks that share little with the one before them: nodes from there to the next such block."""

    @classmethod
    def of(cls, trained: Sequence[TrainedTokens], keep: Together | None, max_nodes: int) -> _Row:
        blocks = _blocks(trained, keep)
        alone, after = [], []
        previous: IntArray | None = None
        for block in blocks:
            alone.append(_new_nodes(block, None)[0])
            new, previous = _new_nodes(block, previous)
            after.append(new)
        trees: dict[int, int] = {}
        root = 0
        for number, new in enumerate(after):
            if alone[number] - new <= max_nodes * _LITTLE:
                root = number
            trees[root] = trees.get(root, 0) + new
        return cls(blocks, alone, after, max(_ENOUGH, max_nodes // 2), trees)

    def cut(self, max_nodes: int) -> list[range]:
        """Blocks of each forest: as many as fit, one at least; see :func:`plant`."""
        parts: list[range] = []
        start = num_nodes = 0
        for number in range(len(self.blocks)):
            joins = number not in self.trees or num_nodes + self.trees[number] <= self.joined
            if number > start and not (joins and num_nodes + self.after[number] <= max_nodes):
                parts.append(range(start, number))
                start, num_nodes = number, 0
            num_nodes += self.after[number] if number > start else self.alone[number]
        if self.blocks:
            parts.append(range(start, len(self.blocks)))
        return parts

    def num_nodes(self, part: range) -> int:
        return self.alone[part.start] + sum(self.after[part.start + 1 : part.stop])

    def items(self, part: range) -> list[TrainedTokens]:
        return sorted((item for number in part for item in self.blocks[number]), key=_order)


def _blocks(trained: Sequence[TrainedTokens], keep: Together | None) -> list[list[TrainedTokens]]:
    """What must not be cut, each part and the whole in tree order."""
    blocks: dict[object, list[TrainedTokens]] = {}
    for number, item in enumerate(sorted(trained, key=_order)):
        named = {"group": item.sample.group_id or None, "rollout": item.rollout, None: None}[keep]
        blocks.setdefault(("alone", number) if named is None else named, []).append(item)
    return list(blocks.values())


def _new_nodes(block: Sequence[TrainedTokens], previous: IntArray | None) -> tuple[int, IntArray | None]:
    """At most how many nodes a block adds after a path, and the path that it ends with. Exact for blocks of one."""
    count = 0
    for item in block:
        tokens = _context(item)
        count += len(tokens) - (_common_prefix(previous, tokens) if previous is not None else 0)
        previous = tokens
    return count, previous


def _order(item: TrainedTokens) -> tuple[tuple[int, ...], tuple[int, ...], float, str]:
    # By context first: only then is a sample's longest shared beginning the one with the sample before it.
    sample = item.sample
    return sample.token_ids[: int(item.positions[-1])], sample.token_ids, sample.temperature, sample.rollout_id


def _context(item: TrainedTokens) -> IntArray:
    return np.asarray(item.sample.token_ids[: int(item.positions[-1])], dtype=np.int64)


def _common_prefix(left: IntArray, right: IntArray) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def grow(items: Sequence[TrainedTokens]) -> Forest:
    """One forest of samples in tree order, as :func:`deal` gives them."""
    token_ids: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    path: list[int] = []  # nodes of the sample before
    previous: IntArray | None = None
    rows: dict[tuple[int, float], int] = {}
    pairs: dict[tuple[int, int], int] = {}
    pair_of_token: list[int] = []
    for item in items:
        tokens = _context(item)
        shared = _common_prefix(previous, tokens) if previous is not None else 0
        for node in path[shared:]:
            ends[node] = len(token_ids)
        path = path[:shared] + list(range(len(token_ids), len(token_ids) + len(tokens) - shared))
        token_ids.extend(tokens[shared:].tolist())
        depths.extend(range(shared, len(tokens)))
        ends.extend([-1] * (len(tokens) - shared))
        previous = tokens
        sample = item.sample
        for position in item.positions.tolist():
            row = rows.setdefault((path[position - 1], sample.temperature), len(rows))
            pair_of_token.append(pairs.setdefault((row, sample.token_ids[position]), len(pairs)))
    for node in path:
        ends[node] = len(token_ids)
    pair_rows, targets = (np.asarray(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    rollout_of_sample, firsts = _numbered([item.rollout for item in items])
    group_of_rollout, _ = _numbered([items[first].sample.group_id or None for first in firsts])
    order = np.argsort(pair_rows, kind="stable")
    rank = np.argsort(order, kind="stable")
    return Forest(
        token_ids=np.asarray(token_ids, dtype=np.int64),
        depths=np.asarray(depths, dtype=np.int64),
        ends=np.asarray(ends, dtype=np.int64),
        rows=np.asarray([node for node, _ in rows], dtype=np.int64),
        temperatures=np.asarray([temperature for _, temperature in rows], dtype=np.float64),
        row_of_pair=pair_rows[order],
        targets=targets[order],
        pair_of_token=rank[np.asarray(pair_of_token, dtype=np.int64)],
        items=tuple(items),
        sample_of_token=np.repeat(np.arange(len(items)), [len(item.positions) for item in items]),
        rollout_of_sample=rollout_of_sample,
        group_of_rollout=group_of_rollout,
    )


def _numbered(names: Sequence[object]) -> tuple[IntArray, list[int]]:
    """Each name's number from 0 in order of appearance, where None is a name of its own each time; and where each is first."""
    numbers: dict[object, int] = {}
    firsts: list[int] = []
    found = []
    for place, name in enumerate(names):
        key = ("alone", place) if name is None else name
        if key not in numbers:
            numbers[key] = len(numbers)
            firsts.append(place)
        found.append(numbers[key])
    return np.asarray(found, dtype=np.int64), firsts
