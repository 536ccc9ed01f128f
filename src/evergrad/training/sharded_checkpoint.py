"""Checkpoints of several ranks: each writes its parts, and any number of ranks reads them (torch.distributed.checkpoint).

The folder holds a safetensors file for each rank and ``state.json``, which carries a checksum of every file. It is filled under
another name and appears by a rename after the last rank has written, so it is whole or absent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from evergrad.training.checkpoint import PARTS, Checkpoint, checkpoint_of, parameter_of, tensors_of, write_state
from evergrad.transfer import TransferError, whole_folder

if TYPE_CHECKING:
    from evergrad.training.sharding import ShardedRanks

_CHUNK = 2**24


def write_parts(folder: Path | str, checkpoint: Checkpoint, ranks: ShardedRanks) -> Future[None]:
    """Writes ``folder``, replacing an older one in one step; every rank calls it.

    Returns when what is written has been copied aside, so that training can go on; the future of the first rank ends when
    the folder is there, those of the others when their part is written.

    Raises:
        TransferError: the disk refused one of the ranks, at once on all of them or in the future of the first; an older
            checkpoint is untouched.
    """
    tensors = tensors_of(checkpoint)
    # A tensor without a dimension, such as the optimizer's count of steps, cannot be read in slices, as others are.
    scalars = [name for name, tensor in tensors.items() if tensor.ndim == 0]
    tensors |= {name: tensors[name].reshape(1) for name in scalars}
    opened = ExitStack()
    partial: Path | None = None
    with ranks.agreed():
        if ranks.rank == 0:
            partial = opened.enter_context(whole_folder(folder))
    shared = ranks.all_values(partial)[0]
    assert shared is not None
    writer = HuggingFaceStorageWriter(str(shared), save_distributed=True)
    parts = async_save(tensors, storage_writer=writer, process_group=ranks.storage)
    assert isinstance(parts, Future)

    def finish() -> None:
        with opened, _reported(folder, "could not write"):
            parts.result()  # of the first rank: when the last has written
            if ranks.rank == 0:
                checksums = {path.name: _checksum(path) for path in sorted(shared.glob("*.safetensors"))}
                write_state(shared, checkpoint, {"format": PARTS, "scalars": scalars, "xxh3": checksums})

    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    finished = executor.submit(finish)
    executor.shutdown(wait=False)
    return finished


def read_parts(
    folder: Path | str, state: Mapping[str, Any], parameters: Mapping[str, Tensor], ranks: ShardedRanks | None = None
) -> Checkpoint:
    """Reads what :func:`write_parts` wrote; every one of ``ranks`` calls it, whatever number wrote it.

    Args:
        state: Of ``checkpoint.read_state``.
        parameters: Each rank reads what it holds of them; not touched.

    Raises:
        TransferError: a file is missing or damaged; raised on all ranks.
    """
    if ranks is None:
        _verify(Path(folder), sorted(state["xxh3"].items()))
    else:
        with ranks.agreed():
            _verify(Path(folder), sorted(state["xxh3"].items())[ranks.rank :: ranks.count])
    reader = HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, entry in found.items():
        size, dtype = entry.size, entry.properties.dtype  # type: ignore[union-attr]
        parameter = parameters.get(parameter_of(name))
        spread = parameter is not None and parameter.shape == size
        tensors[name] = torch.empty_like(parameter, dtype=dtype) if spread else torch.empty(size, dtype=dtype)  # type: ignore[arg-type]
    with _reported(folder, "unreadable checkpoint"):
        load(tensors, storage_reader=reader, process_group=ranks and ranks.storage, no_dist=ranks is None)
    tensors |= {name: tensors[name].reshape(()) for name in state["scalars"]}
    return checkpoint_of(state, {name: tensor.detach() for name, tensor in tensors.items()})


@contextmanager
def _reported(folder: Path | str, what: str) -> Iterator[None]:
    """Says of a checkpoint that failed on any rank why it did; the library's own error is no Exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a single process, which reads alone on purpose
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise TransferError(f"{what}: rank {rank}: {cause}", where=str(folder)) from error
    except RuntimeError as error:
        raise TransferError(f"{what}: the ranks lost one another: {error}", where=str(folder)) from error


def _verify(folder: Path, checksums: list[tuple[str, str]]) -> None:
    for name, expected in checksums:
        path = folder / name
        if not path.is_file() or _checksum(path) != expected:
            missing = "is missing" if not path.is_file() else "does not match its checksum"
            raise TransferError(f"a part of the checkpoint {missing}", where=str(path), hint="load an earlier checkpoint")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
