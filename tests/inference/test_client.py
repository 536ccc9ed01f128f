"""What many sessions at once cost the client."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from aiohttp.test_utils import TestServer

from evergrad.inference import EngineClient, EngineError
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
    all_here = asyncio.Barrier(1)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await all_here.wait()
        return web.json_response(ANSWER)

    async def costs(client: EngineClient, sessions: int) -> float:
        """Processor seconds of one request, when all are under way at once."""
        nonlocal all_here
        all_here = asyncio.Barrier(sessions)
        began = time.process_time()
        done = await asyncio.gather(*(client([1], Sampling(), session_id=str(number)) for number in range(sessions)))
        assert all(completion.token_ids == (7,) for completion in done)
        return (time.process_time() - began) / sessions

    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    async with TestServer(app) as server, EngineClient(str(server.make_url(""))) as client:
        few = min([await costs(client, 16) for _ in range(3)])
        many = min([await costs(client, 400) for _ in range(2)])
    assert many < 4 * few


async def test_sessions_that_end_while_an_answer_is_awaited_are_closed_together() -> None:
    asked: list[list[str]] = []
    came, go_on = asyncio.Event(), asyncio.Event()

    async def close(request: web.Request) -> web.Response:
        asked.append((await request.json())["ids"])
        came.set()
        await go_on.wait()
        if "odd" in asked[-1]:
            return web.json_response({"error": {"message": "no"}}, status=400)
        return web.json_response({"open": 0, "lockstep_misses": len(asked)})

    app = web.Application()
    app.router.add_post("/admin/sessions/close", close)
    async with TestServer(app) as server, EngineClient(str(server.make_url(""))) as client:
        first = asyncio.create_task(client.close_sessions(["a"]))
        await came.wait()
        others = [asyncio.create_task(client.close_sessions([name])) for name in "bcd"]
        await asyncio.sleep(0)
        others[0].cancel()  # who no longer waits for it has ended all the same
        go_on.set()
        assert (await first, await others[1], await others[2]) == (1, 2, 2)
        assert asked == [["a"], ["b", "c", "d"]]
        assert client.take_lockstep_misses() == 2
        refused = await asyncio.gather(client.close_sessions(["odd"]), client.close_sessions(["e"]), return_exceptions=True)
        assert [type(error) for error in refused] == [EngineError, EngineError]
        assert await client.close_sessions(["f"]) == 4
