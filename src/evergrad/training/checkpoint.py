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

WHOLE, PARTS = 1, 2
"""Formats: of one process, in one file of whole tensors; of several ranks, in a file of parts each."""

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
    with whole_folder(folder) as partial:
        write_safetensors(partial / "model.safetensors", tensors_of(checkpoint).items())
        write_state(partial, checkpoint, {"format": WHOLE})


def write_state(folder: Path, checkpoint: Checkpoint, fields: Mapping[str, Any]) -> None:
    """Writes what is no tensor, and ``fields``."""
    state = {
        **fields,
        "identity": checkpoint.identity,
        "updates": checkpoint.updates,
        "policy_version": checkpoint.policy_version,
    }
    (folder / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(folder: Path | str) -> dict[str, Any]:
    """What is no tensor.

    Raises:
        TrainerError: no checkpoint there, or one of another format.
    """
    path = Path(folder) / _STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"no readable checkpoint: {error}", where=str(folder)) from error
    if state.get("format") not in (WHOLE, PARTS):
        raise TrainerError(f"checkpoint format {state.get('format')!r} is not {WHOLE} or {PARTS}", where=str(folder))
    return state


def read_checkpoint(folder: Path | str, parameters: Mapping[str, Tensor]) -> Checkpoint:
    """Reads what :func:`write_checkpoint` wrote, or the ranks of ``sharded_checkpoint``, in one process.

    Args:
        parameters: Of the model that goes on from it, by name; not touched.

    Raises:
        TrainerError: no checkpoint there, or one of another format.
        TransferError: its tensors are damaged.
    """
    state = read_state(folder)
    if state["format"] == WHOLE:
        return checkpoint_of(state, load_tensors(folder))
    from evergrad.training.sharded_checkpoint import read_parts  # its library takes a second to import

    return read_parts(folder, state, parameters)


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors under one name each."""
    tensors = {f"{_WEIGHT}{name}": tensor for name, tensor in checkpoint.weights.items()}
    tensors |= {f"{_REFERENCE}{name}": tensor for name, tensor in checkpoint.reference.items()}
    tensors |= {f"{_CRITIC}{name}": tensor for name, tensor in checkpoint.critic.items()}
    for name, values in checkpoint.optimizer.items():
        tensors |= {f"{_MOMENT}{key}:{name}": value for key, value in values.items()}
    return {**tensors, _RNG: checkpoint.rng_state}


def parameter_of(name: str) -> str:
    """The parameter that a name of :func:`tensors_of` is about; empty for the random state."""
    return name.split(":", 2)[-1] if name.startswith(_MOMENT) else name.partition(":")[2]


def checkpoint_of(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Takes apart what :func:`tensors_of` and :func:`read_state` gave."""
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
