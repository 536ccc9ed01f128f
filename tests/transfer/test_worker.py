"""What every worker process begins with."""

from __future__ import annotations

import asyncio
import socket

from evergrad.config import Config
from evergrad.transfer.worker import run_worker


class _Nothing(Config):
    pass


def test_an_answers_body_does_not_wait_until_its_headers_are_acknowledged() -> None:
    no_delay = []

    async def meet(listener: socket.socket) -> None:
        accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        server = await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=listener)
        async with server:
            _, client = await asyncio.open_connection(*listener.getsockname())
            theirs = await accepted.get()
            no_delay.append(theirs.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            client.close()
            theirs.close()

    assert run_worker("here", "answers", _Nothing, lambda _, listener: asyncio.run(meet(listener)), []) == 0
    assert no_delay == [1]
