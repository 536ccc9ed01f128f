"""What many sessions at once cost the client."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from aiohttp.test_utils import TestServer

from evergrad.inference import EngineClient
from evergrad.types import Sampling

ANSWER = {
    "choices": [
        {
            "token_ids": [7],
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": 0, "start": 0, "end": 1}],
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


async def test_a_request_costs_the_same_among_few_sessions_and_among_many() -> None:
    waiting: list[asyncio.Event] = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        event = asyncio.Event()
        waiting.append(event)
        await event.wait()
        return web.json_response(ANSWER)

    async def costs(client: EngineClient, sessions: int) -> float:
        """Processor seconds of one request, when all are under way at once and end one after the other."""
        began = time.process_time()
        tasks = [asyncio.create_task(client([1], Sampling(), session_id=str(number))) for number in range(sessions)]
        while len(waiting) < sessions:
            await asyncio.sleep(0.001)
        for event in waiting:
            event.set()
            await asyncio.sleep(0)
        assert all(done.token_ids == (7,) for done in await asyncio.gather(*tasks))
        waiting.clear()
        return (time.process_time() - began) / sessions

    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    async with TestServer(app) as server, EngineClient(str(server.make_url(""))) as client:
        few = min([await costs(client, 16) for _ in range(3)])
        many = min([await costs(client, 400) for _ in range(2)])
    assert many < 4 * few
