"""The gateway of ``evergrad serve --record``: passes requests on to the engine, and keeps what customers let it keep.

::

    client ──▶ whose key? ──▶ engine ──▶ answer, as it comes ──▶ client
                                │  with "store": true
                                └──▶ redact ──▶ join to the conversation that it goes on ──▶ traffic.sqlite

    client ──▶ POST /v1/feedback ──▶ redact ──▶ join by completion id or by metadata ──▶ traffic.sqlite

While a release is under way, the candidate's share of the sessions is asked of its engine (``_canary.py``), and what is
kept says which version answered.

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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field, StrictStr, model_validator
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from evergrad.config import Config, ConfigError, parse_config
from evergrad.envs import content_hash
from evergrad.loop.traffic import DealtSession, Redact, Redacted, TrafficStore, digest
from evergrad.service._canary import Canary, Dealt
from evergrad.service._chats import (
    ChatRequest,
    GatewayError,
    agreed_request,
    customer_of,
    parsed_body,
    redacted_json,
    references_of,
    whole_answer,
)
from evergrad.types import EvergradError, Message

_CHAT = "/v1/chat/completions"
_MAX_BODY = 16 << 20
"""Bytes; the engine, which knows its context, refuses less than this."""
_REMEMBERED = 100_000
"""Beginnings of conversations that may go on."""
_ALIKE = 100
"""Of conversations of nobody in particular with one beginning, so many may go on; a probe asks the same day and night."""
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


class Gateway:
    """
    Args:
        engine_url: Where the engine answers.
        store: What is kept goes there.
        redact: Applied to every text before it is kept.
        serves: Id of the version that answers now.
        canary: The release that customers may be a part of; none when absent.
    """

    def __init__(
        self, engine_url: str, store: TrafficStore, redact: Redact, serves: Callable[[], str], canary: Canary | None = None
    ) -> None:
        self._store, self._redact, self._serves, self._canary = store, redact, serves, canary or Canary("")
        self._http = httpx.AsyncClient(base_url=engine_url, timeout=None, limits=httpx.Limits(max_connections=None))
        self._open: OrderedDict[bytes, list[str]] = OrderedDict()
        """By the digest of a conversation so far, the traces that may go on from there."""
        self._salt = secrets.token_bytes(32)
        self._keeping: set[asyncio.Task[None]] = set()
        self._in_order = asyncio.Lock()
        """A turn is kept before the one that goes on from it: whoever asks the next has had the answer to this one."""
        self.app = FastAPI(title="Evergrad gateway", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.exception_handler(GatewayError)(self._on_error)
        self.app.exception_handler(EvergradError)(self._on_trouble)
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
                await asyncio.gather(self._http.aclose(), self._canary.http.aclose())

    # -- requests --------------------------------------------------------------------------------------------------------

    async def _pass_on(self, request: Request) -> Response:
        await self._tenant(request)
        return self._passed(await self._ours(request, await _content(request)))

    async def _chat(self, request: Request) -> Response:
        tenant, content = await self._tenant(request), await _content(request)
        body = parsed_body(content)
        dealt, candidate_id = self._deal(tenant, body), self._canary.candidate_id
        asked = replace(agreed, dealt=dealt) if (agreed := agreed_request(body, tenant, self._serves())) else None
        answer = await self._candidates(request, body) if self._canary.asks(dealt) else None
        if answer is not None and answer.status_code == 200:
            return self._passed(answer, replace(asked, version_id=candidate_id) if asked else None)
        if answer is not None:
            await answer.aclose()
        ours = await self._ours(request, content)
        if dealt is not None and answer is not None and ours.status_code == 200:
            failed = self._canary.fail(dealt)
            asked = replace(asked, dealt=failed) if asked else None
        elif asked is not None and ours.status_code >= 500:
            self._later(self._put_down_failure(asked))
        return self._passed(ours, asked)

    def _deal(self, tenant: str, body: Mapping[str, Any]) -> Dealt | None:
        """The side of a canary that a chat's session is on. What the engine will refuse has none."""
        if not self._canary.deals(body.get("model")):
            return None
        try:
            user, name, messages = customer_of(tenant, body), str(body.get("session_id") or ""), body["messages"]
            until = next((index for index, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
            # A client that names no session has one for each conversation, which every request of it begins with.
            known_by = ("session", name) if name else ("conversation", json.dumps(messages[:until], sort_keys=True))
            return self._canary.deal(digest(tenant, user or "", *known_by), goes_on=until < len(messages))
        except (LookupError, TypeError, AttributeError):
            return None

    async def _candidates(self, request: Request, body: Mapping[str, Any]) -> httpx.Response | None:
        """The answer of the candidate's engine, ``None`` where it is not there. It is asked for by its id: what else may listen
        there by now refuses that."""
        try:
            content = json.dumps({**body, "model": self._canary.candidate_id}).encode()
        except RecursionError:
            return None  # nested so deep that it can just be read
        return await self._canary.ask(lambda url: self._send(self._canary.http, request, f"{url}{_CHAT}", content))

    async def _tenant(self, request: Request) -> str:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        tenant = await asyncio.to_thread(self._store.tenant_of, key.strip() if scheme.lower() == "bearer" else "")
        if tenant is None:
            raise GatewayError(401, "the API key is nobody's: 'evergrad traffic key TENANT' makes one", "unauthorized")
        return tenant

    async def _ours(self, request: Request, content: bytes) -> httpx.Response:
        """The answer of our engine, whatever it is."""
        try:
            return await self._send(self._http, request, request.url.path, content)
        except httpx.HTTPError as error:
            raise GatewayError(
                503, f"the engine does not answer: {str(error) or type(error).__name__}", "engine_dead"
            ) from error

    async def _send(self, http: httpx.AsyncClient, request: Request, url: str, content: bytes) -> httpx.Response:
        """An engine's answer, of which the body is still to come; the engine gives up when the client goes away.

        Raises:
            httpx.HTTPError: the engine does not answer.
            GatewayError: the client is gone.
        """
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        asked = http.build_request(request.method, url, content=content, headers=headers)
        work = asyncio.create_task(http.send(asked, stream=True))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise GatewayError(499, "the client closed the connection", "client_closed")
            return await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _passed(self, answer: httpx.Response, agreed: ChatRequest | None = None) -> Response:
        """An engine's answer as it comes."""
        passed = {name: value for name, value in answer.headers.items() if name not in _HOP}
        return _Passed(answer, self._body(answer, agreed), passed)

    async def _body(self, answer: httpx.Response, agreed: ChatRequest | None) -> AsyncIterator[bytes]:
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
            self._later(self._keep(agreed, bytes(told), answer.headers.get("content-type", "")))

    def _later(self, keeping: Coroutine[Any, Any, None]) -> None:
        """Keeps something while the customer has the answer already."""
        task = asyncio.create_task(keeping)
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    # -- what is kept ----------------------------------------------------------------------------------------------------

    async def _keep(self, asked: ChatRequest, told: bytes, content_type: str) -> None:
        try:
            said = whole_answer(told, content_type)
            if said is None:
                await self._put_down_failure(asked)
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

    async def _put_down_failure(self, asked: ChatRequest) -> None:
        """A session of a canary that its side could not answer."""
        if asked.dealt is None or not asked.dealt.tossed:
            return
        try:
            await asyncio.to_thread(self._put_down, asked, replace(asked.dealt, failed=True))
        except EvergradError as error:
            _warn(f"a session that failed is not put down: {error}")

    def _put_down(self, asked: ChatRequest, dealt: Dealt) -> int:
        session = DealtSession(dealt.release_id, dealt.session, asked.tenant, asked.user, dealt.side, dealt.share, dealt.failed)
        return self._store.canary.put_down(session)

    def _store_turn(self, asked: ChatRequest, completion_id: str, continues: str | None) -> str:
        system = next((each.content for each in asked.messages if each.role == "system"), "")
        turn = Redacted(
            completion_id=completion_id,
            tenant=asked.tenant,
            user=asked.user,
            version_id=asked.version_id,
            messages=tuple(replace(each, content=self._redact(each.content)) for each in asked.messages),
            metadata={key: self._redact(value) for key, value in asked.metadata.items()},
            references=tuple(references_of(asked.tenant, asked.metadata)),
            system_hash=content_hash(system),
            session=self._put_down(asked, asked.dealt) if asked.dealt is not None and asked.dealt.tossed else None,
        )
        return self._store.keep(turn, continues)

    def _continued(self, asked: ChatRequest) -> str | None:
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

    def _remember(self, asked: ChatRequest, trace_id: str) -> None:
        key = self._digest(asked)
        alike = self._open.setdefault(key, [])
        alike.append(trace_id)
        del alike[:-_ALIKE]
        self._open.move_to_end(key)
        while len(self._open) > _REMEMBERED:
            self._open.popitem(last=False)

    def _digest(self, asked: ChatRequest) -> bytes:
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
                references=list(references_of(tenant, body.metadata)),
                score=body.score,
                outcome=redacted_json(body.outcome, self._redact),
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

    async def _on_trouble(self, request: Request, error: Exception) -> Response:
        """The store cannot be read or written. Its message names files of this machine, and is for who runs it."""
        _warn(str(error))
        trouble = GatewayError(503, "the store of the gateway is out of reach; try again", "store_unavailable")
        return await self._on_error(request, trouble)

    async def _on_disconnect(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)


class _Passed(StreamingResponse):
    """An engine's answer as it comes. It is closed in any case: of a client who left by now, nothing of the body is read."""

    def __init__(self, answer: httpx.Response, body: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(body, status_code=answer.status_code, headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.aclose()


class _Server(uvicorn.Server):
    """Leaves signals to the command that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _warn(what: str) -> None:
    print(f"warning: {what}", file=sys.stderr, flush=True)


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
