"""Turns batches into new weights: losses, trainer, checkpoints, and the server that a loop talks to.

The trainer is blind to algorithms. A batch carries tokens, masks, behaviour log-probabilities and advantages; a loss is one
file in ``losses/`` and one line in its registry. What a batch repeats (prompts, shared beginnings of answers) is computed
once, exactly. Importing this room loads no torch; the trainer itself is ``evergrad.training.trainer.Trainer``.
"""

from __future__ import annotations

from evergrad.training.client import TrainerClient
from evergrad.training.config import (
    CriticConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    TrainerConfig,
    TrainerError,
    UpdatesConfig,
    require_adapter,
    require_ranks,
)
from evergrad.training.schedule import ScheduleConfig

__all__ = [
    "CriticConfig",
    "LoraConfig",
    "LossConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "TrainerClient",
    "TrainerConfig",
    "TrainerError",
    "UpdatesConfig",
    "require_adapter",
    "require_ranks",
]
