"""Products of 8-bit integers in the place of float32: a weight has one scale for each output, a row one of its own.

A number x is kept as ``round(x / scale)`` in [-127, 127]; the scale is the largest magnitude of its row over 127. One large
number costs all others of its row their precision, and a language model's activations have such numbers, in the same few
places. So both factors are rotated first, in blocks of neighbouring inputs, by an orthogonal matrix H that spreads each number
over its block: ``x Wᵀ = (x H)(W H)ᵀ`` (as in QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, there in other places). The sums
of products are exact, in int32, so a row's product does not depend on the rows beside it.

Shape letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

_MOST = 127.0
_LARGEST_BLOCK = 64
"""Inputs over which one number is spread: a larger block gains little more, and costs its size in products for each input."""

_OUTPUTS_AT_ONCE = 1024
"""Of a weight that is quantized: what is made on the way then stays in the cache, and takes a third of the time."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """What a product needs of its left factor; several weights may be multiplied by the same."""

    values: torch.Tensor
    """[T, I] int8, rotated."""
    scales: torch.Tensor
    """[T, 1]"""

    @classmethod
    def of(cls, rows: torch.Tensor) -> QuantizedRows:
        """Float32 ``rows`` [T, I]; a row with a value that is not finite has no finite scale either."""
        rotated = _rotated(rows)
        # The bound is for a row of zeros, which has no scale of its own.
        scales = rotated.abs().amax(-1, keepdim=True).mul_(1.0 / _MOST).clamp_(min=torch.finfo(rows.dtype).tiny)
        return cls(rotated.div_(scales).round_().to(torch.int8), scales)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [O, I] in a quarter of its memory."""

    values: torch.Tensor
    """[O, I] int8, rotated."""
    scales: torch.Tensor
    """[O]"""

    @classmethod
    def of(cls, weight: torch.Tensor) -> QuantizedWeight:
        """
        Raises:
            ValueError: ``weight`` has one input; torch multiplies integers of that shape wrongly.
        """
        if weight.shape[1] == 1:
            raise ValueError("a weight with one input cannot be quantized")
        values, scales = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight))
        for start in range(0, len(weight), _OUTPUTS_AT_ONCE):
            part = slice(start, start + _OUTPUTS_AT_ONCE)
            rows = QuantizedRows.of(weight[part])
            values[part], scales[part] = rows.values, rows.scales[:, 0]
        return cls(values, scales)

    def product(self, rows: QuantizedRows) -> torch.Tensor:
        """``rows`` times the transposed weight, [T, O] float32."""
        if not len(rows.values):
            return self.scales.new_empty(0, len(self.values))
        sums = torch._int_mm(rows.values, self.values.t())
        return sums.to(torch.float32).mul_(self.scales).mul_(rows.scales)

    def dequantized(self) -> torch.Tensor:
        """The float32 weight [O, I] that it stands for."""
        return _rotated(self.values.to(torch.float32).mul_(self.scales[:, None]))


def _rotated(rows: torch.Tensor) -> torch.Tensor:
    """A new tensor: each block of ``rows`` [T, I] times H, which is symmetric, so that twice gives the rows again."""
    width = rows.shape[-1]
    block = min(_LARGEST_BLOCK, width & -width)  # the largest power of 2 that divides it
    return (rows.reshape(-1, block) @ _hadamard(block)).view_as(rows)


@cache
def _hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix [size, size] over √size: orthogonal, symmetric, and all entries are of one magnitude."""
    matrix, pair = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < size:
        matrix = torch.kron(pair, matrix)
    return matrix.div_(size**0.5)
