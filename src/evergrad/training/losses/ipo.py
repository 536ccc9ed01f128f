"""IPO: preferences that a certain margin satisfies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evergrad.training.losses.pairs import ReferencePairLoss

if TYPE_CHECKING:
    from torch import Tensor


class Ipo(ReferencePairLoss):
    """``(Δ − 1/(2β))²`` with ``Δ = log π/π_ref (chosen) − log π/π_ref (rejected)`` (Azar et al. 2023, arXiv 2310.12036).

    DPO pushes certain preferences apart without end; here they stop at ``1/(2β)``.
    """

    length_normalized: bool = True
    """Means over each answer's tokens, as in the paper's experiments by its authors' word; false for sums as in its formula."""

    def preference(self, margin: Tensor) -> Tensor:
        return (margin - 1 / (2 * self.beta)).square()
