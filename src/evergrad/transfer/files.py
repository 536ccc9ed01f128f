"""Tensors in files: safetensors folders in Hugging Face layout that are whole or absent."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from evergrad.transfer.layout import TransferError

_CHECKSUM_KEY = "xxh3"
_WEIGHT_FILES = ("model.safetensors", "adapter_model.safetensors")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def whole_folder(folder: Path | str) -> Iterator[Path]:
    """A folder to fill that becomes ``folder`` when the block ends well, and vanishes when it does not.

    Everything is flushed to disk before the rename. An existing ``folder`` is replaced in one step and lost only then; what
    earlier writers left behind when they were killed is removed.

    Raises:
        TransferError: the disk refused (full, read-only, …); ``folder`` is as it was.
    """
    target = Path(folder).absolute()
    partial = target.parent / f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        partial.mkdir()
        yield partial
        for path in sorted(partial.rglob("*")):
            _flush(path)
        _flush(partial)
        _put_in_place(partial, target)
        _flush(target.parent)
    except OSError as error:
        raise TransferError(f"could not write: {error.strerror or error}", where=str(target), hint=_disk_hint(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_tensors(
    folder: Path | str, named: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str] | None = None
) -> Path:
    """Writes ``named`` as ``folder/model.safetensors``, whole or not at all; returns ``folder``.

    Raises:
        TransferError: the disk refused, or a name came twice.
    """
    with whole_folder(folder) as partial:
        write_safetensors(partial / _WEIGHT_FILES[0], named, metadata)
    return Path(folder)


def write_safetensors(path: Path, named: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str] | None = None) -> None:
    """One safetensors file with a checksum of names and bytes in its header. Call it inside :func:`whole_folder`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if name in tensors:
            raise TransferError("the same tensor name twice", where=name)
        tensors[name] = tensor.detach().cpu().contiguous()
    header = {**(metadata or {}), "format": "pt", _CHECKSUM_KEY: _checksum(tensors)}
    try:
        save_file(tensors, path, metadata=header)
    except SafetensorError as error:
        # The library reports a full disk as text; to callers it is what it is.
        raise OSError(errno.EIO, str(error)) from error


def load_tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder (one file, or shards with an index) or a PEFT adapter folder.

    Raises:
        TransferError: nothing there, a truncated file, a shard that is missing, or bytes that do not match their checksum.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_paths(Path(folder)):
        try:
            with safe_open(path, framework="pt") as file:
                part = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                expected = (file.metadata() or {}).get(_CHECKSUM_KEY)
        except (SafetensorError, OSError) as error:
            raise TransferError(
                f"unreadable weights: {error}", where=str(path), hint="the file is truncated or damaged"
            ) from error
        if expected is not None and _checksum(part) != expected:
            raise TransferError("the weights do not match their checksum", where=str(path), hint="the file is damaged")
        tensors.update(part)
    return tensors


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(name.encode())
        if tensors[name].numel():
            digest.update(tensor_bytes(tensors[name]))
    return str(digest.hexdigest())


def _weight_paths(folder: Path) -> list[Path]:
    for name in _WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise TransferError("no weights here", where=str(folder), hint=f"expected {' or '.join(_WEIGHT_FILES)}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise TransferError(f"unreadable index: {error!r}", where=str(index)) from error
    return [folder / shard for shard in shards]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, target: Path) -> None:
    try:
        os.rename(partial, target)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_AT_FDCWD, bytes(partial), _AT_FDCWD, bytes(target), _RENAME_EXCHANGE) == 0:
        return  # ``partial`` now names the old folder, which the caller removes
    aside = partial.with_name(f"{partial.name}-old")
    os.rename(target, aside)
    os.rename(partial, target)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    pattern = re.compile(rf"^\.{re.escape(target.name)}\.partial-(\d+)-[0-9a-f]+(-old)?$")
    for path in target.parent.iterdir():
        match = pattern.match(path.name)
        if match and not _alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _disk_hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "space" in str(error) or "large" in str(error):
        return "free disk space and try again; what was there before is untouched"
    return "check the folder's permissions; what was there before is untouched"
