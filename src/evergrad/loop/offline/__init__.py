"""Training on a data file: one run of one method, without environments, engines or a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evergrad.loop.offline.config import TrainConfig

if TYPE_CHECKING:
    from evergrad.loop.offline.encoder import encoder_for
    from evergrad.loop.offline.run import train

__all__ = ["TrainConfig", "encoder_for", "train"]


def __getattr__(name: str) -> Any:
    # Both load transformers or torch, which a configuration does not need.
    homes = {"encoder_for": "encoder", "train": "run"}
    if name not in homes:
        raise AttributeError(f"module 'evergrad.loop.offline' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"evergrad.loop.offline.{homes[name]}"), name)
