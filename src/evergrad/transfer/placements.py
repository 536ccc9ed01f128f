"""Placements of real tensors, and copies of a plan between tensors that this process can reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from evergrad.transfer.layout import TransferError
from evergrad.transfer.link import copy_bytes
from evergrad.transfer.plan import Box, Copy, Place, Placement, Shard

Buffers = Mapping[str, torch.Tensor]
"""A rank's memory, by its own names."""


def held_shards(named: Iterable[tuple[str, torch.Tensor]], rank: int = 0) -> tuple[dict[str, tuple[int, ...]], list[Shard]]:
    """Shapes of whole tensors, and the boxes of them that this process holds: a module's own parameters, or the parts of it
    that FSDP2 or tensor parallelism left here (``DTensor``, torch.distributed.tensor).

    Gather them from all ranks for ``Placement.of``; nothing but the shapes and boxes needs to travel.

    Raises:
        TransferError: a tensor is a sum that is still to be added up over ranks.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    shards: list[Shard] = []
    for name, tensor in named:
        shapes[name] = tuple(tensor.shape)
        box = _local_box(name, tensor)
        if all(start < stop for start, stop in box):
            shards.append(Shard(name, box, Place(rank, name, (0,) * len(box))))
    return shapes, shards


def held_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The memory that :func:`held_shards` speaks of."""
    return {name: _local(tensor).detach() for name, tensor in named}


def split(shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int | None], hosts: Sequence[str]) -> Placement:
    """Tensor-parallel ranks: each tensor is cut along its dimension into equal parts, one a rank; None: every rank has all.

    Raises:
        TransferError: a size that the ranks do not divide.
    """
    shards = []
    for name, shape in shapes.items():
        for rank in range(len(hosts)):
            box = [(0, size) for size in shape]
            dim = dims.get(name)
            if dim is not None:
                size, odd = divmod(shape[dim], len(hosts))
                if odd:
                    raise TransferError(f"{len(hosts)} ranks do not divide {shape[dim]}", where=name)
                box[dim] = (rank * size, (rank + 1) * size)
            shards.append(Shard(name, tuple(box), Place(rank, name, (0,) * len(shape))))
    return Placement.of(shapes, shards, hosts)


def fused(placement: Placement, groups: Mapping[str, Sequence[str]]) -> Placement:
    """The same shards with some tensors below each other in one buffer, as engines keep q, k and v, or gate and up.

    Args:
        groups: Name of the fused buffer to the tensors in it, from the first row on.

    >>> whole = Placement.whole({"q": (4, 2), "k": (2, 2)})
    >>> fused(whole, {"qk": ["q", "k"]}).buffers(0)
    {'qk': (6, 2)}
    """
    home = {tensor: (buffer, place) for buffer, tensors in groups.items() for place, tensor in enumerate(tensors)}
    rows: dict[tuple[int, str], dict[int, int]] = {}
    for shard in placement.shards:
        if shard.tensor in home:
            buffer, place = home[shard.tensor]
            start, stop = shard.box[0]
            rows.setdefault((shard.place.rank, buffer), {})[place] = stop - start
    moved = []
    for shard in placement.shards:
        if shard.tensor not in home:
            moved.append(shard)
            continue
        buffer, place = home[shard.tensor]
        above = sum(count for other, count in rows[shard.place.rank, buffer].items() if other < place)
        at = (above, *shard.place.at[1:])
        moved.append(Shard(shard.tensor, shard.box, Place(shard.place.rank, buffer, at)))
    return Placement.of(placement.shapes, moved, placement.hosts)


def region(buffers: Buffers, place: Place, shape: Sequence[int]) -> torch.Tensor:
    """A view of what lies at ``place``.

    Raises:
        TransferError: there is no such memory.
    """
    buffer = buffers.get(place.buffer)
    if buffer is None:
        raise TransferError("there is no such tensor", where=place.buffer)
    lead = len(place.at) - len(shape)
    inner = tuple(slice(start, start + size) for start, size in zip(place.at[lead:], shape, strict=True))
    index: tuple[Any, ...] = (*place.at[:lead], *inner)
    part = buffer[index]
    if part.shape != torch.Size(shape):
        raise TransferError(f"{tuple(buffer.shape)} does not hold {tuple(shape)} at {place.at}", where=place.buffer)
    return part


def make_copies(copies: Iterable[Copy], held: Buffers, into: Buffers) -> None:
    """Makes some copies of a plan, all from one rank to one other, whose memory this process can reach; dtypes are
    converted."""
    for copy in copies:
        copy_bytes(region(held, copy.source, copy.shape), region(into, copy.destination, copy.shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor that is not spread has no such method; asking it costs no import of torch.distributed.
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _local_box(name: str, tensor: torch.Tensor) -> Box:
    if not hasattr(tensor, "to_local"):
        return tuple((0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spread: Any = tensor
    if any(placement.is_partial() for placement in spread.placements):
        raise TransferError("the ranks hold parts of a sum, not of the tensor", where=name, hint="add them up first")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, spread.device_mesh, spread.placements)
    if math.prod(shape) == 0:
        return ((0, 0),) * len(shape)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
