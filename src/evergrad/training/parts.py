"""Tensors that may be spread over ranks, each of which holds a part: taken together, filled, made alike.

A distributed tensor is told by what it can do, not by its class: with one process that class is never imported, which would
take seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank may hold a part. Every rank must call it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


def here(tensor: Tensor) -> Tensor:
    """The part that this rank holds, without a copy."""
    local = getattr(tensor, "to_local", None)
    return tensor.detach() if local is None else local().detach()


def computing(tensor: Tensor) -> Tensor:
    """As :func:`here`, to compute with: the gradient finds its way back. What is on several ranks of a layer gets a gradient
    from each, and these add up."""
    local = getattr(tensor, "to_local", None)
    if local is None:
        return tensor
    from torch.distributed.tensor import Partial

    placements = tensor.placements  # type: ignore[attr-defined]
    part: Tensor = local(grad_placements=[Partial() if place.is_replicate() else place for place in placements])
    return part


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Copies ``values``, which are whole or distributed like ``parameter``, into what is here of ``parameter``."""
    parameter.copy_(like(parameter, values))


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """``values`` on the device of ``parameter`` and, when both have one shape, distributed as it is."""
    if not hasattr(parameter, "full_tensor") or hasattr(values, "full_tensor") or values.shape != parameter.shape:
        return values.to(parameter.device)
    from evergrad.training.sharding import distribute_like

    return distribute_like(parameter, values)


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Over all entries, a float64 scalar.

    Row by row first, then in double precision: one long float32 sum is off by some 1e-6 of itself, and with it every gradient
    that a norm scales down; and what a float32 can hold may have a square that it cannot.
    """
    rows = [torch.linalg.vector_norm(tensor, dim=-1).reshape(-1) for tensor in tensors]
    return torch.cat(rows).double().square().sum()
