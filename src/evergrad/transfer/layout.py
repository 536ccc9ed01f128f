"""What lies where in a slot, and what one published version consists of. Plain JSON values, no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from evergrad.types import EvergradError

ALIGNMENT = 64
"""Bytes; tensors start on cache-line borders, so that kernels read them as they would their own memory."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}


class TransferError(EvergradError):
    """Weights that were not moved: what did not fit, and what stays in service instead."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's place in a slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name without the module: ``float32``, ``bfloat16``, …"""
    offset: int
    """Bytes from the start of the slot."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """All tensors of a slot, without gaps but for alignment, in the order they were given.

    >>> layout = Layout.of([("a", (2, 3), "float32"), ("b", (5,), "float32")])
    >>> [tensor.offset for tensor in layout.tensors], layout.num_bytes
    ([0, 64], 84)
    """

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Sequence[int], str]]) -> Layout:
        """Lays ``(name, shape, dtype)`` out one after another.

        Raises:
            TransferError: no tensors, a name twice, or a dtype that cannot travel.
        """
        tensors: list[TensorSpec] = []
        seen: set[str] = set()
        offset = 0
        for name, shape, dtype in entries:
            if dtype not in ITEM_BYTES:
                raise TransferError(f"dtype '{dtype}' cannot travel", where=name, hint=f"use one of {', '.join(ITEM_BYTES)}")
            if name in seen:
                raise TransferError("the same name twice in one layout", where=name)
            seen.add(name)
            spec = TensorSpec(name, tuple(int(size) for size in shape), dtype, offset)
            tensors.append(spec)
            offset = -(-(offset + spec.num_bytes) // ALIGNMENT) * ALIGNMENT
        if not tensors:
            raise TransferError("a layout without tensors", hint="publish at least one tensor")
        return cls(tuple(tensors))

    @classmethod
    def from_dict(cls, data: Iterable[Mapping[str, Any]]) -> Layout:
        return cls(tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], int(t["offset"])) for t in data))

    def as_dict(self) -> list[dict[str, Any]]:
        return [asdict(tensor) for tensor in self.tensors]

    @cached_property
    def num_bytes(self) -> int:
        return max(tensor.offset + tensor.num_bytes for tensor in self.tensors)

    @cached_property
    def hash(self) -> str:
        """Equal layouts have equal hashes, whatever the process."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published version: where it lies and how to prove that it is whole.

    >>> Manifest.from_dict(Manifest(3, 0, {"a": "00"}, 24, "ab").as_dict()).policy_version
    3
    """

    policy_version: int
    slot: int
    checksums: Mapping[str, str]
    """Tensor name to xxh3-64 of its bytes, in hex; covers the layout exactly."""
    num_bytes: int
    """Payload, alignment excluded."""
    layout_hash: str
    seconds: float = 0.0
    """From the first byte written to the last one sealed."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checksums": dict(self.checksums)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """
        Raises:
            TransferError: a field is missing or of the wrong kind.
        """
        try:
            checksums = {str(name): str(value) for name, value in dict(data["checksums"]).items()}
            return cls(
                int(data["policy_version"]),
                int(data["slot"]),
                checksums,
                int(data["num_bytes"]),
                str(data["layout_hash"]),
                float(data.get("seconds", 0.0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"not a manifest: {error!r}") from error
