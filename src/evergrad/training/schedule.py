"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from evergrad.config import Config


class ScheduleConfig(Config):
    """The learning rate over the run: up over ``warmup_steps``, then down to ``final_share`` of it by the last step."""

    lr: float = Field(default=2e-4, gt=0)
    """The highest; for LoRA. Training all weights takes about a tenth of it, preferences about a tenth again."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which it rises to ``lr``. Adam's first step moves every weight by the whole rate, whatever its gradient."""
    shape: Literal["constant", "linear", "cosine"] = "cosine"
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of ``lr`` at the last step of a linear or cosine schedule; 0 is reached just after it, so that no step is for
    nothing."""

    def at(self, step: int, steps: int) -> float:
        """Learning rate of a step, counted from 0, of ``steps`` in all.

        >>> [round(ScheduleConfig(lr=0.4, warmup_steps=1, shape="linear").at(step, 5), 2) for step in range(5)]
        [0.2, 0.4, 0.3, 0.2, 0.1]
        >>> [round(ScheduleConfig(lr=0.4, shape="linear", final_share=0.5).at(step, 5), 2) for step in range(5)]
        [0.4, 0.35, 0.3, 0.25, 0.2]
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        last = steps - 1 if self.final_share else steps
        done = (step - self.warmup_steps) / max(1, last - self.warmup_steps)
        fallen = {"constant": 0.0, "linear": done, "cosine": 0.5 * (1.0 - math.cos(math.pi * done))}[self.shape]
        return self.lr * (1.0 - (1.0 - self.final_share) * fallen)
