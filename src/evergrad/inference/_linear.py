"""Linear layers on a CPU, over weights that were made ready once for all products: as MKL multiplies them, or in int8."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from evergrad.inference._quantized import QuantizedRows, QuantizedWeight

_PACKED_FOR = 64
"""Rows that the packing is chosen for; it serves any number."""
_FEW_ROWS = 4
"""Below as many, reading the weights is all the work there is, and the plain ones are read faster."""

Packed = torch.Tensor | QuantizedWeight
"""A weight as :class:`PackedLinear` multiplies by it: MKL's opaque form, or int8."""


class PackedLinear(nn.Linear):
    """``nn.Linear`` in float32 whose weight was packed once.

    MKL packs a weight for every product that it computes. That pays for the hundreds of rows of a prompt; for the dozens of a
    decoding step it takes up to a third of the product's time. A packed weight takes its memory a second time, one in int8 a
    quarter of it.
    """

    packed: Packed | None
    """None multiplies by the plain weight."""
    exact: bool
    """While set, a weight in int8 is passed over for the plain one."""

    @classmethod
    def replace(cls, layers: Iterable[nn.Linear], packed: Packed | None) -> list[PackedLinear]:
        """Makes linear layers that share one weight, of which ``packed`` was made, compute with that."""
        found: list[PackedLinear] = []
        for layer in layers:
            layer.__class__ = cls
            assert isinstance(layer, cls)
            layer.packed, layer.exact = packed, False
            found.append(layer)
        return found

    @property
    def quantizes(self) -> bool:
        """Whether the next product is one of integers."""
        return isinstance(self.packed, QuantizedWeight) and not self.exact

    def forward(self, input: torch.Tensor, quantized: QuantizedRows | None = None) -> torch.Tensor:
        """
        Args:
            quantized: The rows of ``input``, where they were quantized already; for a layer that :attr:`quantizes`.
        """
        rows, packed = input.reshape(-1, self.in_features), self.packed
        if isinstance(packed, QuantizedWeight) and not self.exact:
            product = packed.product(QuantizedRows.of(rows) if quantized is None else quantized)
            if self.bias is not None:
                product.add_(self.bias)
        elif isinstance(packed, torch.Tensor) and len(rows) >= _FEW_ROWS:
            product = torch.ops.mkl._mkl_linear(rows, packed, self.weight, self.bias, len(rows))
        else:
            return super().forward(input)
        return product.view(*input.shape[:-1], self.out_features)


def products(rows: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """Each layer's product with the same ``rows`` [T, I], which are quantized once where the layers do so."""
    first = layers[0]
    if isinstance(first, PackedLinear) and first.quantizes:
        quantized = QuantizedRows.of(rows)
        return [layer(rows, quantized) for layer in layers]
    return [layer(rows) for layer in layers]


def can_pack(weight: torch.Tensor) -> bool:
    """Whether :func:`pack` has a use: float32, on a CPU that MKL computes for."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return bool(has_mkl) and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] as :class:`PackedLinear` needs it: opaque, of use for nothing else."""
    packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR)
    return packed
