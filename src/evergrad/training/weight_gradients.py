"""Gradients of weights that add up over micro-batches without a pass of their own.

Autograd makes each micro-batch's gradient apart and then adds it to what the weight holds: it reads and writes all weights
once more. A product that adds to its result costs no more than one that only writes it.
"""

from __future__ import annotations

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
