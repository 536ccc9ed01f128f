"""The seam between a trainer and the ranks that share its model. Alone, it has nothing to share: that is :class:`Ranks`.

``sharding.ShardedRanks`` is the other implementation. It is imported only where a configuration asks for several ranks, so
that one process pays nothing for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from evergrad.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from evergrad.training.config import TrainerConfig, TrainerError
from evergrad.training.forest import Forest, Together, TrainedTokens, plant
from evergrad.training.layerwise import decoder_layers, rounded
from evergrad.training.model import ScoreForest, score_forest
from evergrad.training.parts import sum_of_squares
from evergrad.transfer.worker import pick_device

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")


class RanksLost(TrainerError):
    """A rank died, and with it this trainer: what the others hold is no model any more."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of a batch."""

    forests: Sequence[Forest]
    idle: Sequence[Forest] = ()
    """Stand-ins, to be computed and not counted. A forward or backward pass gathers each layer's weights from all ranks, so a
    rank that has fewer micro-batches than another must go through as many passes, or the others would wait for it forever."""


class Ranks:
    """One process that holds the whole model and computes whole batches."""

    rank = 0

    def starting(self) -> AbstractContextManager[None]:
        """The construction of the trainer: when it fails, no other rank stays behind."""
        return nullcontext()

    def calling(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> AbstractContextManager[None]:
        """One operation of the trainer, which every rank has to do.

        Raises:
            RanksLost: a rank died before or meanwhile.
        """
        return nullcontext()

    def device(self, name: str) -> torch.device:
        """The device that the configuration calls ``name``, for this rank."""
        return pick_device(name)

    @property
    def load_device(self) -> torch.device | None:
        """Where the whole model is loaded and checked before :meth:`place`, as no GPU may have room for it; None: there."""
        return None

    def place(self, model: Any, compute_dtype: torch.dtype | None) -> ScoreForest:
        """Puts this rank's part of the model where it belongs; returns what scores a forest with it.

        Args:
            compute_dtype: What weights are rounded to when they are used; None for as they are.
        """
        score: ScoreForest = functools.partial(score_forest, model)
        if compute_dtype is None:
            return score
        layers = decoder_layers(model)
        for layer in layers:
            layer.forward = rounded(layer, layer.forward, compute_dtype)
        return rounded(model, score, compute_dtype, but=layers)

    def share(self, trained: Sequence[TrainedTokens], max_nodes: int, *, keep: Together | None = None) -> Share:
        """This rank's micro-batches of what is trained; see ``forest.plant``."""
        return Share(plant(trained, max_nodes, keep=keep))

    def everyones(self, value: V) -> list[V]:
        """What each share of the batch gave, on every rank, in the order of the ranks."""
        return [value]

    def all_values(self, value: V) -> list[V]:
        """What each rank gave, on every rank, in order."""
        return [value]

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Adds up, in place, what each share of the batch gave; the sums are the same on every rank."""

    def complete_gradients(self) -> None:
        """Adds up what each rank has only a part of so far; once, after the last backward pass of an update."""

    def parameter_groups(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Parameters, or their gradients, that one call of an optimizer or norm can take."""
        return [list(parameters)]

    def norm(self, gradients: Iterable[Tensor]) -> float:
        """L2 norm of the whole gradient."""
        return float(sum_of_squares(gradients).sqrt())

    def write_checkpoint(self, folder: Path | str, checkpoint: Checkpoint) -> Future[None]:
        """Writes ``folder`` whole or not at all; see ``checkpoint.write_checkpoint``.

        On return the checkpoint holds what it holds, and training may go on; the future ends when the folder is there. One
        process alone is done on return.
        """
        write_checkpoint(folder, checkpoint)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_checkpoint(self, folder: Path | str, parameters: Mapping[str, Tensor]) -> Checkpoint:
        """Reads a checkpoint of any number of ranks; its tensors are whole, or the parts of ``parameters`` that are here."""
        return read_checkpoint(folder, parameters)

    def watch(self, on_loss: Callable[[RanksLost], None]) -> None:
        """Calls ``on_loss`` once, from another thread, when a rank has died."""

    def close(self) -> None:
        """Ends the other ranks."""


class _HasRanks(Protocol):
    _ranks: Ranks


T = TypeVar("T", bound=_HasRanks)


def on_all_ranks(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Marks an operation of the trainer that gathers or changes what the ranks hold: called on the first, done by all."""

    @functools.wraps(method)
    def call(self: T, /, *arguments: P.args, **named: P.kwargs) -> R:
        with self._ranks.calling(method.__name__, arguments, named):
            return method(self, *arguments, **named)

    return call


def start_ranks(config: TrainerConfig) -> Ranks:
    """This process alone, or with the other ranks that ``config`` asks for, which it starts.

    Raises:
        TrainerError: they cannot be started here.
    """
    if config.ranks == 1:
        return Ranks()
    from evergrad.training.leader import Leader

    return Leader(config)
