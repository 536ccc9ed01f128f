"""How fast a link is, and how much of that a transfer used."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PROBE_BYTES = 64 << 20
_PROBES = 3


@dataclass(frozen=True, slots=True)
class Receipt:
    """What it took to move one version.

    >>> Receipt("identity", 500_000_000, 0.1, 10.0).as_dict()["link_share"]
    0.5
    """

    codec: str
    num_bytes: int
    """That moved, not that the tensors have."""
    seconds: float
    """From the publisher's first byte to the proof at the receiver; what a router or an HTTP call adds is not in it."""
    link_gb_per_s: float
    """What the link carried at its start."""

    def as_dict(self) -> dict[str, Any]:
        """With the rate, and the share of the link's rate that it is."""
        rate = self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0
        return {
            "codec": self.codec,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 6),
            "gb_per_s": round(rate, 4),
            "link_gb_per_s": round(self.link_gb_per_s, 4),
            "link_share": round(rate / self.link_gb_per_s, 4) if self.link_gb_per_s else None,
        }


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """``target.copy_(source)``; where both are alike and on the CPU, by the C library's ``memcpy``.

    That one writes long stretches past the caches, which saves reading what is overwritten: nearly twice as fast here as
    torch's own loop.
    """
    if bytes_alike(source, target):
        np.copyto(raw_bytes(target), raw_bytes(source))
    else:
        target.copy_(source)


def bytes_alike(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a copy is one of bytes: between contiguous CPU tensors of one dtype and shape that are not empty."""
    alike = source.dtype == target.dtype and source.shape == target.shape and source.device == target.device
    return alike and target.device.type == "cpu" and source.is_contiguous() and target.is_contiguous() and source.numel() > 0


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory [num_bytes] of a contiguous CPU tensor, without a copy."""
    found: np.ndarray[Any, Any] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


@functools.cache
def _probe_source() -> np.ndarray[Any, Any]:
    return np.ones(_PROBE_BYTES, dtype=np.uint8)


def memory_gb_per_s(target: memoryview) -> float:
    """The best of a few copies into ``target``, which is overwritten."""
    size = min(len(target), _PROBE_BYTES)
    source, into = _probe_source()[:size], np.frombuffer(target, dtype=np.uint8)[:size]
    best = float("inf")
    for _ in range(_PROBES):
        started = time.perf_counter()
        np.copyto(into, source)
        best = min(best, time.perf_counter() - started)
    return size / best / 1e9
