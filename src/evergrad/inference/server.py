"""The engine's HTTP server: generation and chat for everyone on the machine, administration for who has the token."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from evergrad.config import ConfigError, nearest
from evergrad.inference import _generated as generated
from evergrad.inference import _wire as wire
from evergrad.inference._chat import ChatFormat, TextStream
from evergrad.inference._generated import Answer, sse, usage
from evergrad.inference._loop import StepLoop
from evergrad.inference._weights import WeightUpdates
from evergrad.inference.config import EngineError
from evergrad.inference.engine import Engine, Event, RequestError
from evergrad.inference.engine import Request as EngineRequest
from evergrad.transfer import TransferError
from evergrad.types import EvergradError, FinishReason, Sampling

T = TypeVar("T")

_CHAT = "/v1/chat/completions"
_MAX_BODY = 1 << 20
"""Bytes of a request's body, where the context does not need more."""
_BYTES_PER_ID = 16
_LARGE_BODY = 1 << 16
"""Bytes from which on a body is read in a thread, so that others are answered meanwhile."""
_DISCARD_S = 5.0
"""How long the rest of a body that is too large is read, so that its sender comes to read the answer."""


class HttpError(Exception):
    """An answer that is an error, in the shape that OpenAI's clients read."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return _reply(self.body, self.status)


class EngineServer:
    """An engine, the thread that steps it, and the routes to both.

    Args:
        token: What admin routes demand as a bearer; None closes them.
        on_ready: Called once, when requests are answered.
        on_death: Called once in the event loop, should the engine die, after every waiting request was told.
    """

    def __init__(
        self,
        engine: Engine,
        token: str | None,
        on_ready: Callable[[], None] = lambda: None,
        on_death: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.engine = engine
        self.chat = ChatFormat(Path(engine.config.model), engine.model.eos_token_ids)
        self.served_names: tuple[str, ...] = tuple(dict.fromkeys((*engine.config.served_names, Path(engine.config.model).name)))
        self._token, self._on_ready, self._on_death = token, on_ready, on_death
        self._queues: dict[str, asyncio.Queue[Event | Exception]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._steps = StepLoop(engine, self._deliver, self._bury)
        self._weights = WeightUpdates(self._steps)
        self._started = int(time.time())
        self._loading = engine.config.awaits_weights
        self.app = self._build_app()

    def _build_app(self) -> Starlette:
        routes = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route(_CHAT, self._chat_completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        for path, handler in {
            "weights/attach": self._attach,
            "weights/update": self._update,
            "weights/load": self._load,
            "logprobs": self._logprobs,
            "reset_prefix_cache": self._reset_prefix_cache,
            "sessions/open": self._open_sessions,
            "sessions/close": self._close_sessions,
        }.items():
            routes.append(Route(f"/admin/{path}", self._guarded(handler), methods=["POST"]))
        answers = {
            HttpError: self._on_http_error,
            EvergradError: self._on_evergrad_error,
            ClientDisconnect: self._on_disconnect,
            404: self._on_not_found,
            405: self._on_not_found,
        }
        return Starlette(routes=routes, exception_handlers=answers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._event_loop = asyncio.get_running_loop()
        self._steps.start()
        self._on_ready()
        yield
        await asyncio.to_thread(self._steps.stop)
        self._weights.close()

    # ---- requests

    async def _read(self, model: type[wire.BodyT], request: Request) -> wire.BodyT:
        if self._loading:
            raise HttpError(503, "loading: the version to serve is not loaded yet; ask again soon", code="loading")
        content = await _content(request, max(_MAX_BODY, _BYTES_PER_ID * self.engine.model.max_len))

        def parse() -> wire.BodyT:
            return wire.parse_body(model, _decode(content))

        return await asyncio.to_thread(parse) if len(content) > _LARGE_BODY else parse()

    async def _prompt(self, body: wire.ChatBody) -> tuple[int, ...]:
        """The conversation's ids. What cannot fit is refused before it is tokenized, which takes seconds for a large text."""
        size, limit = sum(len(message.text()) for message in body.messages), self.engine.model.max_len
        if size > limit * self.chat.longest_token:
            raise RequestError(f"the messages have {size} characters, which no {limit} tokens hold", where="messages")
        return await asyncio.to_thread(self.chat.prompt, body)

    # ---- generation

    async def _generate(self, request: Request) -> Response:
        body = await self._read(wire.GenerateBody, request)
        if body.model is not None:
            self._check_model(body.model)
        params = body.sampling_params
        asked = EngineRequest(uuid.uuid4().hex, body.token_ids, params.sampling(), body.session_id, params.n, body.drawn)
        if not body.stream:
            answers = await self._complete(request, asked)
            return _reply(generated.whole(_new_id("gen"), len(body.token_ids), answers))
        bursts = self._bursts(asked)
        first = await _first(bursts)
        pieces = generated.pieces(_new_id("gen"), len(body.token_ids), params.n, _chain(first, bursts))
        return StreamingResponse(_or_error(pieces), media_type="text/event-stream")

    async def _complete(self, request: Request, asked: EngineRequest) -> list[Answer]:
        """All completions of one request; aborted in the engine when the client goes away."""
        answers = [Answer() for _ in range(asked.n)]

        async def collect() -> None:
            async for burst in self._bursts(asked):
                for event in burst:
                    answers[event.index].add(event)

        work = asyncio.create_task(collect())
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise HttpError(499, "the client closed the connection", code="client_closed")
            await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        return answers

    async def _bursts(self, asked: EngineRequest) -> AsyncGenerator[list[Event], None]:
        """Events of one request, all that wait at a time, until its last completion ends. Left early, it aborts the request."""
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._queues[asked.request_id] = queue
        left = asked.n
        try:
            await asyncio.wrap_future(self._steps.submit(asked))
            while left:
                waiting = [await queue.get()]
                while not queue.empty():
                    waiting.append(queue.get_nowait())
                events, failure = _until_failure(waiting)
                left -= sum(event.finish_reason is not None for event in events)
                if events:
                    yield events
                if failure is not None:
                    raise failure
        finally:
            del self._queues[asked.request_id]
            if left:
                # Not waited for: this may run while the task is being cancelled.
                self._steps.abort(asked.request_id)

    def _deliver(self, events: list[Event]) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def _bury(self, error: Exception) -> None:
        def tell() -> None:
            for queue in self._queues.values():
                queue.put_nowait(error)
            self._on_death(error)

        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(tell)

    # ---- the OpenAI wire

    async def _models(self, _: Request) -> Response:
        data = [
            {"id": name, "object": "model", "created": self._started, "owned_by": "evergrad", "root": self.engine.config.model}
            for name in (() if self._loading else self.served_names)
        ]
        return _reply({"object": "list", "data": data})

    async def _chat_completions(self, request: Request) -> Response:
        body = await self._read(wire.ChatBody, request)
        self._check_model(body.model)
        token_ids = await self._prompt(body)
        limit = body.max_completion_tokens or body.max_tokens or self.engine.model.max_len
        sampling = Sampling(
            body.temperature,
            body.top_p,
            max(0, body.top_k),
            limit,
            tuple(dict.fromkeys((*body.stop_token_ids, *self.chat.stop_token_ids))),
            body.seed,
        )
        reply = _ChatReply(self.chat, body, len(token_ids))
        bursts = self._bursts(EngineRequest(uuid.uuid4().hex, token_ids, sampling, body.session_id, body.n))
        events = _one_by_one(await _first(bursts), bursts)
        if body.stream:
            return StreamingResponse(_or_error(reply.stream(events)), media_type="text/event-stream")
        gone = asyncio.create_task(_disconnected(request))
        work = asyncio.create_task(reply.collect(events))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise HttpError(499, "the client closed the connection", code="client_closed")
            return _reply(await work)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _check_model(self, name: str) -> None:
        if name not in self.served_names:
            raise HttpError(
                404,
                f"the model '{name}' is not served: {nearest(name, self.served_names)}",
                code="model_not_found",
                param="model",
            )

    # ---- health

    async def _health(self, _: Request) -> Response:
        trouble = self._steps.trouble()
        status = "failing" if trouble is not None else "loading" if self._loading else "ok"
        engine = self.engine
        load = {
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "preemptions": engine.num_preemptions,
            "kv_usage": round(engine.kv_usage, 4),
            "kv_cache_tokens": engine.config.kv_cache_tokens,
        }
        body = {"status": status, "reason": trouble, "policy_version": engine.policy_version, "load": load}
        return _reply(body, 200 if status == "ok" else 503)

    async def _metrics(self, _: Request) -> Response:
        engine = self.engine
        lines = {
            "evergrad_engine_steps_total": engine.num_steps,
            "evergrad_engine_tokens_drawn_total": engine.num_drawn,
            "evergrad_engine_tokens_computed_total": engine.num_computed,
            "evergrad_engine_tokens_guessed_total": engine.num_drafted,
            "evergrad_engine_guesses_kept_total": engine.num_accepted,
            "evergrad_engine_preemptions_total": engine.num_preemptions,
            "evergrad_engine_rows_running": engine.num_running,
            "evergrad_engine_rows_waiting": engine.num_waiting,
            "evergrad_engine_lockstep_misses_total": self._steps.lockstep.num_misses,
            "evergrad_engine_policy_version": engine.policy_version,
        }
        return Response("".join(f"{name} {value}\n" for name, value in lines.items()), media_type="text/plain; version=0.0.4")

    # ---- administration

    def _guarded(self, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if self._token is None:
                raise HttpError(403, "administration is closed: the server was started without EVERGRAD_TOKEN", code="closed")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise HttpError(401, "administration needs the bearer token in EVERGRAD_TOKEN", code="unauthorized")
            body = await request.body()
            return _reply(await handler(_decode(body) if body else {}))

        return guarded

    async def _attach(self, data: Any) -> Any:
        body = wire.parse_body(wire.AttachBody, data)
        return await self._or_conflict(lambda: self._weights.attach(body.descriptor))

    async def _update(self, data: Any) -> Any:
        body = wire.parse_body(wire.UpdateBody, data)
        report = await self._or_conflict(lambda: self._weights.update(body.manifest))
        self._loading = False
        return report

    async def _load(self, data: Any) -> Any:
        body = wire.parse_body(wire.LoadBody, data)

        def rename() -> None:
            self._loading = False
            if body.served_names is not None:
                self.served_names = body.served_names

        return await self._or_conflict(lambda: self._weights.load(body.weights_uri, body.policy_version, rename))

    async def _or_conflict(self, change: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return await asyncio.to_thread(change)
        except Exception as error:
            # Whatever went wrong, nothing was committed: the old version serves on, and the caller must know why.
            version = self.engine.policy_version
            raise HttpError(409, f"{error}. Version {version} is still served", code="update_refused") from error

    async def _logprobs(self, data: Any) -> Any:
        body = wire.parse_body(wire.TokensBody, data)

        def probe() -> dict[str, Any]:
            return {"logprobs": self.engine.logprobs(body.token_ids), "policy_version": self.engine.policy_version}

        return await asyncio.wrap_future(self._steps.call(probe))

    async def _reset_prefix_cache(self, data: Any) -> Any:
        if data:
            raise ConfigError("this route takes no body", where="request body")
        await asyncio.wrap_future(self._steps.call(self.engine.reset_prefix_cache))
        return {"policy_version": self.engine.policy_version}

    async def _open_sessions(self, data: Any) -> Any:
        body = wire.parse_body(wire.SessionsBody, data)
        await asyncio.wrap_future(self._steps.open_sessions(body.ids))
        return {"open": len(self._steps.lockstep)}

    async def _close_sessions(self, data: Any) -> Any:
        body = wire.parse_body(wire.SessionsBody, data)
        await asyncio.wrap_future(self._steps.close_sessions(body.ids))
        return {"open": len(self._steps.lockstep), "lockstep_misses": self._steps.lockstep.num_misses}

    # ---- errors

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return error.response()

    async def _on_evergrad_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, EvergradError)
        if isinstance(error, (ConfigError, RequestError)):
            param = error.key if isinstance(error, ConfigError) else error.where
            if param == "token_ids" and request.url.path == _CHAT:
                param = "messages"  # of which the tokens were made
            return HttpError(400, str(error), code="invalid_request", param=param).response()
        if self._steps.trouble() is not None:
            return HttpError(503, str(error), code="engine_dead").response()
        if isinstance(error, (EngineError, TransferError)):
            return HttpError(400, str(error), code="refused", param=error.where).response()
        return HttpError(500, str(error), code="internal").response()

    async def _on_disconnect(self, request: Request, error: Exception) -> Response:
        # Nobody reads it: the client left while it was sending its body.
        return HttpError(499, "the client closed the connection", code="client_closed").response()

    async def _on_not_found(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return HttpError(status, f"there is no {request.method} {request.url.path}", code="not_found").response()


class _ChatReply:
    """Events of one request as an OpenAI chat completion, whole or as a stream."""

    def __init__(self, chat: ChatFormat, body: wire.ChatBody, num_prompt_tokens: int) -> None:
        self._chat, self._body = chat, body
        self._num_prompt_tokens = num_prompt_tokens
        self._id, self._created = _new_id("chatcmpl"), int(time.time())
        self._answers = [Answer() for _ in range(body.n)]
        self._texts = [TextStream(chat, body.stop_texts()) for _ in range(body.n)]
        self._done = [False] * body.n

    async def collect(self, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
        parts: list[list[str]] = [[] for _ in self._answers]
        reasons: list[str | None] = [None] * len(parts)
        async for index, text, reason, _ in self._pieces(events):
            parts[index].append(text)
            reasons[index] = reason or reasons[index]
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(parts[index]), "refusal": None},
                "logprobs": self._logprobs(answer, 0) if self._body.logprobs else None,
                "finish_reason": reasons[index],
            }
            for index, answer in enumerate(self._answers)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    async def stream(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
        """Server-sent events, ``[DONE]`` at the end."""
        for index in range(len(self._answers)):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        sent = [0] * len(self._answers)
        async for index, text, reason, answer in self._pieces(events):
            logprobs = None
            if self._body.logprobs:
                logprobs, sent[index] = self._logprobs(answer, sent[index]), len(answer.token_ids)
            if text or logprobs or reason:
                yield self._chunk(index, {"content": text} if text else {}, reason, logprobs)
        if self._body.stream_options.include_usage:
            yield sse({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def _pieces(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[tuple[int, str, str | None, Answer], None]:
        async with aclosing(events):
            async for event in events:
                piece = self._take(event)
                if piece is not None:
                    yield piece
                if all(self._done):
                    break

    def _take(self, event: Event) -> tuple[int, str, str | None, Answer] | None:
        index = event.index
        if self._done[index]:
            return None
        answer, text = self._answers[index], self._texts[index]
        answer.add(event)
        ended = event.finish_reason is not None
        # The stop token itself has no text, whatever the tokenizer thinks of it.
        silent = event.token_id is None or (event.finish_reason == FinishReason.STOP)
        piece = "" if silent or event.token_id is None else text.add(event.token_id)
        if ended and not text.stopped:
            piece += text.finish()
        self._done[index] = ended or text.stopped
        reason = "stop" if text.stopped else (str(event.finish_reason) if ended else None)
        return index, piece, reason, answer

    def _logprobs(self, answer: Answer, start: int) -> dict[str, Any]:
        content = []
        for token_id, logprob in zip(answer.token_ids[start:], answer.logprobs[start:], strict=True):
            text = self._chat.token_text(token_id)
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _usage(self) -> dict[str, Any]:
        return usage(self._num_prompt_tokens, self._answers)


def _reply(body: Any, status: int = 200) -> Response:
    return _AsciiResponse(body, status_code=status)


class _AsciiResponse(JSONResponse):
    """JSON in ASCII: half of a surrogate pair, quoted from a request, has no place in UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _until_failure(waiting: Iterable[Event | Exception]) -> tuple[list[Event], HttpError | None]:
    """What was drawn before the engine died or the model failed, and the error if either did."""
    events: list[Event] = []
    for each in waiting:
        if isinstance(each, Exception):
            return events, HttpError(503, f"the engine stopped: {each}", code="engine_dead")
        if each.error is not None:
            return events, HttpError(503, each.error, code="model_failed")
        events.append(each)
    return events, None


async def _first(bursts: AsyncGenerator[T, None]) -> T:
    """The first of them, which tells whether the request is good at all; after it, a status can no longer be sent."""
    try:
        return await anext(bursts)
    except BaseException:
        await bursts.aclose()
        raise


async def _chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(rest):
        yield first
        async for each in rest:
            yield each


async def _one_by_one(first: list[Event], rest: AsyncGenerator[list[Event], None]) -> AsyncGenerator[Event, None]:
    async with aclosing(_chain(first, rest)) as bursts:
        async for burst in bursts:
            for event in burst:
                yield event


async def _or_error(parts: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The stream; what goes wrong after its start is said in it, since the status is sent."""
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part
        except HttpError as error:
            yield sse(error.body)


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


async def _content(request: Request, limit: int) -> bytes:
    """The body of a request; one of more than ``limit`` bytes is refused, whether or not its length was told before."""
    length = request.headers.get("content-length", "")
    told = int(length) if length.isascii() and length.isdigit() else 0
    content, stream = bytearray(), request.stream()
    if told <= limit:
        async for chunk in stream:
            content += chunk
            if len(content) > limit:
                break
        else:
            return bytes(content)
    if "expect" not in request.headers:  # who asks before sending need not send
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                async for _ in stream:
                    pass
    raise HttpError(413, f"the body has more than the {limit} bytes that this model's context can need", code="too_large")


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}", where="request body") from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
