"""Exact attention over prefix trees, as an attention function of transformers.

A node attends to its ancestors and itself. Nodes lie in depth-first order, so the work is cut into blocks of queries that
follow one another; the keys of a block are the few ranges that hold its nodes' ancestors. Different trees never meet, a
trunk shared by many answers is one range read by all of them, and what is computed and then masked stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from evergrad.training.forest import Forest, IntArray
from evergrad.training.room import Room

ATTENTION_NAME = "evergrad_forest"
"""Under this name transformers finds :func:`forest_attention`."""

_MAX_QUERIES = 128
"""Queries of one block: enough rows for a fast product, few enough that little is computed and then masked."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that follow one another, and the ranges of keys that hold all their ancestors."""

    queries: slice
    """Nodes that ask."""
    ranges: Ranges
    """Nodes that are asked."""
    gathered: slice
    """Where these lie in the plan's ``key_index``."""
    num_open: int
    """Keys, from the first on, that are ancestors of all queries."""
    bias: Tensor
    """[queries, other keys]: 0 where the key is an ancestor of the query, −∞ where it is not."""

    @property
    def num_scores(self) -> int:
        """Query-key products, per head."""
        return len(self.bias) * (self.num_open + self.bias.shape[1])


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How to attend in one forest; made once, used by every layer."""

    blocks: tuple[Block, ...]
    key_index: Tensor
    """[keys of all blocks] nodes, block after block."""
    num_scores: int
    """Query-key products of all blocks, per head."""

    @classmethod
    def of(
        cls, forest: Forest, device: torch.device, window: int | None = None, dtype: torch.dtype = torch.float32
    ) -> AttentionPlan:
        """Plans attention for ``forest``; with ``window``, a node sees only ancestors less than ``window`` above it."""
        blocks: list[Block] = []
        indices: list[IntArray] = []
        taken = 0
        for start, stop, ranges in _cut(forest.ends):
            index = np.concatenate([np.arange(*part) for part in ranges])
            queries = np.arange(start, stop)[:, None]
            seen = (index[None, :] <= queries) & (queries < forest.ends[index][None, :])
            if window is not None:
                seen &= forest.depths[queries] - forest.depths[index][None, :] < window
            num_open = int(np.append(seen.all(0), False).argmin())
            bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))[:, num_open:]
            gathered = slice(taken, taken + len(index))
            blocks.append(Block(slice(start, stop), ranges, gathered, num_open, bias.contiguous().to(device)))
            indices.append(index)
            taken += len(index)
        key_index = torch.from_numpy(np.concatenate(indices)).to(device)
        return cls(tuple(blocks), key_index, sum(block.num_scores for block in blocks))


class AttentionPlans:
    """The plans of one forest, one for each sliding window that some layer uses; made when a layer first asks."""

    def __init__(self, forest: Forest, device: torch.device, dtype: torch.dtype) -> None:
        self._forest, self._device, self._dtype = forest, device, dtype
        self._plans: dict[int | None, AttentionPlan] = {}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Those that layers have asked for."""
        return tuple(self._plans)

    def for_window(self, window: int | None) -> AttentionPlan:
        """The plan for layers that see ``window`` tokens back, or everything when None."""
        if window not in self._plans:
            self._plans[window] = AttentionPlan.of(self._forest, self._device, window, self._dtype)
        return self._plans[window]


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    forest_plans: AttentionPlans,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention protocol: query [1, heads, N, dim], key and value [1, key heads, N, dim] → [1, N, heads, dim].

    ``forest_plans`` is handed to the model's ``forward``, which passes it on to every layer.
    """
    if dropout or softcap is not None:
        raise NotImplementedError("its attention has dropout or a soft cap on scores")
    output = _ForestAttention.apply(query[0], key[0], value[0], forest_plans.for_window(sliding_window), scaling)  # type: ignore[no-untyped-call]
    return output.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, forest_attention)


class _ForestAttention(torch.autograd.Function):
    """query [H, N, D], key and value [K, N, D] → [H, N, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scaling: float) -> Tensor:
        rows = _to_rows(query, len(key)).mul_(scaling)
        ctx.save_for_backward(rows, key, value)
        ctx.plan, ctx.scaling = plan, scaling
        return _from_rows(attend(rows, key, value, plan, torch.empty_like(rows), Room()), len(query))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        rows, key, value = ctx.saved_tensors
        grad_key = torch.zeros_like(key, memory_format=torch.contiguous_format)
        grad_value = torch.zeros_like(value, memory_format=torch.contiguous_format)
        grads = _to_rows(grad_output, len(key))
        grad_rows = attend_backward(grads, rows, key, value, ctx.plan, grad_key, grad_value, Room())
        return _from_rows(grad_rows.mul_(ctx.scaling), len(grad_output)), grad_key, grad_value, None, None


def attend(rows: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, output: Tensor, room: Room) -> Tensor:
    """What every node reads from its ancestors and itself.

    Each of the K key heads serves G query heads. The G heads of a node are rows next to one another: a block of nodes is then
    a range of rows, taken without a copy, and one product serves all heads that share a key head, so keys are never repeated.

    Args:
        rows: [K, N·G, D] queries, multiplied by the scaling.
        key: [K, N, D], as is ``value``.
        output: [K, N·G, D], where to write what is read.
        room: For one block at a time: what is written again and again stays in the cache.

    Returns:
        ``output``.
    """
    keys, values = _gathered(key, "keys", plan, room), _gathered(value, "values", plan, room)
    group = rows.shape[1] // key.shape[1]
    for block in plan.blocks:
        part = _rows_of(block, group)
        probabilities = _probabilities(rows[:, part], keys[:, block.gathered], block, group, room)
        torch.bmm(probabilities, values[:, block.gathered], out=output[:, part])
    return output


def attend_backward(
    grads: Tensor,
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    grad_key: Tensor,
    grad_value: Tensor,
    room: Room,
    output: Tensor | None = None,
) -> Tensor:
    """Adds to ``grad_key`` and ``grad_value`` [K, N, D]; returns the gradient of ``rows``.

    Probabilities are computed again, block by block, where they fit into the cache: to read them from memory would take about
    as long.

    Args:
        grads: [K, N·G, D] of what :func:`attend` returned for ``rows``, ``key`` and ``value``.
        room: As for :func:`attend`.
        output: Where to write that again, for a caller that did not keep it: one product, next to five.
    """
    keys, values = _gathered(key, "keys", plan, room), _gathered(value, "values", plan, room)
    grad_rows = torch.empty_like(rows)
    group = rows.shape[1] // key.shape[1]
    for block in plan.blocks:
        part = _rows_of(block, group)
        asked, read = keys[:, block.gathered], values[:, block.gathered]
        probabilities = _probabilities(rows[:, part], asked, block, group, room)
        if output is not None:
            torch.bmm(probabilities, read, out=output[:, part])
        _add_to_ranges(grad_value, torch.bmm(probabilities.transpose(1, 2), grads[:, part]), block.ranges)
        grad_scores = torch.bmm(grads[:, part], read.transpose(1, 2), out=room.take("gradients", probabilities.shape, rows))
        # d softmax: p · (g − Σ p g); masked entries have p = 0 and so stay 0.
        torch._softmax_backward_data(grad_scores, probabilities, -1, probabilities.dtype, grad_input=grad_scores)
        torch.bmm(grad_scores, asked, out=grad_rows[:, part])
        _add_to_ranges(grad_key, torch.bmm(grad_scores.transpose(1, 2), rows[:, part]), block.ranges)
    return grad_rows


def _to_rows(tensor: Tensor, key_heads: int) -> Tensor:
    """A copy: [H, N, D] → [K, N·G, D]."""
    heads, nodes, width = tensor.shape
    rows = tensor.new_empty(key_heads, nodes, heads // key_heads, width)
    rows.copy_(tensor.view(key_heads, -1, nodes, width).transpose(1, 2))
    return rows.view(key_heads, -1, width)


def _from_rows(rows: Tensor, heads: int) -> Tensor:
    """A view: [K, N·G, D] → [H, N, D] when there is one key head or one query head for each, else a copy."""
    key_heads, _, width = rows.shape
    return rows.view(key_heads, -1, heads // key_heads, width).transpose(1, 2).reshape(heads, -1, width)


def _rows_of(block: Block, group: int) -> slice:
    return slice(block.queries.start * group, block.queries.stop * group)


def _gathered(heads: Tensor, name: str, plan: AttentionPlan, room: Room) -> Tensor:
    """[K, N, D] → [K, keys of all blocks, D]."""
    gathered = room.take(name, (len(heads), len(plan.key_index), heads.shape[2]), heads)
    return torch.index_select(heads, 1, plan.key_index, out=gathered)


def _probabilities(rows: Tensor, keys: Tensor, block: Block, group: int, room: Room) -> Tensor:
    """[K, rows, keys] in ``room``."""
    place = room.take("scores", (*rows.shape[:2], keys.shape[1]), rows)
    scores = torch.bmm(rows, keys.transpose(1, 2), out=place)
    scores.view(len(rows), -1, group, scores.shape[-1])[..., block.num_open :] += block.bias[:, None]
    return torch.softmax(scores, -1, out=scores)


def _add_to_ranges(whole: Tensor, part: Tensor, ranges: Ranges) -> None:
    taken = 0
    for start, stop in ranges:
        whole[:, start:stop] += part[:, taken : taken + stop - start]
        taken += stop - start


def _cut(ends: IntArray) -> list[tuple[int, int, Ranges]]:
    """Blocks ``(start, stop, key ranges)`` that cover all nodes once, in order.

    A subtree small enough is one block, together with the siblings after it that still fit. A larger one is cut at its first
    fork: the trunk above it is attended on its own, and its branches see the trunk as one more range of keys.
    """
    blocks: list[tuple[int, int, Ranges]] = []
    pending: list[tuple[int, int, Ranges]] = [(0, len(ends), ())]  # sibling subtrees [start, stop) under ancestors
    while pending:
        start, stop, above = pending.pop()
        if start == stop:
            continue
        group = start
        while group < stop and ends[group] - start <= _MAX_QUERIES:
            group = int(ends[group])
        if group > start:
            pending.append((group, stop, above))
            blocks.append((start, group, _join(above, (start, group))))
            continue
        subtree_end = int(ends[start])
        fork = start + 1
        while fork < subtree_end and ends[fork] == subtree_end:
            fork += 1
        pending.append((subtree_end, stop, above))
        pending.append((fork, subtree_end, _join(above, (start, fork))))
        for first in range(start, fork, _MAX_QUERIES):
            last = min(first + _MAX_QUERIES, fork)
            blocks.append((first, last, _join(above, (start, last))))
    return blocks


def _join(above: Ranges, last: tuple[int, int]) -> Ranges:
    if above and above[-1][1] == last[0]:
        return (*above[:-1], (above[-1][0], last[1]))
    return (*above, last)
