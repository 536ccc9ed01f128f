"""The relay before engines: connections go to where they went when they were opened, and end when either end does."""

from __future__ import annotations

import asyncio

from evergrad.service._relay import Relay


class Named:
    """Answers each line with its own name and the line."""

    def __init__(self, name: str) -> None:
        self.name, self.gone = name, asyncio.Event()
        self.port = 0

    async def __aenter__(self) -> Named:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line == b"end\n":
                break
            writer.write(f"{self.name}: ".encode() + line)
        self.gone.set()
        writer.close()


async def ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], line: bytes) -> bytes:
    connection[1].write(line)
    return await connection[0].readline()


async def test_what_is_connected_stays_and_what_comes_goes_to_the_new_one() -> None:
    async with Named("old") as old, Named("new") as new, Relay(0, old.port) as relay:
        first = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await ask(first, b"a\n") == b"old: a\n"
        relay.target = new.port
        second = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await ask(second, b"b\n") == b"new: b\n"
        assert await ask(first, b"c\n") == b"old: c\n"
        first[1].write(b"end\n")
        assert await first[0].read() == b"", "the engine's end is the end"
        second[1].close()
        await asyncio.wait_for(new.gone.wait(), 10)


async def test_much_comes_through_whole_and_a_client_that_stops_sending_is_still_answered() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    async with server, Relay(0, server.sockets[0].getsockname()[1]) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        sent = bytes(range(256)) * 20_000
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()


async def test_an_engine_that_is_gone_is_a_closed_connection() -> None:
    async with Named("gone") as gone:
        port = gone.port
    async with Relay(0, port) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await reader.read() == b""
        writer.close()
