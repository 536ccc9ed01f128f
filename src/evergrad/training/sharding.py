"""Several ranks share one model: FSDP2 shards it, tensor parallelism may split its layers, and each batch is dealt out.

FSDP (fully sharded data parallelism, Zhao et al. 2023, arXiv 2304.11277): each rank holds a part of every parameter, of its
gradient and of its optimizer state. Before a layer computes, its parameters are gathered from all ranks, and freed after it;
in the backward pass its gradient is added up over ranks and each keeps its part. With tensor parallelism a group of ranks
computes the same samples, each with some of the heads and of the inner width of every layer.

Ranks are numbered by the mesh ``(fsdp, tp)``: ``rank = place in fsdp · tensor_parallel + place in tp``.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from evergrad.training.checkpoint import PARTS, Checkpoint, read_checkpoint, read_state
from evergrad.training.config import TrainerConfig, TrainerError
from evergrad.training.forest import Together, TrainedTokens, deal, grow
from evergrad.training.layerwise import decoder_layers
from evergrad.training.model import ScoreForest, Scores, score_forest
from evergrad.training.parts import here, sum_of_squares
from evergrad.training.ranks import Ranks, Share
from evergrad.training.tensor_parallel import split_layers
from evergrad.transfer.worker import pick_device
from evergrad.types import EvergradError

V = TypeVar("V")

# Gathering what is both split and sharded takes two steps; torch would rather have one, and says so on every rank.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class ShardedRanks(Ranks):
    """One of ``config.ranks`` processes of this machine. All of them must make it, and then do the same in the same order."""

    _writing: Future[None] | None = None
    _of_each_head: Sequence[nn.Module] = ()

    def __init__(self, config: TrainerConfig, rank: int, meeting_place: Path, ready: Callable[[], None]) -> None:
        """
        Args:
            rank: From 0.
            meeting_place: A file that does not exist yet, the same for all; there they learn of one another.
            ready: Called when all is done that a rank can fail at by itself, before it waits there for the others.
        """
        self.rank, self.count = rank, config.ranks
        self._config = config
        cuda = pick_device(config.device).type == "cuda"
        self._device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self._device)
        elif config.threads is None:
            torch.set_num_threads(max(1, torch.get_num_threads() // config.ranks))
        if sys.platform == "linux":
            # The ranks are of one machine: nothing of them need be reachable from another.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ready()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=FileStore(str(meeting_place), config.ranks),
            rank=rank,
            world_size=config.ranks,
        )
        shape = (config.ranks // config.tensor_parallel, config.tensor_parallel)
        self._mesh: DeviceMesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("fsdp", "tp"))
        # Objects travel on the CPU also where gradients are on GPUs. Checkpoints have a group of their own, as they are
        # written while other operations go on.
        self.objects: dist.ProcessGroup = dist.new_group(backend="gloo")
        self.storage: dist.ProcessGroup = dist.new_group(backend="gloo")

    @property
    def load_device(self) -> torch.device:
        return torch.device("cpu")

    def device(self, name: str) -> torch.device:
        if name not in ("auto", self._device.type):
            raise TrainerError(f"{self._config.ranks} ranks cannot share device '{name}'", hint="use 'cpu', 'cuda' or 'auto'")
        return self._device

    def place(self, model: Any, compute_dtype: torch.dtype | None) -> ScoreForest:
        """Splits and shards the model in place.

        Raises:
            TrainerError: its layers cannot be split by ``tensor_parallel``.
        """
        if self._config.tensor_parallel > 1:
            self._of_each_head = split_layers(model, self._mesh["tp"])
        # Gradients are added up as they are kept, whatever they were computed with.
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=self._mesh["fsdp"], mp_policy=policy)
        # What is left, the embeddings and the last norm, is gathered for the whole of a pass.
        fully_shard(model, mesh=self._mesh["fsdp"], mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses divide by what the whole batch holds, so that gradients add up; FSDP would divide once more.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.score_forest = partial(score_forest, model)
        register_fsdp_forward_method(model, "score_forest")

        def score(forest: Any, *, entropies: bool = False) -> Scores:
            result: Scores = model.score_forest(forest, entropies=entropies)
            if not torch.is_grad_enabled():
                # No backward pass will free what the model itself has gathered; it would outlive the next update.
                model.reshard()
            return result

        return score

    def share(self, trained: Sequence[TrainedTokens], max_nodes: int, *, keep: Together | None = None) -> Share:
        count = self._mesh["fsdp"].size()
        shares = deal(trained, max_nodes, count, keep=keep)
        own = shares[self._mesh.get_local_rank("fsdp")]
        missing = max(map(len, shares)) - len(own)
        if not missing:
            return Share([grow(items) for items in own])
        shortest = min(trained, key=lambda item: item.positions[0])
        stand_in = grow([TrainedTokens(shortest.sample, shortest.positions[:1], shortest.num_valid)])
        return Share([grow(items) for items in own], [stand_in] * missing)

    def everyones(self, value: V) -> list[V]:
        # Ranks that split a layer between them compute the same samples: one speaks for all.
        return self.all_values(value)[:: self._config.tensor_parallel]

    def all_values(self, value: V) -> list[V]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.objects)
        return values

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            # Over all ranks, those that computed the same samples too, so that one sum reaches all to the last bit.
            dist.all_reduce(tensor)
            tensor /= self._config.tensor_parallel

    def complete_gradients(self) -> None:
        for module in self._of_each_head:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(here(parameter.grad), group=self._mesh.get_group("tp"))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """When the block raises an :class:`EvergradError` on one rank, it raises on all.

        The ranks must meet nowhere inside it.
        """
        error: EvergradError | None = None
        try:
            yield
        except EvergradError as raised:
            error = raised
        first = next((each for each in self.all_values(error) if each is not None), None)
        if first is not None:
            raise error or first

    def parameter_groups(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        # Only tensors that are spread over the same ranks can be arguments of one operation.
        groups: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            assert isinstance(parameter, DTensor)
            groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
        return list(groups.values())

    def norm(self, gradients: Iterable[Tensor]) -> float:
        parts: dict[int, list[Tensor]] = {}
        for gradient in gradients:
            parts.setdefault(self._copies(gradient), []).append(here(gradient))
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for copies, group in parts.items():
            squares += sum_of_squares(group) / copies
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def _copies(self, tensor: Tensor) -> int:
        """How many ranks hold each part of it."""
        assert isinstance(tensor, DTensor)
        mesh = tensor.device_mesh
        within = math.prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
        return within * self.count // mesh.size()

    def write_checkpoint(self, folder: Path | str, checkpoint: Checkpoint) -> Future[None]:
        from evergrad.training.sharded_checkpoint import write_parts

        self._finish_writing()
        self._writing = write_parts(folder, checkpoint, self)
        return self._writing

    def _finish_writing(self) -> None:
        """One checkpoint at a time; what became of the last one is told to who asked for it."""
        if self._writing is not None:
            wait([self._writing])

    def read_checkpoint(self, folder: Path | str, parameters: Mapping[str, Tensor]) -> Checkpoint:
        from evergrad.training.sharded_checkpoint import read_parts

        self._finish_writing()
        with self.agreed():
            state = read_state(folder)
        if state["format"] == PARTS:
            return read_parts(folder, state, parameters, self)
        with self.agreed():
            checkpoint = read_checkpoint(folder, parameters)
        return checkpoint

    def close(self) -> None:
        self._finish_writing()
        if dist.is_initialized():
            dist.destroy_process_group()


def distribute_like(parameter: Tensor, values: Tensor) -> Tensor:
    """The part of whole ``values`` that is here, as a tensor spread like ``parameter``; no rank asks another."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(values.shape, mesh, placements)
    part = values[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    part = part.to(parameter.to_local().device).contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=values.shape, stride=values.stride())
