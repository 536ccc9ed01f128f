"""Attention over the paged cache, for any model whose attention goes through transformers' ``AttentionInterface``.

A step is one flat batch of tokens of many rows. In each layer, all new keys and values are written to the cache first; then
rows are served in *families*: rows that have most of their context in common read it once, and a mask says which token may
see what. A group of samples of one prompt is such a family, so its prompt is read once, not once per sample.

Shape letters: T tokens of the step, F families of one call, Q tokens per family, U distinct context tokens per family,
H query heads, G key-value heads, D head size. Families of one call are padded to its largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from evergrad.inference._schedule import Chunk
from evergrad.inference.config import EngineError

ATTENTION_NAME = "evergrad_paged"


@dataclass
class _Family:
    tokens: list[np.ndarray]
    """Per member: index of its tokens in the flat batch."""
    context: list[np.ndarray]
    """Per member: for each position of the row, where among the family's distinct context tokens it is."""
    slots: list[np.ndarray]
    """Pieces of the family's distinct context, as slots of the cache."""
    positions: list[np.ndarray]
    """The same, as positions in their rows."""
    num_tokens: int
    num_context: int


@dataclass
class _Call:
    """One attention call: families of about the same size."""

    queries: torch.Tensor
    """[F·Q] index of each in the flat batch; padding repeats token 0."""
    slots: torch.Tensor
    """[F·U]"""
    allowed: torch.Tensor
    """[F, Q, U] bool. Padding queries see one arbitrary token, so that no row of the softmax is empty."""
    distance: torch.Tensor | None
    """[F, Q, U] positions between query and context token; only for models with sliding windows."""
    shape: tuple[int, int, int]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[F, 1, Q·heads, U], added to the scores; made once a step for all layers."""
        if window not in self.masks:
            allowed = self.allowed
            if window is not None:
                if self.distance is None:
                    raise EngineError("a layer has a sliding window that the model's configuration does not name")
                # A padding query must still see something, so distance is 0 there.
                allowed = allowed & (self.distance < window)
            mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
            self.masks[window] = mask.repeat_interleave(heads, dim=1).unsqueeze(1)
        return self.masks[window]


@dataclass
class StepPlan:
    """Where the tokens of one step go, and what each may see."""

    new_slots: torch.Tensor
    """[T]"""
    calls: list[_Call]
    restore: torch.Tensor
    """[T] place of each token of the batch among the concatenated queries of all calls."""


class PagedCache:
    """Keys and values of all layers, and the plan of the step that is being computed."""

    def __init__(
        self, num_layers: int, num_slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Not zeroed: pages of memory that are never written are never taken from the system.
        self.memory = torch.empty((num_layers, num_slots, 2, kv_heads, head_dim), dtype=dtype, device=device)
        self.plan: StepPlan | None = None

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copies ``count`` consecutive slots, in all layers."""
        self.memory[:, target : target + count] = self.memory[:, source : source + count]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, **options: Any
    ) -> torch.Tensor:
        """One layer: writes ``key`` and ``value`` [T, G, D], then answers ``query`` [T, H, D] with the same shape."""
        plan, memory = self.plan, self.memory[layer]
        if plan is None:
            raise EngineError("attention was called outside a step")
        memory[:, 0].index_copy_(0, plan.new_slots, key)
        memory[:, 1].index_copy_(0, plan.new_slots, value)
        answers = [_answer(call, query, memory, scale, **options) for call in plan.calls]
        joined = answers[0] if len(answers) == 1 else torch.cat(answers)
        return joined.index_select(0, plan.restore)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer, with one row [1, H, T, D] that is the whole step.

    The module carries its engine's cache as ``paged_cache``. Answers [1, T, H, D].
    """
    if kwargs.get("s_aux") is not None:
        raise EngineError("this model's attention has sinks, which the engine does not know")
    cache: PagedCache = module.paged_cache  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return cache.attend(layer, query, key, value, scale, window=sliding_window, softcap=softcap)[None], None


def plan_step(chunks: Sequence[Chunk], device: torch.device, with_windows: bool) -> StepPlan:
    """Groups the rows of a step into families, and families of like size into calls."""
    starts = np.cumsum([0] + [chunk.stop - chunk.start for chunk in chunks])
    new_slots = np.concatenate([chunk.row.slots[chunk.start : chunk.stop] for chunk in chunks])
    # Rows with a common beginning become neighbours.
    order = sorted(range(len(chunks)), key=lambda place: chunks[place].row.blocks)
    families: list[_Family] = []
    previous: np.ndarray | None = None
    for place in order:
        chunk = chunks[place]
        slots = chunk.row.slots[: chunk.stop]
        tokens = np.arange(starts[place], starts[place + 1])
        shared = 0 if previous is None else _common_length(previous, slots)
        if shared and _worth_joining(families[-1], len(tokens), len(slots), shared):
            _join(families[-1], tokens, slots, shared)
        else:
            families.append(
                _Family([tokens], [np.arange(len(slots))], [slots], [np.arange(len(slots))], len(tokens), len(slots))
            )
        previous = slots
    groups: dict[tuple[int, int], list[_Family]] = {}
    for family in families:
        # Up to a power of two tokens: as many as most groups have samples, and fewer once some of these are one row.
        groups.setdefault(((family.num_tokens - 1).bit_length(), family.num_context.bit_length()), []).append(family)
    restore = np.empty(int(starts[-1]), dtype=np.int64)
    calls: list[_Call] = []
    base = 0
    for group in groups.values():
        calls.append(_build_call(group, chunks_positions(chunks), restore, base, device, with_windows))
        base += len(calls[-1].queries)
    return StepPlan(_to(new_slots, device), calls, _to(restore, device))


def chunks_positions(chunks: Sequence[Chunk]) -> np.ndarray:
    """[T] position of each token of the flat batch in its row."""
    return np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])


def _worth_joining(family: _Family, num_tokens: int, length: int, shared: int) -> bool:
    # Joining saves reading the shared tokens again, and costs scores that the mask then discards. In a step, which leaves no
    # keys and values in a cache of the processor, reading one token's is eight times as dear as a score of all its heads.
    wasted = num_tokens * (family.num_context - shared) + family.num_tokens * (length - shared)
    return 8 * shared > wasted


def _join(family: _Family, tokens: np.ndarray, slots: np.ndarray, shared: int) -> None:
    new = np.arange(family.num_context, family.num_context + len(slots) - shared)
    family.context.append(np.concatenate([family.context[-1][:shared], new]))
    family.tokens.append(tokens)
    family.slots.append(slots[shared:])
    family.positions.append(np.arange(shared, len(slots)))
    family.num_tokens += len(tokens)
    family.num_context += len(new)


def _build_call(
    group: Sequence[_Family], positions: np.ndarray, restore: np.ndarray, base: int, device: torch.device, with_windows: bool
) -> _Call:
    shape = (len(group), max(f.num_tokens for f in group), max(f.num_context for f in group))
    queries = np.zeros(shape[:2], dtype=np.int64)
    slots = np.zeros((shape[0], shape[2]), dtype=np.int64)
    allowed = np.zeros(shape, dtype=bool)
    distance = np.zeros(shape, dtype=np.int64) if with_windows else None
    for index, family in enumerate(group):
        # Padding reads a slot of this family: it is written, hence finite.
        slots[index] = family.slots[0][0]
        slots[index, : family.num_context] = np.concatenate(family.slots)
        at = 0
        for tokens, context in zip(family.tokens, family.context, strict=True):
            end = at + len(tokens)
            queries[index, at:end] = tokens
            restore[tokens] = base + index * shape[1] + np.arange(at, end)
            seen = np.arange(len(context)) <= positions[tokens][:, None]
            allowed[index, at:end, context] = seen.T
            at = end
        allowed[index, at:, 0] = True
        if distance is not None:
            own = np.concatenate(family.positions)
            distance[index, :at, : len(own)] = positions[queries[index, :at]][:, None] - own
    return _Call(
        _to(queries.reshape(-1), device),
        _to(slots.reshape(-1), device),
        _to(allowed, device),
        None if distance is None else _to(distance, device),
        shape,
    )


def _answer(
    call: _Call, flat: torch.Tensor, memory: torch.Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    num_families, num_queries, num_context = call.shape
    kv_heads, head_dim = memory.shape[2:]
    group = flat.shape[1] // kv_heads
    context = memory.index_select(0, call.slots).view(num_families, num_context, 2, kv_heads, head_dim)
    key, value = context[:, :, 0].transpose(1, 2), context[:, :, 1].transpose(1, 2)
    # Query heads that share a key-value head count as further queries: [F, G, Q·group, D].
    query = flat.index_select(0, call.queries).view(num_families, num_queries, kv_heads, group, head_dim)
    query = query.permute(0, 2, 1, 3, 4).reshape(num_families, kv_heads, num_queries * group, head_dim)
    mask = call.mask(window, group, query.dtype)
    if softcap is None:
        answer = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * (scale / softcap)) * softcap + mask
        answer = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)
    answer = answer.view(num_families, kv_heads, num_queries, group, head_dim).permute(0, 2, 1, 3, 4)
    return answer.reshape(num_families * num_queries, kv_heads * group, head_dim)


def _common_length(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
