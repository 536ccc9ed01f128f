"""The trainer's requests as JSON: strict about keys, one to one with the nouns in ``types``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pydantic import Field

from evergrad.config import Config
from evergrad.training.config import LossConfig, UpdatesConfig
from evergrad.types import TrainingBatch, TrainingSample

_SAMPLE_FIELDS = tuple(field.name for field in fields(TrainingSample))


class SampleBody(Config):
    """A ``TrainingSample``."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    min_policy_version: int
    max_policy_version: int
    temperature: float = 1.0
    rollout_id: str = ""
    group_id: str = ""
    reference_logprobs: tuple[float, ...] | None = None
    proximal_logprobs: tuple[float, ...] | None = None
    rewards: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    returns: tuple[float, ...] | None = None
    teacher_token_ids: tuple[int, ...] | None = None

    def noun(self) -> TrainingSample:
        return TrainingSample(**dict(self))


class BatchBody(Config):
    """A ``TrainingBatch``."""

    samples: tuple[SampleBody, ...]
    num_valid_tokens: int
    metrics: dict[str, float] = Field(default_factory=dict)
    num_rollouts: int | None = None

    def noun(self) -> TrainingBatch:
        samples = tuple(sample.noun() for sample in self.samples)
        return TrainingBatch(samples, self.num_valid_tokens, self.metrics, self.num_rollouts)


class StepBody(Config):
    """``POST /step``."""

    batch: BatchBody
    loss: LossConfig = LossConfig()
    lr: float | None = Field(default=None, ge=0)
    updates: UpdatesConfig = UpdatesConfig()


class PublishBody(Config):
    """``POST /publish``."""

    policy_version: int = Field(ge=0)


class FolderBody(Config):
    """``POST /save``, ``/load`` and ``/export``."""

    folder: str = Field(min_length=1)


class LogprobsBody(Config):
    """``POST /logprobs``."""

    token_ids: tuple[int, ...] = Field(min_length=2)
    temperature: float = Field(default=1.0, gt=0)


class ScoreBody(Config):
    """``POST /score``."""

    samples: tuple[SampleBody, ...]
    reference: bool = False


class ValuesBody(Config):
    """``POST /values``."""

    samples: tuple[SampleBody, ...]


class ResetBody(Config):
    """``POST /reset``."""

    weights_uri: str | None = None


def samples_json(samples: Sequence[TrainingSample]) -> list[dict[str, Any]]:
    """What lists of :class:`SampleBody` read."""
    # Not asdict, which copies every number of every tuple: as long as a small step itself.
    return [{name: getattr(sample, name) for name in _SAMPLE_FIELDS} for sample in samples]


def batch_json(batch: TrainingBatch) -> dict[str, Any]:
    """What :class:`BatchBody` reads."""
    return {
        "samples": samples_json(batch.samples),
        "num_valid_tokens": batch.num_valid_tokens,
        "metrics": dict(batch.metrics),
        "num_rollouts": batch.num_rollouts,
    }
