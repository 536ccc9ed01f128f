"""Memory that layers write into one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


class Room:
    """Memory for what a layer makes and drops again, the same for all layers of a model.

    Taken anew by each layer, among what stays for the backward pass, it would leave gaps into which nothing of its size fits: a
    block of an allocator that aligns needs more room than its bytes. What stays in the cache is also written faster.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Not initialized, of the dtype and device of ``like``; one's own until the same name is taken again."""
        size, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(*shape)
