"""Linear layers on a CPU, over weights that lie as MKL multiplies them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_PACKED_FOR = 64
"""Rows that the packing is chosen for; it serves any number."""
_FEW_ROWS = 4
"""Below as many, reading the weights is all the work there is, and the plain ones are read faster."""


class PackedLinear(nn.Linear):
    """``nn.Linear`` in float32 whose weight was packed once.

    MKL packs a weight for every product that it computes. That pays for the hundreds of rows of a prompt; for the dozens of a
    decoding step it takes up to a third of the product's time. A packed weight takes its memory a second time.
    """

    packed: torch.Tensor

    @classmethod
    def replace(cls, layers: Iterable[nn.Linear], packed: torch.Tensor) -> list[PackedLinear]:
        """Makes linear layers that share one weight, of which ``packed`` was made, compute with that."""
        found: list[PackedLinear] = []
        for layer in layers:
            layer.__class__ = cls
            assert isinstance(layer, cls)
            layer.packed = packed
            found.append(layer)
        return found

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        if len(rows) < _FEW_ROWS:
            return super().forward(input)
        product: torch.Tensor = torch.ops.mkl._mkl_linear(rows, self.packed, self.weight, self.bias, len(rows))
        return product.view(*input.shape[:-1], self.out_features)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether :class:`PackedLinear` can compute with it: float32, on a CPU that MKL computes for."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return bool(has_mkl) and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] as :class:`PackedLinear` needs it: opaque, of use for nothing else."""
    packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR)
    return packed
