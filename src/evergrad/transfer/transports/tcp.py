"""Bytes over several TCP connections at once.

The receiver connects. Each connection asks for one range of one payload in a line of JSON, with the key that the descriptor
carries, and is answered ``+`` and the bytes, or ``-`` and the reason::

    {"key": "…", "name": "7-ab12", "start": 0, "stop": 4194304}\\n   ───▶
                                                  ◀───   +<4194304 bytes>

How many connections are fastest depends on the link, so the receiver tries a few at the start and keeps the best. What it
fetches then is nobody's weights, but zeros, and as many of them as take a fast link some time: what it carries when a transfer
has got going is the bound that others are held against.
"""

from __future__ import annotations

import hmac
import json
import mmap
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from evergrad.transfer.layout import TransferError
from evergrad.transfer.shipment import Shipment

_CHUNK = 4 << 20
_TIMEOUT_S = 30.0
_LONGEST_LINE = 4096
_PROBE = "probe"
_LEAST_PROBE_BYTES = 16 << 20
_MOST_PROBE_BYTES = 1 << 30
_TRIAL_S, _BOUND_S = 0.05, 0.15
"""How long a probe is to take, where the bytes above allow it: one of each number of connections, and of the one that is kept.
A connection gets faster for its first hundreds of megabytes."""
_STREAMS = (1, 2, 4, 8)
_BOUNDS = 2


class TcpOutbox:
    """Answers on one port, in threads of its own.

    Args:
        host: Address to listen at; the receivers must reach it by this name.
        port: 0 takes any that is free.

    Raises:
        TransferError: the port cannot be bound.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._key = secrets.token_hex(16)
        # Memory that is only read, so that the system gives one page of zeros for all of it.
        zeros = mmap.mmap(-1, _MOST_PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._offered: dict[str, memoryview] = {_PROBE: memoryview(zeros)}
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            hint = "give port 0 for a free one"
            raise TransferError(f"port {port} cannot be bound: {error.strerror}", where=host, hint=hint) from error
        self._host = host
        threading.Thread(target=self._accept, name="tcp-outbox", daemon=True).start()

    @property
    def descriptor(self) -> dict[str, Any]:
        port = self._listener.getsockname()[1]
        return {"transport": "tcp", "host": self._host, "port": port, "key": self._key}

    def offer(self, shipment: Shipment, memory: Mapping[str, memoryview]) -> Shipment:
        self._offered |= memory
        return shipment

    def withdraw(self, names: frozenset[str]) -> None:
        for name in names:
            self._offered.pop(name, None)

    def close(self) -> None:
        self._offered.clear()
        # Wakes the thread that accepts, which closing alone would not; some systems say that nothing is connected.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="tcp-outbox-stream", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # The receiver may leave, or stand still; of anything else it is told by the end of the connection.
        with connection, suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            try:
                memory, name, start, stop = self._read_request(connection)
            except TransferError as error:
                connection.sendall(f"-{error}".encode())
                return
            connection.sendall(b"+")
            while start < stop and self._offered.get(name) is memory:
                end = min(start + _CHUNK, stop)
                connection.sendall(memory[start:end])
                start = end

    def _read_request(self, connection: socket.socket) -> tuple[memoryview, str, int, int]:
        line = b""
        while not line.endswith(b"\n"):
            more = connection.recv(_LONGEST_LINE - len(line))
            line += more
            if not more or len(line) >= _LONGEST_LINE:
                raise TransferError("not a request for a payload")
        try:
            asked = json.loads(line)
            key, name, start, stop = str(asked["key"]), str(asked["name"]), int(asked["start"]), int(asked["stop"])
        except (ValueError, TypeError, KeyError) as error:
            raise TransferError("not a request for a payload") from error
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise TransferError("wrong key", hint="attach to the publisher again")
        memory = self._offered.get(name)
        if memory is None:
            raise TransferError(f"payload '{name}' is not offered (any more)", hint="ask for the newest version")
        if not 0 <= start <= stop <= len(memory):
            raise TransferError(f"payload '{name}' has {len(memory)} bytes, {start}:{stop} were asked for")
        return memory, name, start, stop


class TcpInbox:
    """Fetches from a :class:`TcpOutbox`.

    Raises:
        TransferError: the descriptor is malformed, or nobody answers there.
    """

    def __init__(self, descriptor: Mapping[str, Any]) -> None:
        try:
            self._address = (str(descriptor["host"]), int(descriptor["port"]))
            self._key = str(descriptor["key"])
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"not a descriptor of a TCP outbox: {error!r}") from error
        self._pool = ThreadPoolExecutor(max(_STREAMS), thread_name_prefix="tcp-inbox")
        self.streams, self.link_gb_per_s = 1, 0.0
        try:
            self._tune()
        except TransferError:
            self.close()
            raise

    def fetch(self, name: str, start: int, into: memoryview) -> None:
        ranges = self._ranges(len(into))
        self._together([self._pool.submit(self._fetch_range, name, start + at, end - at, into[at:end]) for at, end in ranges])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ranges(self, size: int) -> list[tuple[int, int]]:
        """One for each connection. Borders at whole chunks, so that each one's reads are aligned as the sender's writes are."""
        share = -(-size // self.streams // _CHUNK) * _CHUNK or size
        return [(at, min(at + share, size)) for at in range(0, size, share)] if size else []

    def _together(self, tasks: list[Future[None]]) -> None:
        errors = [task.exception() for task in tasks]
        for error in errors:
            if error is not None:
                raise error

    def _tune(self) -> None:
        """Measures the link with each number of connections, after one round that wakes both ends and tells how much to ask
        for; then for longer as it will be used."""
        scratch = [memoryview(bytearray(_CHUNK)) for _ in range(max(_STREAMS))]
        first = self._probe(_LEAST_PROBE_BYTES, scratch)
        rates = {}
        for self.streams in _STREAMS:
            rates[self.streams] = self._probe(int(_TRIAL_S * first), scratch)
        self.streams = max(rates, key=lambda streams: rates[streams])
        rate = rates[self.streams]
        self.link_gb_per_s = max(rate, *(self._probe(int(_BOUND_S * rate), scratch) for _ in range(_BOUNDS))) / 1e9

    def _probe(self, num_bytes: int, scratch: list[memoryview]) -> float:
        """Bytes a second of about so many, received into the same little memory again and again."""
        size = min(max(num_bytes, _LEAST_PROBE_BYTES), _MOST_PROBE_BYTES)
        ranges = self._ranges(size)
        started = time.perf_counter()
        fetch = self._fetch_range
        self._together(
            [self._pool.submit(fetch, _PROBE, at, end - at, into) for (at, end), into in zip(ranges, scratch, strict=False)]
        )
        return size / (time.perf_counter() - started)

    def _fetch_range(self, name: str, start: int, size: int, into: memoryview) -> None:
        """Over one connection; where ``into`` is smaller than ``size``, it is filled anew."""
        where = f"{self._address[0]}:{self._address[1]}"
        asked = {"key": self._key, "name": name, "start": start, "stop": start + size}
        try:
            with socket.create_connection(self._address, timeout=_TIMEOUT_S) as connection:
                connection.sendall(json.dumps(asked).encode() + b"\n")
                if connection.recv(1) != b"+":
                    reason = connection.recv(_LONGEST_LINE).decode(errors="replace")
                    raise TransferError(reason or "the publisher closed the connection", where=where)
                got = 0
                while got < size:
                    at = got % len(into)
                    count = connection.recv_into(into[at : at + size - got])
                    if not count:
                        raise TransferError(
                            f"payload '{name}' broke off after {got} of {size} bytes",
                            where=where,
                            hint="the publisher went on to another version, or ended; ask for the newest",
                        )
                    got += count
        except OSError as error:
            raise TransferError(f"the publisher cannot be reached: {error}", where=where) from error
