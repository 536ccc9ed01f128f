"""Eight bits a number, and a scale for each block of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from evergrad.transfer.codecs.base import Encoded
from evergrad.transfer.layout import TransferError

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Numbers that share a scale, in the order in which they lie in memory."""
_LARGEST = 448.0
"""Of float8 with 4 bits of exponent and 3 of mantissa (Micikevicius et al. 2022, arXiv 2209.05433)."""


class Float8Block:
    """A quarter of float32's bytes. Each value is off by at most 2⁻⁴ of itself, or 2⁻¹⁷ of the largest of its block."""

    exact: ClassVar[bool] = False
    stands_on_previous: ClassVar[bool] = False

    def encode(self, tensor: torch.Tensor, previous: torch.Tensor | None) -> Encoded:
        import torch

        flat = tensor.reshape(-1).float()
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(dim=1) if blocks.numel() else blocks.new_zeros(0)
        scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
        eighths = (blocks / scales[:, None]).to(torch.float8_e4m3fn).view(-1)[: flat.numel()]
        return Encoded("float8_block", (eighths.view(torch.uint8).clone(), scales))

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        import torch

        eighths, scales = parts
        if eighths.numel() != out.numel() or scales.numel() != -(-out.numel() // BLOCK):
            raise TransferError(f"{eighths.numel()} numbers with {scales.numel()} scales arrived for {tuple(out.shape)}")
        values = eighths.view(torch.float8_e4m3fn).float()
        out.copy_((values * scales.repeat_interleave(BLOCK)[: values.numel()]).view(out.shape))
