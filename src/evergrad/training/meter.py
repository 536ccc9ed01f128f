"""Figures of one step, added up over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evergrad.training.forest import Forest
from evergrad.training.losses import Loss, TokenTensors
from evergrad.training.losses.base import MAX_LOG_RATIO
from evergrad.types import TrainingBatch


class Meter:
    """Collects sums; :meth:`metrics` turns them into what a step reports."""

    def __init__(self, batch: TrainingBatch, rule: Loss) -> None:
        self._batch, self._rule = batch, rule
        self._loss = 0.0
        self._ratio_sum = self._kl_sum = 0.0
        self._ratio_max_error = 0.0
        self._figures: dict[str, tuple[float, int]] = {}
        self._tokens = 0

    @torch.no_grad()
    def add(self, loss: torch.Tensor, tokens: TokenTensors) -> None:
        """Takes one micro-batch in."""
        self._loss += float(loss)
        self._tokens += len(tokens.logprobs)
        for name, values in self._rule.figures(tokens).items():
            total, count = self._figures.get(name, (0.0, 0))
            self._figures[name] = total + float(values.double().sum()), count + values.numel()
        if not self._rule.needs_behaviour:
            return
        log_ratio = (tokens.logprobs - tokens.behaviour_logprobs).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        self._ratio_sum += float(ratio.sum())
        self._ratio_max_error = max(self._ratio_max_error, float((ratio - 1).abs().max()))
        # KL(μ‖π) without its variance: mean of r − 1 − log r, every term of which is at least 0 (Schulman 2020).
        self._kl_sum += float((ratio - 1 - log_ratio).sum())

    def metrics(self, forests: Sequence[Forest]) -> dict[str, float]:
        """See ``Trainer.forward_backward``."""
        samples = self._batch.samples
        metrics = {
            "loss": self._loss,
            "sampled_tokens": float(self._batch.num_valid_tokens),
            "gradient_tokens": float(self._tokens),
            "trained_tokens": float(sum(forest.num_nodes for forest in forests)),
            "batch_tokens": float(sum(len(sample.token_ids) for sample in samples)),
            "micro_batches": float(len(forests)),
        }
        metrics |= {name: total / count for name, (total, count) in self._figures.items()}
        if self._rule.needs_behaviour and self._tokens:
            metrics |= {
                "ratio_mean": self._ratio_sum / self._tokens,
                "ratio_max_error": self._ratio_max_error,
                "mismatch_kl": self._kl_sum / self._tokens,
            }
        return metrics
