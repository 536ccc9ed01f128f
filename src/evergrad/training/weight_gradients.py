"""Gradients of weights that add up over micro-batches without a pass of their own.

Autograd makes each micro-batch's gradient apart and then adds it to what the weight holds: it reads and writes all weights
once more. A product that adds to its result costs no more than one that only writes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def held_gradient(weight: Tensor) -> Tensor | None:
    """What earlier micro-batches have left at ``weight``; None before the first, and for a tensor made of other ones."""
    return weight.grad if weight.is_leaf else None


def weight_gradient(weight: Tensor, grads: Tensor, inputs: Tensor) -> Tensor | None:
    """The gradient of ``weight`` [out, in] in ``inputs · weightᵀ``, for an autograd function to return.

    Args:
        grads: [rows, out] of the product.
        inputs: [rows, in].

    Returns:
        ``gradsᵀ · inputs``; None after adding it to :func:`held_gradient`, so that autograd adds nothing.
    """
    held = held_gradient(weight)
    if held is None:
        return torch.mm(grads.t(), inputs)
    held.addmm_(grads.t(), inputs)
    return None


def looked_up(weight: Tensor, token_ids: Tensor, padding: int | None = None) -> Tensor:
    """Rows of an input embedding, whose gradient touches these rows only: [...] → [..., width].

    Args:
        weight: [vocabulary, width].
        token_ids: [...] int64.
        padding: A token whose row gets no gradient.
    """
    rows: Tensor = _LookedUp.apply(weight, token_ids.flatten(), padding)  # type: ignore[no-untyped-call]
    return rows.view(*token_ids.shape, -1)


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, token_ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(weight, token_ids)
        ctx.padding = padding
        return weight.index_select(0, token_ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        weight, token_ids = ctx.saved_tensors
        if ctx.padding is not None:
            grad = grad.masked_fill((token_ids == ctx.padding)[:, None], 0)
        held = held_gradient(weight)
        if held is None:
            return torch.zeros_like(weight).index_add_(0, token_ids, grad), None, None
        held.index_add_(0, token_ids, grad)
        return None, None, None
