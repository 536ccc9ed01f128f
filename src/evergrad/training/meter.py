"""Figures of one step, added up over micro-batches and ranks."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from evergrad.training.forest import Forest
from evergrad.training.losses import Loss, TokenTensors
from evergrad.training.losses.base import MAX_LOG_RATIO
from evergrad.types import TrainingBatch


@dataclass(slots=True)
class Sums:
    """What micro-batches add up to; plain numbers, which travel between ranks."""

    loss: float = 0.0
    tokens: int = 0
    nodes: int = 0
    micro_batches: int = 0
    ratio: float = 0.0
    ratio_max_error: float = 0.0
    mismatch_kl: float = 0.0
    figures: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of the loss: sum and count."""

    def add(self, other: Sums) -> None:
        """Takes in what another rank measured."""
        self.loss += other.loss
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.micro_batches += other.micro_batches
        self.ratio += other.ratio
        self.ratio_max_error = max(self.ratio_max_error, other.ratio_max_error)
        self.mismatch_kl += other.mismatch_kl
        for name, (total, count) in other.figures.items():
            self.add_figure(name, total, count)

    def add_figure(self, name: str, total: float, count: int) -> None:
        before, number = self.figures.get(name, (0.0, 0))
        self.figures[name] = before + total, number + count


class Meter:
    """Collects sums; :meth:`metrics` turns those of all ranks into what a step reports."""

    def __init__(self, batch: TrainingBatch, rule: Loss) -> None:
        self._batch, self._rule = batch, rule
        self.sums = Sums()

    @torch.no_grad()
    def add(self, loss: torch.Tensor, tokens: TokenTensors, forest: Forest) -> None:
        """Takes one micro-batch in."""
        sums = self.sums
        sums.loss += float(loss)
        sums.tokens += len(tokens.logprobs)
        sums.nodes += forest.num_nodes
        sums.micro_batches += 1
        for name, values in self._rule.figures(tokens).items():
            sums.add_figure(name, float(values.double().sum()), values.numel())
        if not self._rule.needs_behaviour:
            return
        log_ratio = (tokens.logprobs - tokens.behaviour_logprobs).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        sums.ratio += float(ratio.sum())
        sums.ratio_max_error = max(sums.ratio_max_error, float((ratio - 1).abs().max()))
        # KL(μ‖π) without its variance: mean of r − 1 − log r, every term of which is at least 0 (Schulman 2020).
        sums.mismatch_kl += float((ratio - 1 - log_ratio).sum())

    def metrics(self, sums_of_ranks: Sequence[Sums]) -> dict[str, float]:
        """See ``Trainer.forward_backward``."""
        sums = Sums()
        for each in sums_of_ranks:
            sums.add(each)
        batch_tokens = sum(len(sample.token_ids) for sample in self._batch.samples)
        metrics = {
            "loss": sums.loss,
            "valid_tokens": float(self._batch.num_valid_tokens),
            "gradient_tokens": float(sums.tokens),
            "trained_tokens": float(sums.nodes),
            "batch_tokens": float(batch_tokens),
            "useful_token_share": sums.tokens / batch_tokens if batch_tokens else 0.0,
            "micro_batches": float(sums.micro_batches),
        }
        metrics |= {name: total / count for name, (total, count) in sums.figures.items()}
        if self._rule.needs_behaviour and sums.tokens:
            metrics |= {
                "ratio_mean": sums.ratio / sums.tokens,
                "ratio_max_error": sums.ratio_max_error,
                "mismatch_kl": sums.mismatch_kl / sums.tokens,
            }
        return metrics


def memory_gib(*, peak: bool = False) -> float:
    """What the process holds of the machine's memory, or of the GPU's once it computes there; GiB."""
    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        return float(torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30
    statm = Path("/proc/self/statm")
    if peak or not statm.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**30
