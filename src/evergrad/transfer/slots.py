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
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from evergrad.transfer.layout import Layout, Manifest, TransferError
from evergrad.transfer.link import Receipt, bytes_alike, memory_gb_per_s
from evergrad.transfer.proof import copying, proofs, proving, sealing, side_by_side
from evergrad.transfer.slot_memory import MappedSlot, OwnedSlot, lock, unlock, views_over

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
        self.layout = Layout.of((name, shape, dtype_name(dtype)) for name, (shape, dtype) in layout.items())
        self._slots = [OwnedSlot(self.layout.num_bytes, use_memfd) for _ in range(_NUM_SLOTS)]
        self._views = [views_over(slot.memory, self.layout) for slot in self._slots]
        self._last_slot = _NUM_SLOTS - 1
        self._writing: int | None = None
        self._began = 0.0
        self._sources: dict[str, torch.Tensor] = {}
        """What is copied at the end, all at once."""
        self._sums: dict[str, Future[str]] = {}
        """Of what lies there already."""
        self.link_gb_per_s = memory_gb_per_s(self.memory(0))
        """What copying into a slot reaches at most, measured at the start; 10⁹ bytes a second."""

    @property
    def descriptor(self) -> dict[str, Any]:
        """All a receiver on this machine needs to map the slots; JSON values."""
        return {
            "format": _FORMAT,
            "tensors": self.layout.as_dict(),
            "layout_hash": self.layout.hash,
            "slots": [{"path": slot.path, "inode": os.fstat(slot.fd).st_ino} for slot in self._slots],
            "link_gb_per_s": self.link_gb_per_s,
        }

    @property
    def slots(self) -> dict[str, Any]:
        """What :func:`map_slots` needs."""
        return self.descriptor

    @property
    def writing(self) -> int:
        """The slot between :meth:`begin` and :meth:`finish`.

        Raises:
            TransferError: none is being written.
        """
        if self._writing is None:
            raise TransferError("nothing is being written", hint="call begin() first")
        return self._writing

    def views(self, slot: int) -> dict[str, torch.Tensor]:
        """Writable tensors over the memory of ``slot``. Write only between :meth:`begin` and :meth:`finish`."""
        return self._views[slot]

    def memory(self, slot: int) -> memoryview:
        """All bytes of ``slot``, as the layout says; to be written when its views may be."""
        return memoryview(self._slots[slot].memory)

    def begin(self) -> dict[str, torch.Tensor]:
        """Locks a slot that nobody reads and returns its views, to be filled entirely before :meth:`finish`.

        Raises:
            TransferError: both slots are being read, or the last ``begin`` was neither finished nor aborted.
        """
        if self._writing is not None:
            raise TransferError("a version is already being written", hint="finish or abort it first")
        for step in range(1, _NUM_SLOTS + 1):
            slot = (self._last_slot + step) % _NUM_SLOTS
            if lock(self._slots[slot].fd, fcntl.LOCK_EX):
                self._writing, self._began, self._sources, self._sums = slot, time.perf_counter(), {}, {}
                return self._views[slot]
        raise TransferError(
            "both slots are in use by receivers", hint="bring every engine to the newest version, or detach the one left behind"
        )

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Has ``tensor`` (cast to the layout's dtype) copied to its place, by :meth:`finish` at the latest; it must not change
        before.

        Raises:
            TransferError: the layout has no such name, or another shape.
        """
        view = self._views[self.writing].get(name)
        if view is None:
            raise TransferError(f"'{name}' is not in the layout")
        if tensor.shape != view.shape:
            raise TransferError(f"'{name}' is {tuple(tensor.shape)}, the layout says {tuple(view.shape)}")
        if bytes_alike(tensor, view):
            self._sources[name] = tensor.detach()
        else:
            view.copy_(tensor.detach())
            self.written(name)

    def written(self, name: str) -> None:
        """Says that the caller has filled a view himself, so that its checksum is computed meanwhile."""
        self._sums[name] = proofs().submit(sealing(self._views[self.writing][name]).run)

    def finish(self, policy_version: int, checksums: Mapping[str, str] | None = None) -> Manifest:
        """Seals what was written since :meth:`begin` and returns its manifest.

        Args:
            checksums: By tensor, where the caller has computed them already.
        """
        slot = self.writing
        if checksums is None:
            tasks = {
                name: copying(self._sources[name], view) if name in self._sources else sealing(view)
                for name, view in self._views[slot].items()
                if name not in self._sums
            }
            sealed = side_by_side(tasks)
            checksums = {name: sealed[name] if name in sealed else self._sums[name].result() for name in self._views[slot]}
        manifest = Manifest(
            policy_version=policy_version,
            slot=slot,
            checksums=checksums,
            num_bytes=sum(tensor.num_bytes for tensor in self.layout.tensors),
            layout_hash=self.layout.hash,
            seconds=time.perf_counter() - self._began,
        )
        self._last_slot = slot
        self.abort()
        return manifest

    def abort(self) -> None:
        """Gives the slot that is being written back, unsealed. Does nothing when none is."""
        if self._writing is not None:
            wait(self._sums.values())  # nobody may write there once the lock is gone
            unlock(self._slots[self._writing].fd)
            self._writing, self._sources = None, {}

    def stage(self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> Manifest:
        """Copies ``named_tensors`` (cast to the layout's dtypes) into the slot nobody reads and seals it.

        Raises:
            TransferError: a name is unknown, missing or doubled, a shape differs, or both slots are in use. No receiver has
                been told of anything, so whatever was served still is.
        """
        self.begin()
        try:
            fill(self, named_tensors)
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

    ``prepare``, ``stage`` and ``verify`` may run while the live version serves; ``commit`` only moves a number and a lock.
    Before it, the caller must have stopped using the tensors of the version that it replaces: their memory is written next.
    """

    def __init__(self, descriptor: Mapping[str, Any]) -> None:
        """
        Raises:
            TransferError: the descriptor is malformed, or its publisher is gone.
        """
        self.layout, self._slots, self.link_gb_per_s = map_slots(descriptor)
        self._live: int | None = None
        self._prepared: Manifest | None = None
        self._verified = False
        self._verify_s = 0.0
        self.policy_version: int | None = None
        """Of the live slot; None before the first commit."""

    def prepare(self, manifest: Manifest | Mapping[str, Any]) -> None:
        """Takes hold of the slot that ``manifest`` names, so that nobody writes it.

        Raises:
            TransferError: the manifest does not cover this layout exactly, or its slot is being written again.
        """
        self.abort()
        if not isinstance(manifest, Manifest):
            manifest = Manifest.from_dict(manifest)
        if manifest.layout_hash != self.layout.hash:
            raise TransferError("the manifest is of another layout", hint="attach to the publisher that wrote it")
        names = {tensor.name for tensor in self.layout.tensors}
        if manifest.checksums.keys() != names:
            odd = sorted(names ^ manifest.checksums.keys())
            raise TransferError(f"the manifest does not cover the layout: {len(odd)} names differ, first '{odd[0]}'")
        if not 0 <= manifest.slot < len(self._slots):
            raise TransferError(f"there is no slot {manifest.slot}")
        if manifest.slot != self._live and not lock(self._slots[manifest.slot].fd, fcntl.LOCK_SH):
            raise TransferError("the slot is being written again", hint="ask for the newest manifest")
        self._prepared = manifest

    def stage(self) -> None:
        """Nothing is left to do: what the publisher wrote lies in the slot already."""

    def verify(self) -> None:
        """Compares every tensor of the prepared slot with its checksum, and looks at its values; the slot is given back when
        one does not pass.

        Raises:
            TransferError: bytes differ (the version was replaced meanwhile, or memory is damaged), a value is not finite, or
                nothing is prepared.
        """
        manifest, started = self._require_prepared(), time.perf_counter()
        tasks = {name: proving(view) for name, view in self._slots[manifest.slot].views.items()}
        for name, (found, finite) in side_by_side(tasks).items():
            if found != manifest.checksums[name]:
                self.abort()
                raise TransferError(f"'{name}' does not match its checksum", hint="publish again; the old version stays")
            if not finite:
                self.abort()
                raise TransferError(f"'{name}' has values that are not finite", hint="the old version stays")
        self._verify_s = time.perf_counter() - started
        self._verified = True

    def vouch(self) -> None:
        """Counts the prepared version as verified, for who has written it in this process and computed its checksums.

        Raises:
            TransferError: nothing is prepared.
        """
        self._require_prepared()
        self._verified = True

    def receipt(self) -> Receipt:
        """Of the prepared version, from the publisher's first byte to the checksums here.

        Raises:
            TransferError: nothing is prepared.
        """
        manifest = self._require_prepared()
        return Receipt("identity", manifest.num_bytes, manifest.seconds + self._verify_s, self.link_gb_per_s)

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
            unlock(self._slots[self._live].fd)
        self._live, self.policy_version = manifest.slot, manifest.policy_version
        self._prepared, self._verified = None, False

    def abort(self) -> None:
        """Gives a prepared slot back; the live version is untouched. Does nothing when none is prepared."""
        if self._prepared is not None and self._prepared.slot != self._live:
            unlock(self._slots[self._prepared.slot].fd)
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


def map_slots(descriptor: Mapping[str, Any], *, writable: bool = False) -> tuple[Layout, list[MappedSlot], float]:
    """The slots of a publisher of this machine, with their layout and what copying into one reaches at most, in 10⁹ bytes a
    second.

    Raises:
        TransferError: the descriptor is malformed, or its publisher is gone.
    """
    try:
        if descriptor["format"] != _FORMAT:
            raise TransferError(f"slot format {descriptor['format']!r} is not {_FORMAT}")
        layout = Layout.from_dict(descriptor["tensors"])
        if layout.hash != descriptor["layout_hash"]:
            raise TransferError("the layout does not match its hash")
        places = [(str(slot["path"]), int(slot["inode"])) for slot in descriptor["slots"]]
        link_gb_per_s = float(descriptor["link_gb_per_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"not a slot descriptor: {error!r}") from error
    mapped: list[MappedSlot] = []
    try:
        for path, inode in places:
            mapped.append(MappedSlot(path, inode, layout, writable))
    except TransferError:
        for slot in mapped:
            slot.close()
        raise
    return layout, mapped, link_gb_per_s


class _Writable(Protocol):
    @property
    def layout(self) -> Layout: ...

    def write(self, name: str, tensor: torch.Tensor) -> None: ...


def fill(publisher: _Writable, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Has each tensor written, between ``begin`` and ``finish``.

    Raises:
        TransferError: a name is unknown, missing or doubled, or a shape differs.
    """
    missing = dict.fromkeys(spec.name for spec in publisher.layout.tensors)
    count = len(missing)
    for name, tensor in named_tensors:
        publisher.write(name, tensor)
        if name not in missing:
            raise TransferError(f"'{name}' is doubled")
        del missing[name]
    if missing:
        raise TransferError(f"{len(missing)} of {count} tensors missing, first '{next(iter(missing))}'")


def dtype_name(dtype: torch.dtype | str) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
