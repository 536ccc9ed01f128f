"""The gateway of ``evergrad serve --record``: passes requests on to the engine, and keeps what customers let it keep.

::

    client ──▶ whose key? ──▶ engine ──▶ answer, as it comes ──▶ client
                                │  with "store": true
                                └──▶ redact ──▶ join to the conversation that it goes on ──▶ traffic.sqlite

    client ──▶ POST /v1/feedback ──▶ redact ──▶ join by completion id or by metadata ──▶ traffic.sqlite

Nothing waits for the store: a customer has the answer before it is redacted, and where storing fails the answer stands. A
conversation is known again by its texts, as every request repeats all that was said; the digests by which that is told live in
this process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field, StrictStr, model_validator
from starlette.requests import ClientDisconnect

from evergrad.config import Config, ConfigError, parse_config
from evergrad.envs import content_hash
from evergrad.loop.traffic import Redact, Redacted, TrafficStore, digest
from evergrad.types import Message

_CHAT = "/v1/chat/completions"
_MAX_BODY = 16 << 20
"""Bytes; the engine, which knows its context, refuses less than this."""
_REMEMBERED = 100_000
"""Conversations that may go on."""
_MOST_WAITING = 10_000
"""Answers that wait to be redacted and stored."""
_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "authorization", "expect"}
"""Headers that belong to one connection, or to the gateway."""


class FeedbackBody(Config):
    """``POST /v1/feedback``: what became of one conversation."""

    completion_id: StrictStr | None = None
    """Of any completion in it."""
    metadata: Annotated[dict[StrictStr, StrictStr], Field(default_factory=dict)]
    """What its requests carried as ``metadata``, or a part of that which no other conversation carries."""
    score: Annotated[float, Field(ge=0, le=1)] | None = None
    outcome: Annotated[dict[StrictStr, Any], Field(default_factory=dict)]
    """Plain JSON values that the environment's ``from_trace`` reads."""

    @model_validator(mode="after")
    def _says_something(self) -> FeedbackBody:
        if (self.completion_id is None) == (not self.metadata):
            raise ValueError("name one conversation: give completion_id, or metadata that its requests carried")
        if self.score is None and not self.outcome:
            raise ValueError("nothing is said of it: give a score in [0, 1], an outcome, or both")
        return self


class GatewayError(Exception):
    """An answer that is an error, in the shape that OpenAI's clients read."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class _Request:
    """A chat request of somebody who agreed that it is kept."""

    tenant: str
    user: str | None
    session: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, str]
    version_id: str


class Gateway:
    """
    Args:
        engine_url: Where the engine answers.
        store: What is kept goes there.
        redact: Applied to every text before it is kept.
        serves: Id of the version that answers now.
    """

    def __init__(self, engine_url: str, store: TrafficStore, redact: Redact, serves: Callable[[], str]) -> None:
        self._store, self._redact, self._serves = store, redact, serves
        self._http = httpx.AsyncClient(base_url=engine_url, timeout=None, limits=httpx.Limits(max_connections=None))
        self._open: OrderedDict[bytes, list[str]] = OrderedDict()
        """By the digest of a conversation so far, the traces that may go on from there."""
        self._salt = secrets.token_bytes(32)
        self._keeping: set[asyncio.Task[None]] = set()
        self._in_order = asyncio.Lock()
        """A turn is kept before the one that goes on from it: whoever asks the next has had the answer to this one."""
        self.app = FastAPI(title="Evergrad gateway", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.exception_handler(GatewayError)(self._on_error)
        self.app.exception_handler(ClientDisconnect)(self._on_disconnect)
        self.app.post(_CHAT)(self._chat)
        self.app.post("/v1/feedback")(self._feedback)
        for path in ("/v1/models", "/health", "/metrics"):
            self.app.get(path)(self._pass_on)
        self.app.post("/inference/v1/generate")(self._pass_on)

    async def serve(self, port: int, listening: Callable[[int], None]) -> None:
        """Answers on 127.0.0.1 until it is cancelled, then keeps what is still to be kept.

        Args:
            port: 0 takes a free one.
            listening: Told the port, once requests are taken.
        """
        config = uvicorn.Config(self.app, log_config=None, access_log=False)
        config.timeout_graceful_shutdown, config.timeout_keep_alive = 2, 120
        server = _Server(config)
        with socket.create_server(("127.0.0.1", port), backlog=2048) as listener:
            listening(listener.getsockname()[1])
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="gateway")
            try:
                await asyncio.shield(serving)
            finally:
                server.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)
                await asyncio.gather(*self._keeping, return_exceptions=True)
                await self._http.aclose()

    # -- requests --------------------------------------------------------------------------------------------------------

    async def _pass_on(self, request: Request) -> Response:
        await self._tenant(request)
        return await self._forward(request, await _content(request))

    async def _chat(self, request: Request) -> Response:
        tenant, content = await self._tenant(request), await _content(request)
        return await self._forward(request, content, _agreed(content, tenant, self._serves()))

    async def _tenant(self, request: Request) -> str:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        tenant = await asyncio.to_thread(self._store.tenant_of, key.strip() if scheme.lower() == "bearer" else "")
        if tenant is None:
            raise GatewayError(401, "the API key is nobody's: 'evergrad traffic key TENANT' makes one", "unauthorized")
        return tenant

    async def _forward(self, request: Request, content: bytes, agreed: _Request | None = None) -> Response:
        """The engine's answer as it comes; the engine gives up when the client goes away."""
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        asked = self._http.build_request(request.method, request.url.path, content=content, headers=headers)
        work = asyncio.create_task(self._http.send(asked, stream=True))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise GatewayError(499, "the client closed the connection", "client_closed")
            answer = await work
        except httpx.HTTPError as error:
            raise GatewayError(
                503, f"the engine does not answer: {str(error) or type(error).__name__}", "engine_dead"
            ) from error
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        passed = {name: value for name, value in answer.headers.items() if name not in _HOP}
        return StreamingResponse(self._body(answer, agreed), status_code=answer.status_code, headers=passed)

    async def _body(self, answer: httpx.Response, agreed: _Request | None) -> AsyncIterator[bytes]:
        told = bytearray()
        try:
            async for chunk in answer.aiter_raw():
                if agreed is not None:
                    told += chunk
                yield chunk
        finally:
            await answer.aclose()
        if agreed is not None and answer.status_code == 200:
            if len(self._keeping) >= _MOST_WAITING:
                _warn(f"{_MOST_WAITING} conversations wait to be redacted; this one is not kept")
                return
            keeping = asyncio.create_task(self._keep(agreed, bytes(told), answer.headers.get("content-type", "")))
            self._keeping.add(keeping)
            keeping.add_done_callback(self._keeping.discard)

    # -- what is kept ----------------------------------------------------------------------------------------------------

    async def _keep(self, asked: _Request, told: bytes, content_type: str) -> None:
        try:
            said = _said(told, content_type)
            if said is None:
                return  # cut off by an error in the stream: no conversation goes on from it
            completion_id, text = said
            whole = replace(asked, messages=(*asked.messages, Message("assistant", text)))
            async with self._in_order:
                goes_on = self._continued(asked)
                trace_id = await asyncio.to_thread(self._store_turn, whole, completion_id, goes_on)
                self._remember(whole, trace_id)
        except Exception as error:
            # The customer has his answer; what cannot be redacted or stored is not kept. Its text is in no message of ours.
            _warn(f"a conversation is not kept: {type(error).__name__}")

    def _store_turn(self, asked: _Request, completion_id: str, continues: str | None) -> str:
        system = next((each.content for each in asked.messages if each.role == "system"), "")
        turn = Redacted(
            completion_id=completion_id,
            tenant=asked.tenant,
            user=asked.user,
            version_id=asked.version_id,
            messages=tuple(replace(each, content=self._redact(each.content)) for each in asked.messages),
            metadata={key: self._redact(value) for key, value in asked.metadata.items()},
            references=tuple(_references(asked.tenant, asked.metadata)),
            system_hash=content_hash(system),
        )
        return self._store.keep(turn, continues)

    def _continued(self, asked: _Request) -> str | None:
        """The trace that this request goes on: the one of its longest beginning that ended in a reply."""
        for length in range(len(asked.messages) - 1, 0, -1):
            if asked.messages[length - 1].role == "assistant":
                key = self._digest(replace(asked, messages=asked.messages[:length]))
                waiting = self._open.get(key)
                if waiting:
                    trace_id = waiting.pop(0)
                    if not waiting:
                        del self._open[key]
                    return trace_id
        return None

    def _remember(self, asked: _Request, trace_id: str) -> None:
        self._open.setdefault(self._digest(asked), []).append(trace_id)
        while len(self._open) > _REMEMBERED:
            self._open.popitem(last=False)

    def _digest(self, asked: _Request) -> bytes:
        messages = [each.as_dict() for each in asked.messages]
        content = json.dumps([asked.tenant, asked.user, asked.session, dict(asked.metadata), messages], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16, key=self._salt).digest()

    async def _feedback(self, request: Request) -> Response:
        tenant = await self._tenant(request)
        try:
            body = parse_config(FeedbackBody, json.loads(await _content(request)), where="request body")
        except (ValueError, RecursionError, TypeError) as error:
            raise GatewayError(400, f"the body is not a JSON object: {error}", "invalid_request") from error
        except ConfigError as error:
            raise GatewayError(400, str(error).replace("Value error, ", ""), "invalid_request", error.key) from error

        def join() -> int:
            return self._store.add_feedback(
                tenant,
                completion_id=body.completion_id,
                references=list(_references(tenant, body.metadata)),
                score=body.score,
                outcome=_redacted(body.outcome, self._redact),
            )

        await asyncio.gather(*self._keeping, return_exceptions=True)  # feedback may follow its answer at once
        joined = await asyncio.to_thread(join)
        if not joined:
            message = "no conversation of yours is kept under that name: it was not sent with store = true, or is forgotten"
            raise GatewayError(404, message, "not_found", "completion_id" if body.completion_id else "metadata")
        return JSONResponse({"object": "feedback", "joined": joined})

    async def _on_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        return JSONResponse(error.body, status_code=error.status)

    async def _on_disconnect(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)


class _Server(uvicorn.Server):
    """Leaves signals to the command that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _agreed(content: bytes, tenant: str, version_id: str) -> _Request | None:
    """The request, if it says ``"store": true``; what the engine will refuse is not kept either.

    Raises:
        GatewayError: it asks for several answers, of which nobody could tell which one the conversation went on from.
    """
    try:
        body = json.loads(content)
        if not isinstance(body, dict) or body.get("store") is not True:
            return None
        messages = tuple(Message(each["role"], _text(each)) for each in body["messages"])
        metadata = {str(key): str(value) for key, value in (body.get("metadata") or {}).items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if body.get("n") not in (None, 1):
        raise GatewayError(400, "store = true goes with n = 1: of several answers, which one counts?", "invalid_request", "n")
    user = body.get("user")
    who = digest(tenant, user) if isinstance(user, str) and user else None
    return _Request(tenant, who, str(body.get("session_id") or ""), messages, metadata, version_id)


def _warn(what: str) -> None:
    print(f"warning: {what}", file=sys.stderr, flush=True)


def _text(message: Mapping[str, Any]) -> str:
    """What a message says; calls of tools, where the model has them apart from its text, are lines of it."""
    content = message.get("content")
    said = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return "\n".join([*([said] if said or not calls else []), *(f"{call['name']}({call['arguments']})" for call in calls)])


def _said(told: bytes, content_type: str) -> tuple[str, str] | None:
    """Id and text of a whole chat completion, or of one in pieces; ``None`` for one that did not end well."""
    if not content_type.startswith("text/event-stream"):
        answer = json.loads(told)
        return answer["id"], _text(answer["choices"][0]["message"])
    pieces, calls, completion_id, ended = list[str](), dict[int, dict[str, str]](), "", False
    for line in told.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            return None
        completion_id = chunk["id"]
        for choice in chunk["choices"]:
            pieces.append(choice["delta"].get("content") or "")
            for each in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(each["index"], {"name": "", "arguments": ""})
                for key in call:
                    call[key] += each["function"].get(key) or ""
            ended = ended or choice["finish_reason"] is not None
    whole = {"content": "".join(pieces), "tool_calls": [{"function": calls[index]} for index in sorted(calls)]}
    return (completion_id, _text(whole)) if ended else None


def _references(tenant: str, metadata: Mapping[str, str]) -> Iterator[str]:
    for key, value in metadata.items():
        yield digest(tenant, "metadata", key, value)


def _redacted(value: Any, redact: Redact) -> Any:
    """JSON data with every text in it redacted; keys are the client's words, and stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _redacted(each, redact) for key, each in value.items()}
    return [_redacted(each, redact) for each in value] if isinstance(value, list) else value


async def _content(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY:
            raise GatewayError(413, f"the body has more than {_MAX_BODY} bytes", "too_large")
    return bytes(content)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
