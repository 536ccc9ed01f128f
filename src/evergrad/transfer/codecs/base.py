"""What a codec is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Encoded:
    """One tensor as it travels."""

    codec: str
    """The registered name of what decodes it: a codec may hand a tensor on to another that does it better."""
    parts: Sequence[torch.Tensor]
    """Contiguous, and made anew or not written before the transfer is over."""


class Codec(Protocol):
    """Turns a tensor into what travels and back. One file each; a line in ``codecs/__init__.py`` names it.

    Both directions are pure functions of their arguments, so that equal weights have equal bytes and checksums.
    """

    exact: ClassVar[bool]
    """Whether what arrives is, bit for bit, what left."""
    stands_on_previous: ClassVar[bool]
    """Whether both ends need the version before."""

    def encode(self, tensor: torch.Tensor, previous: torch.Tensor | None) -> Encoded:
        """
        Args:
            tensor: [any shape], contiguous.
            previous: The same tensor of the version before; None when there is none, or the codec needs none.
        """
        ...

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Writes the tensor into ``out``, which holds the version before when the codec stands on it.

        Raises:
            TransferError: the parts do not make a tensor of this shape.
        """
        ...
