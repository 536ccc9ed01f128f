"""Direct preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from evergrad.training.losses.pairs import ReferencePairLoss

if TYPE_CHECKING:
    from torch import Tensor


class Dpo(ReferencePairLoss):
    """``−(1 − ε) log σ(β Δ) − ε log σ(−β Δ)`` with ``Δ = log π/π_ref (chosen) − log π/π_ref (rejected)``.

    Rafailov et al. 2023 (arXiv 2305.18290); ε is ``label_smoothing``, for labels that are wrong with that probability.
    """

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs whose labels are thought to be the wrong way round."""
    length_normalized: bool = False
    """Takes the mean over each answer's tokens instead of the sum, so that long answers do not win by length; β is then to be
    some answer lengths larger."""

    def preference(self, margin: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        loss = -(1 - self.label_smoothing) * logsigmoid(self.beta * margin)
        return loss - self.label_smoothing * logsigmoid(-self.beta * margin) if self.label_smoothing else loss
