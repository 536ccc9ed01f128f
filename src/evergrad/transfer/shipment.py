"""One published version as it travels: which bytes make which part of which tensor, and how to prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from evergrad.transfer.layout import Layout, TensorSpec, TransferError
from evergrad.transfer.plan import Placement, Plan, make_plan


@dataclass(frozen=True, slots=True)
class Item:
    """One copy of the plan."""

    key: str
    """Of the copy."""
    codec: str
    """What decodes it."""
    parts: tuple[TensorSpec, ...]
    """Offsets are those in the payload."""
    checksum: str
    """xxh3-64 in hex: of the tensor that they become where the codec keeps every bit, else of their own bytes."""
    exact: bool
    """Which of the two it is."""

    @property
    def start(self) -> int:
        return min(part.offset for part in self.parts)

    @property
    def stop(self) -> int:
        return max(part.offset + part.num_bytes for part in self.parts)

    def moved(self, by: int) -> Item:
        """The same item in bytes that begin elsewhere."""
        return replace(self, parts=tuple(replace(part, offset=part.offset + by) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes that make a version: by themselves, or out of the version that they stand on."""

    name: str
    """Under which the transport keeps them; never used twice."""
    policy_version: int
    base_version: int | None
    """None: they stand alone."""
    codec: str
    """Asked for; single items may use another."""
    num_bytes: int
    items: tuple[Item, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Payload:
        items = tuple(
            Item(str(i["key"]), str(i["codec"]), tuple(_part(p) for p in i["parts"]), str(i["checksum"]), bool(i["exact"]))
            for i in data["items"]
        )
        base = None if data.get("base_version") is None else int(data["base_version"])  # absent and null are the same
        return cls(str(data["name"]), int(data["policy_version"]), base, str(data["codec"]), int(data["num_bytes"]), items)


@dataclass(frozen=True, slots=True)
class Shipment:
    """What a publisher says of a version: all payloads that may be needed to make it."""

    policy_version: int
    plan_hash: str
    payloads: tuple[Payload, ...]
    seconds: float = 0.0
    """From the first byte written to the offer."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shipment:
        """
        Raises:
            TransferError: a field is missing or of the wrong kind.
        """
        try:
            payloads = tuple(Payload.from_dict(payload) for payload in data["payloads"])
            return cls(int(data["policy_version"]), str(data["plan_hash"]), payloads, float(data.get("seconds", 0.0)))
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"not a shipment: {error!r}") from error

    def route(self, live: int | None) -> list[Payload]:
        """The payloads to apply, in order, by who has version ``live``; the smallest where there is a choice.

        Raises:
            TransferError: all that is offered stands on other versions.
        """
        found = _route(self.payloads, self.policy_version, live)
        if found is None:
            bases = ", ".join(sorted({str(payload.base_version) for payload in self.payloads}))
            held = "none is held" if live is None else f"version {live} is held"
            raise TransferError(f"version {self.policy_version} stands on version {bases}, and {held}", hint="publish it whole")
        return found


def _route(payloads: Sequence[Payload], target: int, live: int | None) -> list[Payload] | None:
    routes = []
    for payload in payloads:
        if payload.policy_version != target:
            continue
        if payload.base_version in (None, live):
            routes.append([payload])
        elif payload.base_version < target:  # a cycle of versions is nobody's history
            before = _route(payloads, payload.base_version, live)
            routes += [] if before is None else [[*before, payload]]
    return min(routes, key=lambda route: sum(payload.num_bytes for payload in route), default=None)


def _part(data: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(str(data["name"]), tuple(int(size) for size in data["shape"]), str(data["dtype"]), int(data["offset"]))


def whole_plan(layout: Layout) -> Plan:
    """Every tensor of one rank to one other, under the same name."""
    placement = Placement.whole({spec.name: spec.shape for spec in layout.tensors})
    return make_plan(placement, placement)


def view_of(payload: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The part at its place in the bytes of a payload [num_bytes]."""
    part = payload[spec.offset : spec.offset + spec.num_bytes]
    return part.view(getattr(torch, spec.dtype)).view(spec.shape)
