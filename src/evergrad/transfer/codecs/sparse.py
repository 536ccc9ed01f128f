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
_STEP_BYTES = 2
_BLOCK = 1 << 16
"""Values that are compared at once."""
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
        places = None if sampled * _SAMPLE_STRIDE > 2 * most else _changed(new, old, most)
        if places is None or len(places := _with_stops(places)) >= most:
            return Identity().encode(tensor, None)
        steps = (np.diff(places, prepend=-1) - 1 - _LONGEST_STEP // 2).astype(np.int16)
        return Encoded("sparse", (torch.from_numpy(steps), torch.from_numpy(new[places]).view(tensor.dtype)))

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        steps, values = parts
        places = (steps.numpy().astype(np.int64) + (_LONGEST_STEP // 2 + 1)).cumsum() - 1
        if len(places) != values.numel() or (len(places) and places[-1] >= out.numel()):
            raise TransferError(f"{values.numel()} changes at {len(places)} places do not fit {tuple(out.shape)}")
        whole = out.contiguous()  # itself, where it is
        _bits(whole)[places] = _bits(values.to(out.dtype))
        if whole.data_ptr() != out.data_ptr():
            out.copy_(whole)


def _bits(tensor: torch.Tensor) -> _Integers:
    """The tensor's own memory [numel] as integers. As a float, a NaN differs from itself, and a negative zero equals a positive
    one, which is not what "same" means here."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    found: _Integers = tensor.view(-1).view(integers).numpy()
    return found


def _changed(new: _Integers, old: _Integers, most: int) -> _Integers | None:
    """Places that differ, in order; None from ``most`` on."""
    found, count = [], 0
    for start in range(0, len(new), _BLOCK):
        # Small enough for the comparison to stay in the cache until it is looked through.
        places = np.flatnonzero(new[start : start + _BLOCK] != old[start : start + _BLOCK])
        count += len(places)
        if count >= most:
            return None
        found.append(places + start)
    return np.concatenate(found)


def _with_stops(places: _Integers) -> _Integers:
    """``places``, and between two that are too far apart some that did not change, whose values are sent all the same."""
    before = np.concatenate([[-1], places[:-1]]) if len(places) else places
    stops = (places - before - 1) // _LONGEST_STEP
    if not stops.any():
        return places
    owners = np.repeat(np.arange(len(places)), stops)
    within = np.arange(len(owners)) - (stops.cumsum() - stops)[owners] + 1
    return np.sort(np.concatenate([places, before[owners] + within * _LONGEST_STEP]))
