"""Checksums of tensors, and whether their values can be served; on as many cores as there are.

A pass over memory costs as much as copying it. So what is asked of the same bytes is asked while they are in the cache, and
different tensors are gone through side by side: neither hashing nor numpy's loops hold Python's lock. Torch's loops would do as
well, but bring threads of their own into each of these. What is left is Python's own time, which waits for that lock: each
thread gets a list of its own at once, and all views are made before it begins.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import xxhash

from evergrad.transfer.files import tensor_bytes
from evergrad.transfer.layout import TensorSpec
from evergrad.transfer.link import raw_bytes

R = TypeVar("R", covariant=True)

_Array = np.ndarray[Any, Any]
_CHUNK_BYTES = 1 << 19
"""Bytes of which all is asked before the next are touched. Few enough that a second-level cache has them still (one to two
MiB a core on servers since 2017), and enough that starting anew costs little."""
_MOST_THREADS = 8
_NUMPY_FLOATS = {torch.float32, torch.float64}


@dataclass(frozen=True, slots=True)
class Task(Generic[R]):
    """Something to be done with some memory, ready to run in any thread."""

    num_bytes: int
    run: Callable[[], R]


def checksum(tensor: torch.Tensor) -> str:
    """xxh3-64 of a contiguous tensor's bytes, in hex; empty for an empty one."""
    return str(xxhash.xxh3_64_hexdigest(tensor_bytes(tensor))) if tensor.numel() else ""


def checksum_of_parts(payload: torch.Tensor, parts: Iterable[TensorSpec]) -> str:
    """The same of some parts of a payload [num_bytes], one after the other; empty when they are."""
    digest, length = xxhash.xxh3_64(), 0
    for spec in parts:
        if spec.num_bytes:
            digest.update(tensor_bytes(payload[spec.offset : spec.offset + spec.num_bytes]))
            length += spec.num_bytes
    return str(digest.hexdigest()) if length else ""


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # Smallest and largest are NaN when any value is, and finding them needs no memory.
    return not tensor.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


def sealing(tensor: torch.Tensor) -> Task[str]:
    """:func:`checksum` of a contiguous CPU tensor."""
    return Task(tensor.nbytes, functools.partial(_seal, raw_bytes(tensor)) if tensor.numel() else str)


def proving(tensor: torch.Tensor) -> Task[tuple[str, bool]]:
    """:func:`checksum` and :func:`all_finite` of a contiguous CPU tensor, in one pass over memory."""
    if tensor.dtype in _NUMPY_FLOATS and tensor.numel():
        return Task(tensor.nbytes, functools.partial(_prove, tensor.detach().reshape(-1).numpy()))
    return Task(tensor.nbytes, lambda: (checksum(tensor), not tensor.is_floating_point() or all_finite(tensor)))


def copying(source: torch.Tensor, target: torch.Tensor) -> Task[str]:
    """``target.copy_(source)`` and the checksum of the source, in one pass; the two are alike (``link.bytes_alike``)."""
    return Task(target.nbytes, functools.partial(_copy, raw_bytes(source), raw_bytes(target)))


def side_by_side(tasks: Mapping[str, Task[R]]) -> dict[str, R]:
    """What every task gives, by name.

    The largest goes first, each to the thread that has least so far (Graham 1969, "Bounds on multiprocessing timing
    anomalies").
    """
    queues: list[list[str]] = [[] for _ in range(_num_threads())]
    loads = [0] * len(queues)
    for name in sorted(tasks, key=lambda name: -tasks[name].num_bytes):
        least = loads.index(min(loads))
        queues[least].append(name)
        loads[least] += tasks[name].num_bytes
    found: dict[str, R] = {}
    for done in proofs().map(lambda names: [(name, tasks[name].run()) for name in names], queues):
        found |= done
    return {name: found[name] for name in tasks}


@functools.cache
def proofs() -> ThreadPoolExecutor:
    """The threads of this process that prove tensors."""
    return ThreadPoolExecutor(_num_threads(), thread_name_prefix="transfer-proof")


def _num_threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)


def _seal(values: _Array) -> str:
    return str(xxhash.xxh3_64_hexdigest(values.data))


def _prove(values: _Array) -> tuple[str, bool]:
    digest, finite = xxhash.xxh3_64(), True
    step = _CHUNK_BYTES // values.itemsize
    for start in range(0, len(values), step):
        chunk = values[start : start + step]
        digest.update(chunk.view(np.uint8).data)
        finite = finite and bool(np.isfinite(chunk.max()) and np.isfinite(chunk.min()))
    return str(digest.hexdigest()), finite


def _copy(old: _Array, new: _Array) -> str:
    digest = xxhash.xxh3_64()
    for start in range(0, len(old), _CHUNK_BYTES):
        # Of the source: the C library may write past the caches, but it has just read through them.
        chunk = old[start : start + _CHUNK_BYTES]
        np.copyto(new[start : start + _CHUNK_BYTES], chunk)
        digest.update(chunk.data)
    return str(digest.hexdigest())
