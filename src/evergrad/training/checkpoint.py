"""Checkpoints of a trainer: safetensors and JSON, whole or absent, nothing that could run code when read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from evergrad.training.config import TrainerError
from evergrad.transfer import load_tensors, whole_folder
from evergrad.transfer.files import write_safetensors

_FORMAT = 1
_STATE = "state.json"
_RNG = "rng_state"
_WEIGHT, _MOMENT, _REFERENCE, _CRITIC = "weight:", "optimizer:", "reference:", "critic:"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a trainer is, apart from what its configuration says."""

    identity: Mapping[str, Any]
    """Of the model and method; JSON values. A checkpoint loads only into a trainer with an equal one."""
    updates: int
    policy_version: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]
    """Parameter name to what the optimizer remembers of it."""
    rng_state: Tensor
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the frozen reference, where it is not the base model."""
    critic: Mapping[str, Tensor] = field(default_factory=dict)
    """The critic's weights and optimizer state, where there is one."""


def write_checkpoint(folder: Path | str, checkpoint: Checkpoint) -> None:
    """Writes ``folder``, replacing an older one in one step.

    Raises:
        TransferError: the disk refused; an older checkpoint is untouched.
    """
    tensors: dict[str, Tensor] = {f"{_WEIGHT}{name}": tensor for name, tensor in checkpoint.weights.items()}
    tensors |= {f"{_REFERENCE}{name}": tensor for name, tensor in checkpoint.reference.items()}
    tensors |= {f"{_CRITIC}{name}": tensor for name, tensor in checkpoint.critic.items()}
    for name, values in checkpoint.optimizer.items():
        tensors |= {f"{_MOMENT}{key}:{name}": value for key, value in values.items()}
    state = {
        "format": _FORMAT,
        "identity": checkpoint.identity,
        "updates": checkpoint.updates,
        "policy_version": checkpoint.policy_version,
    }
    with whole_folder(folder) as partial:
        write_safetensors(partial / "model.safetensors", [*tensors.items(), (_RNG, checkpoint.rng_state)])
        (partial / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_checkpoint(folder: Path | str) -> Checkpoint:
    """Reads what :func:`write_checkpoint` wrote.

    Raises:
        TrainerError: no checkpoint there, or one of another format.
        TransferError: its tensors are damaged.
    """
    path = Path(folder) / _STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"no readable checkpoint: {error}", where=str(folder)) from error
    if state.get("format") != _FORMAT:
        raise TrainerError(f"checkpoint format {state.get('format')!r} is not {_FORMAT}", where=str(folder))
    tensors = load_tensors(folder)
    optimizer: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        if full_name.startswith(_MOMENT):
            _, key, name = full_name.split(":", 2)
            optimizer.setdefault(name, {})[key] = tensor
    return Checkpoint(
        identity=state["identity"],
        updates=state["updates"],
        policy_version=state["policy_version"],
        weights=_under(_WEIGHT, tensors),
        optimizer=optimizer,
        rng_state=tensors[_RNG],
        reference=_under(_REFERENCE, tensors),
        critic=_under(_CRITIC, tensors),
    )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
