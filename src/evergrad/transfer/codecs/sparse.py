"""Only what changed.

After a step of reinforcement learning most weights are, in bfloat16, what they were: about 99% of them at learning rates
around 1e-6 (PULSE, arXiv 2602.03839), because Adam's step is smaller than their rounding. New values overwrite old ones, so
that applying a change twice does no harm; a difference, added or xor-ed, would have to arrive exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from evergrad.transfer.codecs.base import Encoded
from evergrad.transfer.codecs.identity import Identity
from evergrad.transfer.layout import TransferError

if TYPE_CHECKING:
    import torch

_Integers = np.ndarray[Any, Any]
_LONGEST_STEP = 1 << 16
"""Places that one entry can skip, itself included: what sixteen bits hold."""
_SHIFT = 1 + _LONGEST_STEP // 2
"""What a step of zero stands for: the other half of what sixteen bits hold is negative."""
_STEP_BYTES = 2
_BLOCK = 1 << 16
"""Values that are compared at once; no more than a step is long."""
_SAMPLE_STRIDE = 61
"""Every how manieth place is looked at to guess the density; no divisor of usual widths, so that no column is preferred."""


class Sparse:
    """Distances to the places that changed, in sixteen bits each, and their new values.

    A tensor of which so much changed that this would be more bytes than the tensor travels whole. A sample is looked at first,
    so that a dense update costs next to nothing more than it would without this codec.
    """

    exact: ClassVar[bool] = True
    stands_on_previous: ClassVar[bool] = True

    def encode(self, tensor: torch.Tensor, previous: torch.Tensor | None) -> Encoded:
        import torch

        size = tensor.element_size()
        most = tensor.numel() * size // (_STEP_BYTES + size)
        if previous is None or not tensor.numel():
            return Identity().encode(tensor, None)
        new, old = _bits(tensor), _bits(previous)
        sampled = np.count_nonzero(new[::_SAMPLE_STRIDE] != old[::_SAMPLE_STRIDE])
        changes = None if sampled * _SAMPLE_STRIDE > 2 * most else _changes(new, old, most)
        if changes is None:
            return Identity().encode(tensor, None)
        steps, values = changes
        return Encoded("sparse", (torch.from_numpy(steps), torch.from_numpy(values).view(tensor.dtype)))

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        steps, values = parts[0].numpy(), parts[1]
        last = int(steps.sum(dtype=np.int64)) + len(steps) * _SHIFT - 1
        if len(steps) != values.numel() or last >= out.numel():
            raise TransferError(f"{values.numel()} changes at {len(steps)} places do not fit {tuple(out.shape)}")
        whole = out.contiguous()  # itself, where it is
        target, bits, last = _bits(whole), _bits(values.to(out.dtype)), -1
        for start in range(0, len(steps), _BLOCK):
            places = steps[start : start + _BLOCK].astype(np.int64)
            places += _SHIFT
            np.cumsum(places, out=places)
            places += last
            target[places] = bits[start : start + _BLOCK]
            last = int(places[-1])
        if whole.data_ptr() != out.data_ptr():
            out.copy_(whole)


def _bits(tensor: torch.Tensor) -> _Integers:
    """The tensor's own memory [numel] as integers. As a float, a NaN differs from itself, and a negative zero equals a positive
    one, which is not what "same" means here."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    found: _Integers = tensor.view(-1).view(integers).numpy()
    return found


def _changes(new: _Integers, old: _Integers, most: int) -> tuple[_Integers, _Integers] | None:
    """Steps to the places that differ, and what is there now; None from ``most`` entries on.

    Between two places that are too far apart lie some that did not change, whose values are sent all the same.
    """
    steps, values, count, last = [np.empty(0, np.int16)], [new[:0]], 0, -1
    for start in range(0, len(new), _BLOCK):
        # Small enough for all that is made of it to stay in the cache, and no two places of it are too far apart.
        block = new[start : start + _BLOCK]
        places = np.flatnonzero(block != old[start : start + _BLOCK])
        if not len(places):
            continue
        stops = np.arange(last + _LONGEST_STEP, start + int(places[0]), _LONGEST_STEP)
        if len(stops):
            places = np.concatenate([stops - start, places])
        count += len(places)
        if count >= most:
            return None
        steps.append((np.diff(places, prepend=last - start) - _SHIFT).astype(np.int16))
        values.append(np.concatenate([new[stops], block[places[len(stops) :]]]) if len(stops) else block[places])
        last = start + int(places[-1])
    return np.concatenate(steps), np.concatenate(values)
