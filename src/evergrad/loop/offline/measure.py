"""Figures that need no gradient: the held-out loss, and what a frozen reference thinks of the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from evergrad.training import LossConfig
from evergrad.training.losses import TokenTensors
from evergrad.training.trainer import Trainer
from evergrad.transfer import load_tensors, save_tensors
from evergrad.types import TrainingSample

_CHUNK = 64
"""Samples that are scored in one call; an even number, so that the two of a pair stay together."""


def heldout_figures(trainer: Trainer, loss: LossConfig, samples: Sequence[TrainingSample]) -> dict[str, float]:
    """``loss`` as a training step on all ``samples`` would report it, and the loss's own figures, such as ``pair_accuracy``.

    Args:
        samples: pairs as neighbours; with ``reference_logprobs`` if the loss needs them.
    """
    rule = loss.build()
    parts = [_tokens(trainer, chunk) for chunk in _chunks(samples)]
    units = sum(len(part.logprobs) for part in parts) if rule.unit == "token" else len(samples) // 2
    total = sum(float(rule(part).sum()) for part in parts) / units
    gathered: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, values in rule.figures(part).items():
            gathered.setdefault(name, []).append(values.double())
    return {"loss": total, **{name: float(torch.cat(values).mean()) for name, values in gathered.items()}}


def reference_logprobs(trainer: Trainer, samples: Sequence[TrainingSample], folder: Path) -> list[tuple[float, ...]]:
    """What the weights that the run starts from think of each sample's trained tokens; scored once and kept in ``folder``.

    Call it before the trainer goes on from a checkpoint: until then its weights are the reference.
    """
    if folder.is_dir():
        flat = load_tensors(folder)["logprobs"].tolist()
    else:
        scored = [values for chunk in _chunks(samples) for values in trainer.score(chunk)]
        flat = [value for values in scored for value in values]
        save_tensors(folder, [("logprobs", torch.tensor(flat, dtype=torch.float64))])
    found, at = [], 0
    for sample in samples:
        found.append(tuple(flat[at : at + len(sample.token_ids)]))
        at += len(sample.token_ids)
    return found


def _chunks(samples: Sequence[TrainingSample]) -> Iterator[Sequence[TrainingSample]]:
    return (samples[start : start + _CHUNK] for start in range(0, len(samples), _CHUNK))


def _tokens(trainer: Trainer, samples: Sequence[TrainingSample]) -> TokenTensors:
    """The trained tokens of whole samples in float64, as a loss takes them."""
    masks = [np.asarray(sample.loss_mask, dtype=bool) for sample in samples]

    def column(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(row)[mask] for row, mask in zip(rows, masks, strict=True)]))

    lengths = torch.tensor([int(mask.sum()) for mask in masks])
    groups: dict[str, int] = {}
    logprobs = column(trainer.score(samples))
    referenced = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
    return TokenTensors(
        logprobs=logprobs,
        behaviour_logprobs=torch.zeros_like(logprobs),
        advantages=column([sample.advantages for sample in samples]),
        rollout=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        lengths=lengths,
        group=torch.tensor([groups.setdefault(sample.group_id or sample.rollout_id, len(groups)) for sample in samples]),
        reference_logprobs=column(referenced) if len(referenced) == len(samples) else None,
    )


def with_references(samples: Sequence[TrainingSample], references: Sequence[tuple[float, ...]] | None) -> list[TrainingSample]:
    """The samples with their reference, if there is one."""
    if references is None:
        return list(samples)
    return [dataclasses.replace(sample, reference_logprobs=values) for sample, values in zip(samples, references, strict=True)]
