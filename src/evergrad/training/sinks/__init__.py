"""Where the figures of a run go while it runs: one file and one line below for each place.

``metrics.jsonl`` in the run folder is always written. The others show the same figures elsewhere; each imports its package only
when it is used, and says how to install it when it is not there. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from evergrad.config import Config, nearest
from evergrad.training.sinks.base import RunInfo, Sink, SinkError, Writer
from evergrad.training.sinks.fan import SinkFan
from evergrad.training.sinks.jsonl import Jsonl
from evergrad.training.sinks.mlflow import Mlflow
from evergrad.training.sinks.tensorboard import TensorBoard
from evergrad.training.sinks.trackio import Trackio
from evergrad.training.sinks.wandb import Wandb

__all__ = ["SINKS", "RunInfo", "Sink", "SinkConfig", "SinkError", "SinkFan", "Writer", "build_sink"]

SINKS: dict[str, type[Sink]] = {
    "jsonl": Jsonl,
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}


class SinkConfig(Config):
    """One more place for the figures.

    >>> SinkConfig(name="wandb", options={"project": "support"}).build().mode
    'offline'
    """

    name: str
    """A line of ``training/sinks``: ``tensorboard``, ``wandb``, ``mlflow``, ``trackio`` or ``jsonl``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The sink's own fields."""

    @model_validator(mode="after")
    def _known(self) -> SinkConfig:
        self.build()
        return self

    def build(self) -> Sink:
        """The sink itself.

        Raises:
            ValueError: no such sink or option; names the nearest.
        """
        return build_sink(self.name, self.options)


def build_sink(name: str, options: Mapping[str, Any]) -> Sink:
    """The sink of that name; its package is not looked for yet.

    Raises:
        ValueError: no such sink or option (with the nearest), or a value that does not fit.
    """
    if name not in SINKS:
        raise ValueError(f"unknown sink '{name}': {nearest(name, SINKS)}")
    sink = SINKS[name]
    for option in options:
        if option not in sink.model_fields:
            valid = nearest(option, sink.model_fields) if sink.model_fields else "it has none"
            raise ValueError(f"unknown option '{option}' of sink '{name}': {valid}")
    try:
        return sink.model_validate(dict(options))
    except ValidationError as error:
        raise ValueError(f"sink '{name}': {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from error
