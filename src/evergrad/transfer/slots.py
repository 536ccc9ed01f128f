"""Two slots of shared memory: one is read while the other is written.

The walk of one version::

    publisher.begin() ── writes the slot nobody reads ──▶ publisher.finish(version) ──Manifest──▶ receiver.prepare
    receiver.verify() ── checksums of every tensor ──▶ receiver.tensors() ──▶ (token boundary) receiver.commit()

Who may touch a slot is decided by file locks on it, which the kernel drops when a process dies: a receiver holds a shared
lock on the slot it serves or checks, a publisher an exclusive one on the slot it writes. So no order of messages, lost or
late, lets a writer into memory that is being read. The memory itself has no name (memfd) and is gone with its last user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash

from evergrad.transfer.files import tensor_bytes
from evergrad.transfer.layout import Layout, Manifest, TensorSpec, TransferError

_FORMAT = 1
_NUM_SLOTS = 2


class SlotPublisher:
    """Owns two slots that hold tensors of one fixed layout.

    >>> with SlotPublisher({"w": ((2,), torch.float32)}) as publisher, SlotReceiver(publisher.descriptor) as receiver:
    ...     receiver.accept(publisher.stage([("w", torch.tensor([1.0, 2.0]))], policy_version=1))
    ...     receiver.policy_version, receiver.tensors()["w"].tolist()
    (1, [1.0, 2.0])
    """

    def __init__(self, layout: Mapping[str, tuple[Sequence[int], torch.dtype | str]], *, use_memfd: bool = True) -> None:
        """
        Args:
            layout: Tensor name to shape and dtype, in the order they will lie in the slot.
            use_memfd: False puts the slots in unlinked-at-close temporary files, as on systems without memfd.

        Raises:
            TransferError: an empty layout, a dtype that cannot travel, or no memory for two slots.
        """
        self.layout = Layout.of((name, shape, _dtype_name(dtype)) for name, (shape, dtype) in layout.items())
        self._slots = [_OwnedSlot(self.layout.num_bytes, use_memfd) for _ in range(_NUM_SLOTS)]
        self._views = [_views(slot.memory, self.layout) for slot in self._slots]
        self._last_slot = _NUM_SLOTS - 1
        self._writing: int | None = None

    @property
    def descriptor(self) -> dict[str, Any]:
        """All a receiver on this machine needs to map the slots; JSON values."""
        return {
            "format": _FORMAT,
            "tensors": self.layout.as_dict(),
            "layout_hash": self.layout.hash,
            "slots": [{"path": slot.path, "inode": os.fstat(slot.fd).st_ino} for slot in self._slots],
        }

    def views(self, slot: int) -> dict[str, torch.Tensor]:
        """Writable tensors over the memory of ``slot``. Write only between :meth:`begin` and :meth:`finish`."""
        return self._views[slot]

    def begin(self) -> dict[str, torch.Tensor]:
        """Locks a slot that nobody reads and returns its views, to be filled entirely before :meth:`finish`.

        Raises:
            TransferError: both slots are being read, or the last ``begin`` was neither finished nor aborted.
        """
        if self._writing is not None:
            raise TransferError("a version is already being written", hint="finish or abort it first")
        for step in range(1, _NUM_SLOTS + 1):
            slot = (self._last_slot + step) % _NUM_SLOTS
            if _lock(self._slots[slot].fd, fcntl.LOCK_EX):
                self._writing = slot
                return self._views[slot]
        raise TransferError(
            "both slots are in use by receivers", hint="bring every engine to the newest version, or detach the one left behind"
        )

    def finish(self, policy_version: int) -> Manifest:
        """Seals what was written since :meth:`begin` and returns its manifest."""
        if self._writing is None:
            raise TransferError("nothing is being written", hint="call begin() first")
        slot = self._writing
        manifest = Manifest(
            policy_version=policy_version,
            slot=slot,
            checksums={name: _checksum(view) for name, view in self._views[slot].items()},
            num_bytes=sum(tensor.num_bytes for tensor in self.layout.tensors),
            layout_hash=self.layout.hash,
        )
        self._last_slot = slot
        self.abort()
        return manifest

    def abort(self) -> None:
        """Gives the slot that is being written back, unsealed. Does nothing when none is."""
        if self._writing is not None:
            _unlock(self._slots[self._writing].fd)
            self._writing = None

    def stage(self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> Manifest:
        """Copies ``named_tensors`` (cast to the layout's dtypes) into the slot nobody reads and seals it.

        Raises:
            TransferError: a name is unknown, missing or doubled, a shape differs, or both slots are in use. No receiver has
                been told of anything, so whatever was served still is.
        """
        views = self.begin()
        try:
            missing = dict.fromkeys(views)
            for name, tensor in named_tensors:
                if name not in missing:
                    raise TransferError(f"'{name}' is {'doubled' if name in views else 'not in the layout'}")
                if tensor.shape != views[name].shape:
                    raise TransferError(f"'{name}' is {tuple(tensor.shape)}, the layout says {tuple(views[name].shape)}")
                views[name].copy_(tensor.detach())
                del missing[name]
            if missing:
                raise TransferError(f"{len(missing)} of {len(views)} tensors missing, first '{next(iter(missing))}'")
            return self.finish(policy_version)
        finally:
            self.abort()

    def close(self) -> None:
        """Gives the memory up; receivers keep what they have mapped."""
        self._views = []
        for slot in self._slots:
            slot.close()
        self._slots = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SlotReceiver:
    """Maps a publisher's slots, read-only, and decides which of them is live.

    ``prepare`` and ``verify`` may run while the live version serves; ``commit`` only moves a number and a lock. Before it,
    the caller must have stopped using the tensors of the version that it replaces: their memory is written next.
    """

    def __init__(self, descriptor: Mapping[str, Any]) -> None:
        """
        Raises:
            TransferError: the descriptor is malformed, or its publisher is gone.
        """
        try:
            if descriptor["format"] != _FORMAT:
                raise TransferError(f"slot format {descriptor['format']!r} is not {_FORMAT}")
            self.layout = Layout.from_dict(descriptor["tensors"])
            if self.layout.hash != descriptor["layout_hash"]:
                raise TransferError("the layout does not match its hash")
            places = [(str(slot["path"]), int(slot["inode"])) for slot in descriptor["slots"]]
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"not a slot descriptor: {error!r}") from error
        self._slots: list[_MappedSlot] = []
        try:
            for path, inode in places:
                self._slots.append(_MappedSlot(path, inode, self.layout))
        except TransferError:
            self.close()
            raise
        self._live: int | None = None
        self._prepared: Manifest | None = None
        self._verified = False
        self.policy_version: int | None = None
        """Of the live slot; None before the first commit."""

    def prepare(self, manifest: Manifest) -> None:
        """Takes hold of the slot that ``manifest`` names, so that nobody writes it.

        Raises:
            TransferError: the manifest does not cover this layout exactly, or its slot is being written again.
        """
        self.abort()
        if manifest.layout_hash != self.layout.hash:
            raise TransferError("the manifest is of another layout", hint="attach to the publisher that wrote it")
        names = {tensor.name for tensor in self.layout.tensors}
        if manifest.checksums.keys() != names:
            odd = sorted(names ^ manifest.checksums.keys())
            raise TransferError(f"the manifest does not cover the layout: {len(odd)} names differ, first '{odd[0]}'")
        if not 0 <= manifest.slot < len(self._slots):
            raise TransferError(f"there is no slot {manifest.slot}")
        if manifest.slot != self._live and not _lock(self._slots[manifest.slot].fd, fcntl.LOCK_SH):
            raise TransferError("the slot is being written again", hint="ask for the newest manifest")
        self._prepared = manifest

    def verify(self) -> None:
        """Compares every tensor of the prepared slot with its checksum; on a difference the slot is given back.

        Raises:
            TransferError: bytes differ (the version was replaced meanwhile, or memory is damaged), or nothing is prepared.
        """
        manifest = self._require_prepared()
        for name, tensor in self._slots[manifest.slot].views.items():
            if _checksum(tensor) != manifest.checksums[name]:
                self.abort()
                raise TransferError(f"'{name}' does not match its checksum", hint="publish again; the old version stays")
        self._verified = True

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views, without a copy, of the prepared version, else of the live one. They are read-only memory: writing faults.

        Raises:
            TransferError: there is neither.
        """
        slot = self._prepared.slot if self._prepared is not None else self._live
        if slot is None:
            raise TransferError("no version has been received", hint="prepare a manifest first")
        return self._slots[slot].views

    def commit(self) -> None:
        """Makes the verified version live and lets the publisher have the other slot.

        Raises:
            TransferError: nothing is prepared, or it was not verified.
        """
        manifest = self._require_prepared()
        if not self._verified:
            raise TransferError("the prepared version was not verified", hint="call verify() first")
        if self._live is not None and self._live != manifest.slot:
            _unlock(self._slots[self._live].fd)
        self._live, self.policy_version = manifest.slot, manifest.policy_version
        self._prepared, self._verified = None, False

    def abort(self) -> None:
        """Gives a prepared slot back; the live version is untouched. Does nothing when none is prepared."""
        if self._prepared is not None and self._prepared.slot != self._live:
            _unlock(self._slots[self._prepared.slot].fd)
        self._prepared, self._verified = None, False

    def accept(self, manifest: Manifest) -> None:
        """``prepare``, ``verify`` and ``commit`` in one, for callers without a token boundary to wait for."""
        self.prepare(manifest)
        self.verify()
        self.commit()

    def close(self) -> None:
        """Lets go of the slots. Tensors that were handed out stay valid as long as they are referenced."""
        for slot in self._slots:
            slot.close()
        self._slots = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _require_prepared(self) -> Manifest:
        if self._prepared is None:
            raise TransferError("no version is prepared", hint="call prepare(manifest) first")
        return self._prepared


class _OwnedSlot:
    """Memory without a name (memfd), or a temporary file where the system has none."""

    def __init__(self, num_bytes: int, use_memfd: bool) -> None:
        self._file: Path | None = None
        if use_memfd and hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("evergrad-slot")
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        else:
            self.fd, self.path = tempfile.mkstemp(prefix="evergrad-slot-")
            self._file = Path(self.path)
        try:
            # Reserves the pages now: a machine without room says so here, not by a bus error in the middle of a write.
            os.posix_fallocate(self.fd, 0, num_bytes)
            self.memory = mmap.mmap(self.fd, num_bytes)
        except OSError as error:
            self.close()
            raise TransferError(
                f"no room for a slot of {num_bytes / 2**20:.0f} MiB: {error.strerror}",
                hint="free memory, or use the file transport",
            ) from error

    def close(self) -> None:
        # The mapping goes when the last tensor over it does.
        os.close(self.fd)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


@dataclass
class _MappedSlot:
    path: str
    inode: int
    layout: Layout

    def __post_init__(self) -> None:
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"the publisher's slot is gone: {error.strerror}", where=self.path) from error
        status = os.fstat(self.fd)
        # A process id can be reused; the inode and size say whether this is still the same memory.
        if status.st_ino != self.inode or status.st_size < self.layout.num_bytes:
            os.close(self.fd)
            raise TransferError("what is there is not the publisher's slot", where=self.path)
        self.views = _views(mmap.mmap(self.fd, self.layout.num_bytes, prot=mmap.PROT_READ), self.layout)

    def close(self) -> None:
        self.views = {}
        os.close(self.fd)


def _views(memory: mmap.mmap, layout: Layout) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        # Torch warns of read-only buffers; here that is the point.
        warnings.simplefilter("ignore", UserWarning)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    return {spec.name: _view(whole, spec) for spec in layout.tensors}


def _view(whole: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    part = whole[spec.offset : spec.offset + spec.num_bytes]
    return part.view(getattr(torch, spec.dtype)).view(spec.shape)


def _checksum(tensor: torch.Tensor) -> str:
    return str(xxhash.xxh3_64_hexdigest(tensor_bytes(tensor))) if tensor.numel() else ""


def _dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
