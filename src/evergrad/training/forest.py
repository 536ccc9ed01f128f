"""Merges the samples of a batch into prefix trees, so that each distinct token is computed once.

Two samples share a node exactly as long as their tokens agree from the start, so a node's ancestors are its whole context:
a hidden state computed under the ancestor mask is the one that every sample through the node would have computed alone.
Sorted samples give the trees in depth-first order, one after another. In that order every subtree is a range, and node a is
an ancestor of node b (or b itself) iff ``a <= b < end[a]``.

Names: N nodes, R distinct (node, temperature) whose next-token distribution is wanted, P distinct (row of R, next token) whose
log-probability is, T trained (sample, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evergrad.types import TrainingSample

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The positions of one sample that carry a loss."""

    sample: TrainingSample
    positions: IntArray
    """Ascending, none of them 0 (a first token has no context to be predicted from)."""


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
    behaviour_logprobs: FloatArray
    """[T]"""
    advantages: FloatArray
    """[T]"""

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)


def plant(trained: Sequence[TrainedTokens], max_nodes: int) -> list[Forest]:
    """Cuts samples into forests of at most ``max_nodes`` nodes each, or one sample where that alone is longer.

    The cut depends only on the samples, not on their order. Nothing after a sample's last trained token is computed, nor is
    that token itself: it is only predicted.
    """
    ordered = sorted(trained, key=_order)
    forests: list[Forest] = []
    growing: list[TrainedTokens] = []
    num_nodes = 0
    previous: IntArray | None = None
    for item in ordered:
        tokens = _context(item)
        new = len(tokens) - (_common_prefix(previous, tokens) if previous is not None else 0)
        if growing and num_nodes + new > max_nodes:
            forests.append(_grow(growing))
            growing, num_nodes, new = [], 0, len(tokens)
        growing.append(item)
        num_nodes += new
        previous = tokens
    if growing:
        forests.append(_grow(growing))
    return forests


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


def _grow(items: Sequence[TrainedTokens]) -> Forest:
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
        behaviour_logprobs=np.concatenate([np.asarray(i.sample.logprobs, dtype=np.float64)[i.positions] for i in items]),
        advantages=np.concatenate([np.asarray(i.sample.advantages, dtype=np.float64)[i.positions] for i in items]),
    )
