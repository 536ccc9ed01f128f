"""A whole attention layer over a forest with its backward pass written out: projections, rotary positions, attention.

Between its products the layer only moves numbers, and each step of autograd's moves them once more. Here a projection is
turned by its position while it is copied to where attention reads it, and its gradient is turned back on the way out. What was
read is not kept: the backward pass has the probabilities in hand, made again, and one product more gives it back.

Names, besides those of ``forest`` and ``attention``: W width of the model, H query heads, K key heads of G = H/K query heads
each (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245), D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evergrad.training.attention import AttentionPlan, attend, attend_backward
from evergrad.training.room import Room
from evergrad.training.weight_gradients import weight_gradient


def rotary_attention(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    position: tuple[Tensor, Tensor],
    plan: AttentionPlan,
    scaling: float,
    room: Room,
) -> Tensor:
    """Attention with rotary position embedding (Su et al. 2021, arXiv 2104.09864): [N, W] → [N, W].

    Args:
        x: [N, W].
        weights: Of the projections to queries [H·D, W], keys and values [K·D, W], and of the output [W, H·D].
        position: Cosine and sine, [N, D], of the angles by which the pairs (i, i + D/2) of a head are turned.
        plan: Which nodes each node attends to.
        scaling: Of the scores.
        room: For what is not kept.
    """
    return _RotaryAttention.apply(x, *weights, *position, plan, scaling, room)  # type: ignore[no-untyped-call, no-any-return]


class _RotaryAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: AttentionPlan,
        scaling: float,
        room: Room,
    ) -> Tensor:
        width = cos.shape[1]
        group = len(query) // len(key)

        def projected(weight: Tensor, group: int = 1) -> Tensor:
            made = torch.mm(x, weight.t(), out=room.take("projected", (len(x), len(weight)), x))
            return _heads(made, width, group)

        # The scaling rides along with the turn.
        rows = _turned(projected(query, group), cos * scaling, sin * scaling)
        keys = _turned(projected(key), cos, sin)
        values = _heads(torch.mm(x, value.t()), width)[:, :, 0]
        ctx.save_for_backward(x, query, key, value, output, cos, sin, rows, keys, values)
        ctx.plan, ctx.scaling, ctx.room = plan, scaling, room
        read = room.take("read", rows.shape, rows)
        attend(rows.flatten(1, 2), keys[:, :, 0], values, plan, read.flatten(1, 2), room)
        return torch.mm(_by_node(read, room), output.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, query, key, value, output, cos, sin, rows, keys, values = ctx.saved_tensors
        wants_x, wants_query, wants_key, wants_value, wants_output = ctx.needs_input_grad[:5]
        key_heads, _, group, width = rows.shape
        grad_read = _heads(torch.mm(grad, output), width, group).contiguous()
        grad_keys = torch.zeros_like(keys)
        grad_values = x.new_zeros(len(x), key_heads, width)
        read = ctx.room.take("read", rows.shape, rows) if wants_output else None
        grad_rows = attend_backward(
            grad_read.flatten(1, 2),
            rows.flatten(1, 2),
            keys[:, :, 0],
            values,
            ctx.plan,
            grad_keys[:, :, 0],
            grad_values.transpose(0, 1),
            ctx.room,
            read.flatten(1, 2) if read is not None else None,
        )
        grad_query = _turned_back(grad_rows.view_as(rows), cos * ctx.scaling, sin * ctx.scaling)
        grad_key = _turned_back(grad_keys, cos, sin)
        grad_value = grad_values.view(len(x), -1)
        grad_x = torch.mm(grad_query, query).addmm_(grad_key, key).addmm_(grad_value, value) if wants_x else None
        return (
            grad_x,
            weight_gradient(query, grad_query, x) if wants_query else None,
            weight_gradient(key, grad_key, x) if wants_key else None,
            weight_gradient(value, grad_value, x) if wants_value else None,
            weight_gradient(output, grad, _by_node(read, ctx.room)) if read is not None else None,
            None,
            None,
            None,
            None,
            None,
        )


def _heads(projected: Tensor, width: int, group: int = 1) -> Tensor:
    """A view: [N, K·G·D] → [K, N, G, D]."""
    return projected.view(len(projected), -1, group, width).transpose(0, 1)


def _by_node(heads: Tensor, room: Room) -> Tensor:
    """A copy in ``room``, the other way round: [K, N, G, D] → [N, K·G·D]."""
    key_heads, nodes, group, width = heads.shape
    copy = room.take("by node", (nodes, key_heads, group, width), heads)
    return copy.copy_(heads.transpose(0, 1)).view(nodes, -1)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A copy of [K, N, G, D] in which every pair (i, i + D/2) is turned by the angles of its node; cos and sin [N, D]."""
    turned = torch.mul(heads, cos[:, None], out=heads.new_empty(heads.shape))
    first, second = turned.chunk(2, -1)
    sin_first, sin_second = sin[:, None].chunk(2, -1)
    first.addcmul_(heads.chunk(2, -1)[1], sin_first, value=-1)
    second.addcmul_(heads.chunk(2, -1)[0], sin_second)
    return turned


def _turned_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transpose of :func:`_turned`: gradients [K, N, G, D] → [N, K·G·D]."""
    key_heads, nodes, group, width = grad.shape
    back = grad.new_empty(nodes, key_heads, group, width)
    heads = back.transpose(0, 1)
    torch.mul(grad, cos[:, None], out=heads)
    first, second = heads.chunk(2, -1)
    sin_first, sin_second = sin[:, None].chunk(2, -1)
    first.addcmul_(grad.chunk(2, -1)[1], sin_second)
    second.addcmul_(grad.chunk(2, -1)[0], sin_first, value=-1)
    return back.view(nodes, -1)
