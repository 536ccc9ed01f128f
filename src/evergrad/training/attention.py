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

ATTENTION_NAME = "evergrad_forest"
"""Under this name transformers finds :func:`forest_attention`."""

_MAX_QUERIES = 128
"""Queries of one block: enough rows for a fast product, few enough that little is computed and then masked."""

_MAX_KEPT_BYTES = 16 * 2**20
"""Attention probabilities of one layer up to this size are kept for the backward pass; larger ones are computed again."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``[start, stop)`` and the ranges of keys that hold all their ancestors."""

    start: int
    stop: int
    keys: Ranges
    hidden: Tensor
    """[queries, keys] bool: True where the key is not an ancestor of the query."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How to attend in one forest; made once, used by every layer."""

    blocks: tuple[Block, ...]
    num_scores: int
    """Query-key products of all blocks, per head."""

    @classmethod
    def of(cls, forest: Forest, device: torch.device, window: int | None = None) -> AttentionPlan:
        """Plans attention for ``forest``; with ``window``, a node sees only ancestors less than ``window`` above it."""
        blocks = []
        for start, stop, keys in _cut(forest.ends):
            index = np.concatenate([np.arange(*part) for part in keys])
            queries = np.arange(start, stop)[:, None]
            seen = (index[None, :] <= queries) & (queries < forest.ends[index][None, :])
            if window is not None:
                seen &= forest.depths[queries] - forest.depths[index][None, :] < window
            blocks.append(Block(start, stop, keys, torch.from_numpy(~seen).to(device)))
        return cls(tuple(blocks), sum(block.hidden.numel() for block in blocks))


class AttentionPlans:
    """The plans of one forest, one for each sliding window that some layer uses; made when a layer first asks."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self._forest, self._device = forest, device
        self._plans: dict[int | None, AttentionPlan] = {}

    def for_window(self, window: int | None) -> AttentionPlan:
        """The plan for layers that see ``window`` tokens back, or everything when None."""
        if window not in self._plans:
            self._plans[window] = AttentionPlan.of(self._forest, self._device, window)
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
        raise NotImplementedError("attention dropout and soft-capping are not supported in training")
    output = _ForestAttention.apply(query[0], key[0], value[0], forest_plans.for_window(sliding_window), scaling)  # type: ignore[no-untyped-call]
    return output.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, forest_attention)


class _ForestAttention(torch.autograd.Function):
    """query [H, N, D], key and value [K, N, D] → [H, N, D]; H/K query heads share a key head.

    Heads that share keys become rows of one product, so keys are never repeated.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scaling: float) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        keep = plan.num_scores * query.shape[0] * query.element_size() <= _MAX_KEPT_BYTES
        kept: list[Tensor] = []
        for block in plan.blocks:
            rows = _fold(query, block, key.shape[0])
            probabilities = _probabilities(rows, _gather(key, block.keys), block, scaling)
            _unfold_into(output, torch.bmm(probabilities, _gather(value, block.keys)), block)
            if keep:
                kept.append(probabilities)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.plan, ctx.scaling = plan, scaling
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, *kept = ctx.saved_tensors
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key = torch.zeros_like(key, memory_format=torch.contiguous_format)
        grad_value = torch.zeros_like(value, memory_format=torch.contiguous_format)
        for number, block in enumerate(ctx.plan.blocks):
            rows, grads = _fold(query, block, key.shape[0]), _fold(grad_output, block, key.shape[0])
            keys, values = _gather(key, block.keys), _gather(value, block.keys)
            probabilities = kept[number] if kept else _probabilities(rows, keys, block, ctx.scaling)
            _scatter_add(grad_value, torch.bmm(probabilities.transpose(1, 2), grads), block.keys)
            grad_scores = torch.bmm(grads, values.transpose(1, 2))
            # d softmax: p · (g − Σ p g); masked entries have p = 0 and so stay 0.
            grad_scores = torch._softmax_backward_data(grad_scores, probabilities, -1, probabilities.dtype)
            grad_scores *= ctx.scaling
            _unfold_into(grad_query, torch.bmm(grad_scores, keys), block)
            _scatter_add(grad_key, torch.bmm(grad_scores.transpose(1, 2), rows), block.keys)
        return grad_query, grad_key, grad_value, None, None


def _probabilities(rows: Tensor, keys: Tensor, block: Block, scaling: float) -> Tensor:
    scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(scaling)
    num_queries, num_keys = block.hidden.shape
    scores.view(-1, num_queries, num_keys).masked_fill_(block.hidden, float("-inf"))
    return torch.softmax(scores, -1)


def _fold(tensor: Tensor, block: Block, key_heads: int) -> Tensor:
    """[H, N, D] → [K, H/K · queries, D]: consecutive heads share a key head."""
    part = tensor[:, block.start : block.stop]
    return part.reshape(key_heads, -1, part.shape[-1])


def _unfold_into(whole: Tensor, part: Tensor, block: Block) -> None:
    whole[:, block.start : block.stop] = part.view(whole.shape[0], -1, whole.shape[-1])


def _gather(tensor: Tensor, ranges: Ranges) -> Tensor:
    parts = [tensor[:, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _scatter_add(whole: Tensor, part: Tensor, ranges: Ranges) -> None:
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
