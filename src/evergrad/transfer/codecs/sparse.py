"""Only what changed.

After a step of reinforcement learning most weights are, in bfloat16, what they were: about 99% of them at learning rates
around 1e-6 (PULSE, arXiv 2602.03839), because Adam's step is smaller than their rounding. New values overwrite old ones, so
that applying a change twice does no harm; a difference, added or xor-ed, would have to arrive exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from evergrad.transfer.codecs.base import Encoded
from evergrad.transfer.codecs.identity import Identity
from evergrad.transfer.layout import TransferError

if TYPE_CHECKING:
    import torch

_LONGEST_STEP = 1 << 16
"""Places that one entry can skip, itself included: what sixteen bits hold."""
_STEP_BYTES = 2
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
        # As bits: a NaN differs from itself, and a negative zero equals a positive one, which is not what "same" means here.
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        new, old = tensor.view(-1).view(bits), previous.view(-1).view(bits)
        sampled = new[::_SAMPLE_STRIDE] != old[::_SAMPLE_STRIDE]
        if int(sampled.sum()) * _SAMPLE_STRIDE > 2 * most:
            return Identity().encode(tensor, None)
        places = (new != old).nonzero().view(-1)
        if places.numel() >= most:
            return Identity().encode(tensor, None)
        places = _with_stops(places)
        if places.numel() >= most:
            return Identity().encode(tensor, None)
        steps = torch.diff(places, prepend=places.new_tensor([-1])) - 1
        return Encoded("sparse", ((steps - _LONGEST_STEP // 2).to(torch.int16), tensor.view(-1)[places]))

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        import torch

        steps, values = parts
        places = (steps.to(torch.int64) + (_LONGEST_STEP // 2 + 1)).cumsum(0) - 1
        if steps.numel() != values.numel() or (places.numel() and int(places[-1]) >= out.numel()):
            raise TransferError(f"{values.numel()} changes at {steps.numel()} places do not fit {tuple(out.shape)}")
        if out.is_contiguous():
            out.view(-1)[places] = values.to(out.dtype)
        else:
            whole = out.reshape(-1)
            whole[places] = values.to(out.dtype)
            out.copy_(whole.view(out.shape))


def _with_stops(places: torch.Tensor) -> torch.Tensor:
    """``places``, and between two that are too far apart some that did not change, whose values are sent all the same."""
    import torch

    before = torch.cat([places.new_tensor([-1]), places[:-1]])
    stops = (places - before - 1) // _LONGEST_STEP
    if not int(stops.sum()):
        return places
    owners = torch.repeat_interleave(torch.arange(places.numel()), stops)
    first = torch.cat([stops.new_zeros(1), stops.cumsum(0)[:-1]])
    within = torch.arange(owners.numel()) - first[owners] + 1
    return torch.cat([places, before[owners] + within * _LONGEST_STEP]).sort().values
