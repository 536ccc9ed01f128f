"""How one batch becomes several updates: mini-batches, and what a step reports of them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from random import Random

from evergrad.training.config import TrainerError, UpdatesConfig
from evergrad.types import TrainingBatch, TrainingSample

_SUMMED = frozenset({"gradient_tokens", "trained_tokens", "micro_batches", "updated", "skipped_nonfinite", "critic_skipped"})
"""Figures of which a step reports the sum over its updates; of the others the mean."""
_LARGEST = frozenset({"ratio_max_error", "grad_norm", "critic_grad_norm"})


def mini_batches(batch: TrainingBatch, updates: UpdatesConfig, seed: str) -> list[TrainingBatch]:
    """The batch of each update, in order: ``epochs`` times all groups, shuffled and dealt into ``mini_batches`` parts.

    A group stays whole, for the beginnings that its samples share are computed once; without ``group_id`` the samples of a
    rollout do. Each part is the batch of an optimizer step of its own, so it says itself what a loss divides by.

    Args:
        batch: A whole one, when it is to be cut.
        updates: How often, into how many. Parts that would be empty, for want of groups, are left out.
        seed: Decides the order, together with the number of the epoch.

    Raises:
        TrainerError: the batch is a part of a larger one, whose ``num_valid_tokens`` or ``num_rollouts`` it cannot share out.
    """
    if updates.mini_batches == 1:
        return [batch] * updates.epochs
    valid = sum(map(_valid, batch.samples))
    if batch.num_rollouts is not None or batch.num_valid_tokens != valid:
        raise TrainerError(
            f"a part of a batch cannot be cut into mini-batches: it has {valid} of {batch.num_valid_tokens} tokens",
            hint="give the whole batch, or set updates.mini_batches = 1",
        )
    groups: dict[str, list[TrainingSample]] = {}
    for number, sample in enumerate(batch.samples):
        groups.setdefault(sample.group_id or sample.rollout_id or f"sample {number}", []).append(sample)
    parts = []
    for epoch in range(updates.epochs):
        order = list(groups.values())
        Random(f"{seed}/{epoch}").shuffle(order)
        dealt = [order[first :: updates.mini_batches] for first in range(min(updates.mini_batches, len(order)))]
        parts += [_batch([sample for group in part for sample in group], batch) for part in dealt]
    return parts or [batch]


def with_proximal(batch: TrainingBatch, scored: Mapping[int, tuple[float, ...]]) -> TrainingBatch:
    """The batch with ``proximal_logprobs``; zeros for samples of which no token is trained.

    Args:
        scored: Log-probabilities by the ``id`` of the sample.
    """
    samples = (
        dataclasses.replace(each, proximal_logprobs=scored.get(id(each), (0.0,) * len(each.token_ids)))
        for each in batch.samples
    )
    return dataclasses.replace(batch, samples=tuple(samples))


def _batch(samples: Sequence[TrainingSample], whole: TrainingBatch) -> TrainingBatch:
    return TrainingBatch(tuple(samples), sum(map(_valid, samples)), whole.metrics)


def _valid(sample: TrainingSample) -> int:
    return sum(map(bool, sample.loss_mask))


def merged(reports: Sequence[Mapping[str, float]], batch: TrainingBatch) -> dict[str, float]:
    """One report of several updates: work is summed, what can only be bad at one place is the largest, the rest the mean over
    the updates that have it."""
    if len(reports) == 1:
        return dict(reports[0])
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report[name] for report in reports if name in report]
        if name in _LARGEST:
            found[name] = max(values)
        else:
            found[name] = sum(values) if name in _SUMMED else sum(values) / len(values)
    found["valid_tokens"] = float(batch.num_valid_tokens)
    found["batch_tokens"] = float(sum(len(sample.token_ids) for sample in batch.samples))
    return found
