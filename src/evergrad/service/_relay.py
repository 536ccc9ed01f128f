"""A port that stays while the engine behind it changes.

An engine is on one base model. Where the versions of a run are on several, the endpoint's port belongs to the command that
serves, which passes each connection on to the engine that answers when it is opened. Whoever is connected to the engine
before is answered there to the end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

_PIECE = 1 << 16


class Relay:
    """Use as an async context manager; entered, it listens.

    Args:
        port: On which it listens, on this machine alone; 0 for a free one, which ``port`` is then.
        target: Port of the engine to which connections go from now on; may be set at any time.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port, self.target = port, target
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            with suppress(OSError):  # either end may go at any time, and the other one learns of it by the end of the stream
                await self._pass(reader, writer)
        finally:
            self._passing.discard(task)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            # The engine's end of the stream is the end; a client that only stops sending may still wait for an answer.
            asking = asyncio.create_task(_copy(reader, engine_writer))
            try:
                await _copy(engine_reader, writer)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        finally:
            engine_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes bytes on as they come, as fast as they are taken, and then the end of the stream."""
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
