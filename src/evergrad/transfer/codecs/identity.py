"""As it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from evergrad.transfer.codecs.base import Encoded
from evergrad.transfer.layout import TransferError

if TYPE_CHECKING:
    import torch


class Identity:
    """Every bit of every tensor."""

    exact: ClassVar[bool] = True
    stands_on_previous: ClassVar[bool] = False

    def encode(self, tensor: torch.Tensor, previous: torch.Tensor | None) -> Encoded:
        return Encoded("identity", (tensor,))

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        (tensor,) = parts
        if tensor.shape != out.shape:
            raise TransferError(f"{tuple(tensor.shape)} arrived for {tuple(out.shape)}")
        out.copy_(tensor)
