"""Bytes that the receiver reads out of the publisher's memory, by NIXL (https://github.com/ai-dynamo/nixl).

NIXL takes RDMA where both machines have it, else what its UCX finds: the kernel's copy between processes of one machine, TCP
between two. The publisher is asked for nothing. Where its payloads lie is written in its own memory, in a *directory* whose
address comes with the descriptor::

    descriptor ──▶ directory: {"payloads": {"7-ab12": [address, bytes]}, "agent": "…"} ──▶ the payload's bytes
                                                     NIXL's keys to all that memory

The directory is read before and after the bytes. A payload that is not in it afterwards was withdrawn meanwhile, and what was
read may be half of the next version. A directory that is read while it is written does not match its own checksum.

Unlike TCP's, this port knows no key of ours: whoever reaches it and guesses an address can read. Use it in a network of your
own.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import xxhash

from evergrad.transfer.layout import TransferError
from evergrad.transfer.shipment import Shipment

_DIRECTORY_BYTES = 1 << 16
_HEADER = struct.Struct("<QQ")
"""Of the directory: how many bytes follow, and their xxh3-64."""
_DIRECTORY_READS = 100
_PIECE = 16 << 20
_TIMEOUT_S = 30.0
"""For a piece."""
_PROBE = "probe"
_PROBE_BYTES = 64 << 20
_PROBES = 3

Span = tuple[int, int]
"""Address and number of bytes."""


class NixlOutbox:
    """Lets receivers read the memory that is offered.

    Raises:
        TransferError: NIXL is not installed, or cannot offer memory on this machine.
    """

    def __init__(self) -> None:
        # Where no hardware does it, a thread of NIXL answers those that read.
        self._agent = _open_agent("publisher", answers=True)
        self._registered: dict[Span, Any] = {}
        self._payloads: dict[str, Span] = {}
        self._directory = bytearray(_DIRECTORY_BYTES)
        self._register(memoryview(self._directory))
        # Ones: memory that only was asked for is one page of zeros again and again, and read out of the cache.
        self.offer(Shipment(0, "", ()), {_PROBE: memoryview(b"\x01" * _PROBE_BYTES)})

    @property
    def descriptor(self) -> dict[str, Any]:
        address, _ = _span(memoryview(self._directory))
        return {"transport": "nixl", "agent": self._keys(), "directory": address}

    def offer(self, shipment: Shipment, memory: Mapping[str, memoryview]) -> Shipment:
        for view in memory.values():
            self._register(view)
        self._list({**self._payloads, **{name: _span(view) for name, view in memory.items()}})
        return shipment

    def withdraw(self, names: frozenset[str]) -> None:
        self._list({name: span for name, span in self._payloads.items() if name not in names})

    def close(self) -> None:
        with suppress(Exception):
            for registration, _ in self._registered.values():
                self._agent.deregister_memory(registration)
        self._registered, self._payloads, self._agent = {}, {}, None

    def _register(self, view: memoryview) -> None:
        """Registers the whole buffer that ``view`` is of, once: with hardware this pins its pages, which takes longer than
        reading them, and a publisher writes into the same few buffers again and again."""
        whole = memoryview(view.obj)
        span = _span(whole)
        if span not in self._registered:
            with _explained("memory cannot be offered"):
                registration = self._agent.register_memory([(*span, 0, "")], mem_type="DRAM")
            self._registered[span] = (registration, whole)  # the view keeps the address ours

    def _keys(self) -> str:
        with _explained("the outbox is closed"):
            return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def _list(self, payloads: dict[str, Span]) -> None:
        content = json.dumps({"payloads": payloads, "agent": self._keys()}).encode()
        record = _HEADER.pack(len(content), xxhash.xxh3_64_intdigest(content)) + content
        if len(record) > _DIRECTORY_BYTES:
            raise TransferError(f"a directory of {len(record)} bytes has no room in {_DIRECTORY_BYTES}")
        self._directory[: len(record)] = record
        self._payloads = payloads


class NixlInbox:
    """Reads from a :class:`NixlOutbox`.

    Raises:
        TransferError: NIXL is not installed, the descriptor is malformed, or nobody answers there.
    """

    def __init__(self, descriptor: Mapping[str, Any]) -> None:
        try:
            keys, self._directory = str(descriptor["agent"]), int(descriptor["directory"])
            base64.b64decode(keys, validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"not a descriptor of a NIXL outbox: {error!r}") from error
        # Reading asks for progress itself, so it needs no thread that does.
        self._agent = _open_agent("receiver", answers=False)
        self._keys, self._peer = "", ""
        try:
            self._meet(keys)
            self.link_gb_per_s = self._measure()
        except TransferError:
            self.close()
            raise

    def fetch(self, name: str, start: int, into: memoryview) -> None:
        if not len(into):
            return
        address, size = self._find(name)
        if not 0 <= start <= start + len(into) <= size:
            raise TransferError(f"payload '{name}' has {size} bytes, {start}:{start + len(into)} were asked for")
        self._read(address + start, into)
        self._find(name)

    def close(self) -> None:
        with suppress(Exception):
            self._agent.remove_remote_agent(self._peer)
        self._agent = None

    def _meet(self, keys: str) -> None:
        with _explained("the publisher cannot be reached"):
            self._peer = self._agent.add_remote_agent(base64.b64decode(keys))
        self._keys = keys

    def _measure(self) -> float:
        """Best of a few readings, after one in which both ends make each other's acquaintance."""
        memory, best = memoryview(bytearray(_PROBE_BYTES)), float("inf")
        for number in range(1 + _PROBES):
            started = time.perf_counter()
            self.fetch(_PROBE, 0, memory)
            best = min(best, time.perf_counter() - started) if number else best
        return _PROBE_BYTES / best / 1e9

    def _find(self, name: str) -> Span:
        directory = self._read_directory()
        if directory["agent"] != self._keys:
            self._meet(directory["agent"])
        if name not in directory["payloads"]:
            raise TransferError(f"payload '{name}' is not offered (any more)", hint="ask for the newest version")
        address, size = directory["payloads"][name]
        return int(address), int(size)

    def _read_directory(self) -> dict[str, Any]:
        memory = memoryview(bytearray(_DIRECTORY_BYTES))
        for _ in range(_DIRECTORY_READS):
            self._read(self._directory, memory)
            length, digest = _HEADER.unpack_from(memory)
            content = bytes(memory[_HEADER.size : _HEADER.size + length])
            if xxhash.xxh3_64_intdigest(content) == digest:
                found: dict[str, Any] = json.loads(content)
                return found
        raise TransferError("what is there is not the publisher's directory", hint="attach to the publisher again")

    def _read(self, address: int, into: memoryview) -> None:
        here, size = _span(into)
        with _explained("the publisher cannot be reached"):
            # For this reading only: the memory may be freed after it. UCX itself remembers what it has pinned.
            registration = self._agent.register_memory([(here, size, 0, "")], mem_type="DRAM")
            try:
                for start in range(0, size, _PIECE):
                    self._read_piece(address + start, here + start, min(_PIECE, size - start))
            finally:
                self._agent.deregister_memory(registration)

    def _read_piece(self, there: int, here: int, size: int) -> None:
        agent = self._agent
        local, remote = (agent.get_xfer_descs([(at, size, 0)], mem_type="DRAM") for at in (here, there))
        handle = agent.initialize_xfer("READ", local, remote, self._peer)
        try:
            state, until = agent.transfer(handle), time.monotonic() + _TIMEOUT_S
            while state == "PROC" and time.monotonic() < until:
                time.sleep(0)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            what = f"no answer within {_TIMEOUT_S:.0f} s" if state == "PROC" else "reading its memory failed"
            raise TransferError(f"the publisher cannot be reached: {what}", hint="attach to it again")


def _span(view: memoryview) -> Span:
    return (np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes) if view.nbytes else (0, 0)


def _open_agent(role: str, *, answers: bool) -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        hint = "pip install 'evergrad[nixl]', or use transport = 'tcp'"
        raise TransferError(f"NIXL cannot be used: {error}", hint=hint) from error
    with _explained("NIXL cannot be used"):
        return nixl_agent(f"evergrad-{role}-{secrets.token_hex(8)}", nixl_agent_config(enable_prog_thread=answers))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except Exception as error:  # NIXL's own have no other base
        raise TransferError(f"{what}: {error or type(error).__name__}", hint="attach to the publisher again") from error
