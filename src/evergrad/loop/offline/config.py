"""The configuration of one training run on a data file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from evergrad.config import Config, found_model, found_path, nearest
from evergrad.loop import config as loop_config
from evergrad.training import LossConfig, ScheduleConfig
from evergrad.training.data import DataConfig
from evergrad.training.sinks import SinkConfig


@dataclass(frozen=True, slots=True)
class Method:
    """How a row becomes a loss."""

    loss: str
    """A line of ``training/losses``."""
    pairs: bool
    """Whether it learns from pairs of answers."""


METHODS = {
    "sft": Method("cross_entropy", pairs=False),
    "dpo": Method("dpo", pairs=True),
    "ipo": Method("ipo", pairs=True),
    "simpo": Method("simpo", pairs=True),
}
_ELSEWHERE = "reinforcement learning and distillation learn in an environment: give the tables [environment] and [learn]"


class OptimizerSettings(loop_config.OptimizerSettings):
    """AdamW. Its learning rate is ``schedule.lr``."""

    @model_validator(mode="before")
    @classmethod
    def _no_rate(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "lr" in data:
            raise ValueError("the learning rate follows a schedule: set schedule.lr")
        return data


class TrainerSettings(loop_config.TrainerSettings):
    """What of the model is trained, and with how much of the machine."""

    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of all ranks together; torch's choice when absent. Another number gives other last bits."""
    device: str = "auto"
    """``auto`` (CUDA when there is one), ``cpu``, ``cuda``, ``cuda:1``, …"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the frozen base; what is trained, and its optimizer state, is never narrower than float32."""


class CheckpointConfig(Config):
    """When the run is saved, and what of that is kept. The last checkpoint always is."""

    every: int = Field(default=100, ge=1)
    """Steps between checkpoints; held-out data is measured at each, and the last step has one."""
    every_s: float = Field(default=300.0, gt=0)
    """Seconds after the last checkpoint at which there is one in any case, so that a kill costs no more; Ctrl-C and SIGTERM
    make one, too. Held-out data is not measured at these."""
    keep_best: int = Field(default=1, ge=0)
    """How many of those with the lowest held-out loss are kept; none without held-out data."""
    pinned: tuple[int, ...] = ()
    """Steps whose checkpoints are made and kept, whatever else happens."""


class TrainConfig(Config):
    """One training run on a data file."""

    name: str = Field(default="train", min_length=1, pattern=r"^[\w.-]+$")
    """Of the run, and of its folder under ``runs/``."""
    method: str = "sft"
    """``sft`` makes the answers likely; ``dpo``, ``ipo`` and ``simpo`` prefer one answer of a pair to the other."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the method's loss, such as ``beta`` of ``dpo``."""
    model: str = "smollm2-135m"
    """``smollm2-135m``, ``tiny``, or a local Hugging Face folder."""
    seed: int = 0
    """Of the order of the rows, the held-out share and the first LoRA weights."""
    epochs: int = Field(default=1, ge=1)
    """How often each row is trained, unless ``steps`` says when to end."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, in place of ``epochs``."""
    batch_size: int = Field(default=8, ge=1)
    """Rows in one optimizer step; an epoch's last step takes what is left."""
    data: DataConfig
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    sinks: list[SinkConfig] = Field(default_factory=list)
    """Where metrics go besides ``metrics.jsonl``."""
    price_book: str | None = None
    """Path of a TOML price book; the built-in one by default."""

    _found_model = field_validator("model")(found_model)
    _found_book = field_validator("price_book")(found_path)

    @model_validator(mode="before")
    @classmethod
    def _not_a_loop(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and ("environment" in data or "learn" in data):
            raise ValueError(f"this is no training on a data file: {_ELSEWHERE}, and no [data]")
        return data

    @model_validator(mode="after")
    def _sound(self) -> TrainConfig:
        if self.method not in METHODS:
            raise ValueError(f"unknown method '{self.method}': {nearest(self.method, METHODS)} ({_ELSEWHERE})")
        self.loss()
        if self.checkpoint.keep_best > CheckpointConfig().keep_best and not self.measured:
            raise ValueError("checkpoint.keep_best ranks by held-out loss: set data.heldout or data.heldout_file")
        return self

    @property
    def measured(self) -> bool:
        """Whether rows are held out."""
        return bool(self.data.heldout) or self.data.heldout_file is not None

    def loss(self) -> LossConfig:
        """The method's loss with its options."""
        return LossConfig(name=METHODS[self.method].loss, options=self.options)
