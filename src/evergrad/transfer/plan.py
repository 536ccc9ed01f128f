"""Who copies what to whom, so that tensors laid out in one way end up laid out in another. Geometry alone, no torch.

A :class:`Placement` says which box of which tensor lies where: a Hugging Face module holds each tensor whole, FSDP ranks hold
slices of it, an engine may keep three of them as rows of one fused matrix. :func:`make_plan` intersects the boxes of a source
placement with those of a destination::

    source                              destination (fused, two ranks)
    rank 0: q_proj[0:4, 0:8]  ────────▶ rank 0: qkv[0:4, 0:8]
    rank 1: q_proj[4:8, 0:8]  ────────▶ rank 1: qkv[0:4, 0:8]

The result depends on the two placements only, and equal ones give equal plans in every process: both ends make theirs and
compare hashes. Intersecting boxes is how distributed array libraries redistribute (Prylli & Tourancheau 1997, "Fast runtime
block cyclic data redistribution on multiprocessors"); the rest is bookkeeping.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from evergrad.transfer.layout import TransferError

Box = tuple[tuple[int, int], ...]
"""Start and stop along each dimension. A scalar's box has no dimensions and one element."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A corner in somebody's memory."""

    rank: int
    buffer: str
    """The rank's own name for the memory."""
    at: tuple[int, ...]
    """Index of the first element. Dimensions that the tensor lacks come first, so that an expert's matrix can be one of a
    stack."""


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A box of a tensor, and where it is kept."""

    tensor: str
    box: Box
    place: Place

    @classmethod
    def whole(cls, tensor: str, shape: Sequence[int], rank: int = 0) -> Shard:
        """All of a tensor under its own name."""
        return cls(tensor, tuple((0, size) for size in shape), Place(rank, tensor, (0,) * len(shape)))


@dataclass(frozen=True)
class Placement:
    """Where every part of every tensor is kept, by how many ranks, on which hosts.

    >>> halves = [Shard("w", ((0, 2),), Place(0, "w", (0,))), Shard("w", ((2, 4),), Place(1, "w", (0,)))]
    >>> Placement.of({"w": (4,)}, halves, hosts=["a", "a"]).hosts
    ('a', 'a')
    """

    shapes: Mapping[str, tuple[int, ...]]
    shards: tuple[Shard, ...]
    hosts: tuple[str, ...]
    """Of each rank."""

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], shards: Iterable[Shard], hosts: Sequence[str] = ("",)) -> Placement:
        """
        Raises:
            TransferError: a shard of an unknown tensor or rank, a box outside of its tensor, or two in one place.
        """
        known = {name: tuple(shape) for name, shape in sorted(shapes.items())}
        ordered = tuple(sorted(shards))
        taken: dict[tuple[int, str], list[Box]] = {}
        for shard in ordered:
            shape, place = known.get(shard.tensor), shard.place
            if shape is None:
                raise TransferError("a shard of a tensor that the placement does not have", where=shard.tensor)
            if not 0 <= place.rank < len(hosts):
                raise TransferError(f"rank {place.rank} of {len(hosts)}", where=shard.tensor, hint="name a host for each rank")
            inside = len(shape) == len(shard.box) and all(0 <= a <= b <= n for (a, b), n in zip(shard.box, shape, strict=True))
            if not inside or len(place.at) < len(shape):
                raise TransferError(f"box {shard.box} at {place.at} does not fit shape {shape}", where=shard.tensor)
            boxes, own = taken.setdefault((place.rank, place.buffer), []), _memory_box(place, shard.box)
            if any(len(box) != len(own) or intersect(box, own) is not None for box in boxes):
                raise TransferError(f"two shards in one place of '{place.buffer}'", where=shard.tensor)
            boxes.append(own)
        return cls(known, ordered, tuple(hosts))

    @classmethod
    def whole(cls, shapes: Mapping[str, Sequence[int]]) -> Placement:
        """One rank that holds each tensor whole under its own name, as a Hugging Face module does."""
        return cls.of(shapes, [Shard.whole(name, shape) for name, shape in shapes.items()])

    def buffers(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape that each buffer of ``rank`` needs to hold its shards."""
        shapes: dict[str, tuple[int, ...]] = {}
        for shard in self.shards:
            if shard.place.rank == rank:
                ends = tuple(stop for _, stop in _memory_box(shard.place, shard.box))
                known = shapes.get(shard.place.buffer, ends)
                shapes[shard.place.buffer] = tuple(max(pair) for pair in zip(known, ends, strict=True))
        return shapes


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """One box, from memory to memory."""

    source: Place
    destination: Place
    shape: tuple[int, ...]
    tensor: str

    @property
    def key(self) -> str:
        """Where it goes, in words; no two copies of a plan share one."""
        region = ",".join(f"{a}:{b}" for a, b in _memory_box(self.destination, tuple((0, n) for n in self.shape)))
        return f"{self.destination.rank}/{self.destination.buffer}[{region}]"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """All copies of a transfer. ``copies`` go from source ranks to destination ranks; then ``fan_out``, in order, from one
    destination rank to others of its host, so that nothing reaches a host twice."""

    copies: tuple[Copy, ...]
    fan_out: tuple[Copy, ...] = ()

    @cached_property
    def hash(self) -> str:
        """Equal plans have equal hashes, whatever the process."""
        data = [[asdict(copy) for copy in part] for part in (self.copies, self.fan_out)]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def sent_by(self, rank: int) -> list[Copy]:
        """What a source rank sends, grouped by destination."""
        own = [copy for copy in self.copies if copy.source.rank == rank]
        return sorted(own, key=lambda copy: (copy.destination.rank, copy))


def make_plan(source: Placement, destination: Placement) -> Plan:
    """The copies that fill every shard of ``destination``.

    A box that several ranks of a host want crosses to that host once. Where several source ranks hold it, one on the same
    host is taken first, then the one that has sent least so far.

    Raises:
        TransferError: the two do not have the same tensors in the same shapes, or the source lacks a part.
    """
    _require_same_tensors(source, destination)
    holders: dict[str, list[Shard]] = {}
    for shard in source.shards:
        holders.setdefault(shard.tensor, []).append(shard)
    sent = [0] * len(source.hosts)
    there: dict[tuple[str, str], list[Shard]] = {}
    copies: list[Copy] = []
    fan_out: list[Copy] = []
    for wanted in sorted(destination.shards, key=lambda shard: (shard.place.rank, shard)):
        host = destination.hosts[wanted.place.rank]
        arrived = there.setdefault((host, wanted.tensor), [])
        missing = [wanted.box]
        for holder in arrived:
            missing = _take(missing, holder, wanted, fan_out)
        order = sorted(
            holders.get(wanted.tensor, []), key=lambda s: (source.hosts[s.place.rank] != host, sent[s.place.rank], s)
        )
        for holder in order:
            before = len(copies)
            missing = _take(missing, holder, wanted, copies)
            sent[holder.place.rank] += sum(copy.numel for copy in copies[before:])
        if missing:
            raise TransferError(f"no source rank holds {_words(missing[0])}", where=wanted.tensor)
        arrived.append(wanted)
    return Plan(tuple(copies), tuple(fan_out))


def intersect(a: Box, b: Box) -> Box | None:
    """What both have in common; None when that is nothing.

    >>> intersect(((0, 4), (0, 2)), ((2, 6), (1, 3)))
    ((2, 4), (1, 2))
    """
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def subtract(a: Box, b: Box) -> Iterator[Box]:
    """Boxes that make up what ``a`` has and ``b`` has not; at most two for each dimension.

    >>> list(subtract(((0, 4), (0, 2)), ((1, 2), (0, 2))))
    [((0, 1), (0, 2)), ((2, 4), (0, 2))]
    """
    common = intersect(a, b)
    if common is None:
        yield a
        return
    rest = list(a)
    for dim, ((start, stop), (low, high)) in enumerate(zip(a, common, strict=True)):
        if start < low:
            yield (*rest[:dim], (start, low), *rest[dim + 1 :])
        if high < stop:
            yield (*rest[:dim], (high, stop), *rest[dim + 1 :])
        rest[dim] = (low, high)


def _take(missing: Iterable[Box], holder: Shard, wanted: Shard, into: list[Copy]) -> list[Box]:
    """Has ``holder`` give what it can of ``missing``; returns what is missing still."""
    left: list[Box] = []
    for box in missing:
        common = intersect(box, holder.box)
        if common is None:
            left += [box] if all(start < stop for start, stop in box) else []
            continue
        shape = tuple(stop - start for start, stop in common)
        into.append(Copy(_corner(holder, common), _corner(wanted, common), shape, wanted.tensor))
        left += subtract(box, common)
    return left


def _corner(shard: Shard, box: Box) -> Place:
    """Where ``box``, a part of the shard's own, lies in memory."""
    lead = len(shard.place.at) - len(box)
    inner = (at + low - own for at, (low, _), (own, _) in zip(shard.place.at[lead:], box, shard.box, strict=True))
    return Place(shard.place.rank, shard.place.buffer, (*shard.place.at[:lead], *inner))


def _memory_box(place: Place, box: Box) -> Box:
    lead = len(place.at) - len(box)
    inner = ((at, at + stop - start) for at, (start, stop) in zip(place.at[lead:], box, strict=True))
    return (*((at, at + 1) for at in place.at[:lead]), *inner)


def _require_same_tensors(source: Placement, destination: Placement) -> None:
    for side, own, other in (("source", source, destination), ("destination", destination, source)):
        odd = sorted(own.shapes.keys() - other.shapes.keys())
        if odd:
            raise TransferError(f"{len(odd)} tensors are at the {side} only, first '{odd[0]}'")
    for name, shape in source.shapes.items():
        if destination.shapes[name] != shape:
            raise TransferError(f"{shape} at the source, {destination.shapes[name]} at the destination", where=name)


def _words(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
