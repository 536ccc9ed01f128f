"""The gateway before an engine that says what the test wants: nobody waits for the store, and nothing is lost or mixed up."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from evergrad.loop.traffic import Redact, TrafficStore
from evergrad.service._chats import ChatRequest
from evergrad.service._gateway import _ALIKE, Gateway, _Server
from evergrad.types import Message

Handler = Callable[[Request], Any]


@asynccontextmanager
async def behind(
    tmp_path: Path, handler: Handler, redact: Redact = str.upper
) -> AsyncIterator[tuple[httpx.AsyncClient, TrafficStore]]:
    """A client of a gateway, whose engine answers chat requests by ``handler``."""
    engine = FastAPI()
    engine.post("/v1/chat/completions")(handler)
    listener = socket.create_server(("127.0.0.1", 0))
    engine_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = _Server(uvicorn.Config(engine, log_config=None, timeout_keep_alive=120))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        gateway = Gateway(engine_url, store, redact, lambda: "v1")
        serving = asyncio.create_task(gateway.serve(0, port.set_result))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port}", timeout=60) as client:
            yield client, store
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    server.should_exit = True
    await running


def reply(number: int, text: str) -> JSONResponse:
    return JSONResponse({"id": f"chatcmpl-{number}", "choices": [{"message": {"role": "assistant", "content": text}}]})


def body(*said: str, **more: Any) -> dict[str, Any]:
    """Messages of user and assistant by turns."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(said)]
    return {"model": "production", "messages": messages, "store": True, **more}


class Counting:
    """Answers each request with the number of its messages."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, request: Request) -> Response:
        self.asked += 1
        return reply(self.asked, f"reply {len((await request.json())['messages'])}")


async def ask(client: httpx.AsyncClient, *said: str, **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body(*said, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def test_conversations_at_once_are_kept_apart_and_each_is_one_trace(tmp_path: Path) -> None:
    """Forty with the same words, four turns each; redacting takes its time, and the next turn does not wait for it."""

    def slow(text: str) -> str:
        time.sleep(0.001)
        return text.upper()

    async with behind(tmp_path, Counting(), slow) as (client, store):

        async def converse(number: int) -> None:
            said = ["hello"]
            for _ in range(4):
                answer = await ask(client, *said, user=f"u{number}")
                said += [answer["choices"][0]["message"]["content"], "go on"]

        await asyncio.gather(*(converse(number) for number in range(40)))
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        traces = store.traces()
    assert len({each.user for each in traces}) == len(traces) == 40
    for each in traces:
        assert each.trace.replies == ("REPLY 1", "REPLY 3", "REPLY 5", "REPLY 7")


async def test_equal_conversations_of_nobody_in_particular_are_as_many_as_there_were(tmp_path: Path) -> None:
    async with behind(tmp_path, Counting()) as (client, store):
        for _ in range(3):
            await ask(client, "hello")
        await asyncio.gather(*(ask(client, "hello", "reply 1", "go on") for _ in range(2)))
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        assert sorted(len(each.trace.replies) for each in store.traces()) == [1, 2, 2]


async def test_what_cannot_be_redacted_is_answered_and_not_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(text: str) -> str:
        raise ValueError(f"cannot read {text}")

    async with behind(tmp_path, Counting(), broken) as (client, store):
        assert (await ask(client, "a secret"))["id"] == "chatcmpl-1"
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        assert store.traces() == []
    told = capfd.readouterr().err
    assert "warning: a conversation is not kept: ValueError" in told
    assert "secret" not in told


async def test_a_stream_that_breaks_is_passed_on_and_not_kept(tmp_path: Path) -> None:
    async def handler(request: Request) -> Response:
        broken = (await request.json())["messages"][0]["content"] == "break"

        async def chunks() -> AsyncIterator[str]:
            for index, text in enumerate(["it is", " f\u00fcnf"]):
                ends = "stop" if index and not broken else None
                delta = {"index": 0, "delta": {"content": text}, "finish_reason": ends}
                yield f"data: {json.dumps({'id': 'chatcmpl-s', 'choices': [delta]}, ensure_ascii=False)}\n\n"
            yield 'data: {"error": {"message": "the engine stopped"}}\n\n' if broken else "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async with behind(tmp_path, handler) as (client, store):
        for word in ("break", "whole"):
            answer = await client.post("/v1/chat/completions", json=body(word, stream=True))
            assert answer.text.count("data: ") == 3
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        (trace,) = store.traces()
    assert trace.trace.replies == ("IT IS F\u00dcNF",)


async def test_calls_apart_from_the_text_are_kept_and_the_conversation_is_known_again(tmp_path: Path) -> None:
    called = [{"id": "call-1", "type": "function", "function": {"name": "find", "arguments": '{"num": 7}'}}]

    async def handler(request: Request) -> Response:
        asked = await request.json()
        if len(asked["messages"]) > 1:
            return reply(2, "shelf 31")
        if not asked.get("stream"):
            said = {"role": "assistant", "content": None, "tool_calls": called}
            return JSONResponse({"id": "chatcmpl-1", "choices": [{"message": said}]})

        async def chunks() -> AsyncIterator[str]:
            for number, part in enumerate(['{"num"', ": 7}"]):
                call = {"index": 0, "function": {"arguments": part} | ({} if number else {"name": "find"})}
                delta = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls" if number else None}
                yield f"data: {json.dumps({'id': 'chatcmpl-s', 'choices': [delta]})}\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async with behind(tmp_path, handler, lambda text: text) as (client, store):
        for stream in (False, True):
            first = body("where is 7?", stream=stream, user=str(stream))
            assert (await client.post("/v1/chat/completions", json=first)).status_code == 200
        more = [{"role": "assistant", "tool_calls": called}, {"role": "tool", "tool_call_id": "call-1", "content": "31"}]
        await client.post(
            "/v1/chat/completions", json={**body("where is 7?", user="False"), "messages": first["messages"] + more}
        )
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        replies = sorted(each.trace.replies for each in store.traces())
    assert replies == [('find({"num": 7})',), ('find({"num": 7})', "shelf 31")]


async def test_the_engine_hears_that_a_client_left(tmp_path: Path) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        await request.body()
        began.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left.set()
        return Response(status_code=499)

    async with behind(tmp_path, handler) as (client, _):
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body("hello")))
        await began.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await left.wait()


class _Endless(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b"data: {}\n\n"


async def test_an_answer_to_a_client_who_left_by_then_is_closed_all_the_same(tmp_path: Path) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    answer = httpx.Response(200, stream=_Endless())
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        passed = Gateway("http://127.0.0.1:9", store, str.upper, lambda: "v1")._passed(answer)
        await passed({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert answer.is_closed, "the engine would go on for nobody"


async def test_of_a_probe_that_asks_the_same_for_ever_only_so_much_is_remembered(tmp_path: Path) -> None:
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        gateway = Gateway("http://127.0.0.1:9", store, str.upper, lambda: "v1")
        said = (Message("user", "are you well?"), Message("assistant", "yes"))
        probe = ChatRequest("default", None, "", said, {}, "v1")
        for number in range(3 * _ALIKE):
            gateway._remember(probe, f"trace-{number}")
        asked = replace(probe, messages=(*said, Message("user", "and now?")))
        assert gateway._continued(asked) == f"trace-{2 * _ALIKE}"
        assert sum(map(len, gateway._open.values())) < _ALIKE


async def test_a_store_that_cannot_be_read_is_told_to_the_operator_and_to_the_client_what_concerns_him(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with behind(tmp_path, Counting()) as (client, _):
        with sqlite3.connect(tmp_path / "traffic.sqlite") as connection:
            connection.execute("ALTER TABLE tenant_keys RENAME TO lost")
        answer = await client.post("/v1/chat/completions", json=body("hello"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert "no such table: tenant_keys" in capfd.readouterr().err
        with sqlite3.connect(tmp_path / "traffic.sqlite") as connection:
            connection.execute("ALTER TABLE lost RENAME TO tenant_keys")
        assert await ask(client, "hello")


async def test_errors_of_the_engine_are_passed_on_as_they_are(tmp_path: Path) -> None:
    async def handler(request: Request) -> Response:
        return JSONResponse({"error": {"message": "too hot", "param": "temperature"}}, status_code=400)

    async with behind(tmp_path, handler) as (client, store):
        answer = await client.post("/v1/chat/completions", json=body("hello", temperature=1e9))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
        assert store.traces() == []
        assert (await client.post("/admin/weights/load", json={})).status_code == 404, "administration has no way through"
    gone = Gateway("http://127.0.0.1:9", TrafficStore(tmp_path / "other.sqlite"), str.upper, lambda: "v1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gone.app), base_url="http://gateway") as client:
        answer = await client.post("/v1/chat/completions", json=body("hello"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
