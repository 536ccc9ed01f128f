"""Checksums of tensors, and whether their values can be served; on as many cores as there are.

A pass over memory costs as much as copying it. So what is asked of the same bytes is asked while they are in the cache, and
different tensors are gone through side by side: neither hashing nor numpy's loops hold Python's lock. Torch's loops would do as
well, but bring threads of their own into each of these.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
import xxhash

from evergrad.transfer.files import tensor_bytes
from evergrad.transfer.layout import TensorSpec

T = TypeVar("T")
R = TypeVar("R")

_CHUNK_BYTES = 1 << 18
"""Bytes of which all is asked before the next are touched: a second-level cache holds twice as many."""
_MOST_THREADS = 8
_NUMPY_FLOATS = {torch.float32, torch.float64}


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


def checksum_and_finite(tensor: torch.Tensor) -> tuple[str, bool]:
    """:func:`checksum` and :func:`all_finite` of a contiguous CPU tensor, in one pass over memory."""
    if tensor.dtype not in _NUMPY_FLOATS or not tensor.numel():
        return checksum(tensor), not tensor.is_floating_point() or all_finite(tensor)
    values = tensor.detach().reshape(-1).numpy()
    digest, finite = xxhash.xxh3_64(), True
    step = _CHUNK_BYTES // tensor.element_size()
    for start in range(0, len(values), step):
        chunk = values[start : start + step]
        digest.update(chunk.view(np.uint8).data)
        finite = finite and bool(np.isfinite(chunk.max()) and np.isfinite(chunk.min()))
    return str(digest.hexdigest()), finite


def copy_and_checksum(source: torch.Tensor, target: torch.Tensor) -> str:
    """``target.copy_(source)``, and the checksum of what is there then; contiguous, on the CPU."""
    alike = source.dtype == target.dtype and source.is_contiguous() and source.device == target.device
    if not alike or not source.numel():
        target.copy_(source)
        return checksum(target)
    old, new = source.reshape(-1).view(torch.uint8).numpy(), target.view(-1).view(torch.uint8).numpy()
    digest = xxhash.xxh3_64()
    for start in range(0, len(old), _CHUNK_BYTES):
        part = slice(start, start + _CHUNK_BYTES)
        new[part] = old[part]
        digest.update(new[part].data)
    return str(digest.hexdigest())


def side_by_side(function: Callable[[T], R], named: Mapping[str, T]) -> dict[str, R]:
    """``function`` of every value, by name, on several threads."""
    return dict(zip(named, proofs().map(function, named.values()), strict=True))


@functools.cache
def proofs() -> ThreadPoolExecutor:
    """The threads of this process that prove tensors."""
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="transfer-proof")
