"""The engine's HTTP server: generation and chat for everyone on the machine, administration for who has the token."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from evergrad.config import ConfigError, nearest
from evergrad.inference import _generated as generated
from evergrad.inference import _wire as wire
from evergrad.inference._admin import Administration
from evergrad.inference._chat import ChatFormat
from evergrad.inference._exchange import Exchange, events_of
from evergrad.inference._metrics import Metrics
from evergrad.inference._openai import ChatReply, Echo, TextReply, head_of_completions, new_id
from evergrad.inference._openai_wire import ChatBody, CompletionBody
from evergrad.inference._web import HttpError, content, decode, reply, stream, unless_gone
from evergrad.inference.config import EngineError
from evergrad.inference.engine import Engine, RequestError
from evergrad.inference.engine import Request as EngineRequest
from evergrad.transfer import TransferError
from evergrad.types import EvergradError

_CHAT = "/v1/chat/completions"
_MAX_BODY = 1 << 20
"""Bytes of a request's body, where the context does not need more."""
_BYTES_PER_ID = 16
_LARGE_BODY = 1 << 16
"""Bytes from which on a body is read in a thread, so that others are answered meanwhile."""


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
        self.chat = ChatFormat(Path(engine.config.model), engine.model.eos_token_ids, engine.text)
        self.served_names: tuple[str, ...] = tuple(dict.fromkeys((*engine.config.served_names, Path(engine.config.model).name)))
        self.system_prompt = ""
        """Of the version that is loaded; adapters under names of their own have none."""
        self._on_ready = on_ready
        self._metrics = Metrics(engine)
        self._exchange = Exchange(engine, self._metrics, on_death)
        self._steps = self._exchange.steps
        self._metrics.watch(self._steps)
        self._admin = Administration(engine, self._steps, token, self._end_loading, self._take_version)
        self._started = int(time.time())
        self._loading = engine.config.awaits_weights
        self.app = self._build_app()

    def _build_app(self) -> Starlette:
        routes = [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route(_CHAT, self._chat_completions, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
            *self._admin.routes(),
        ]
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
        self._exchange.start()
        self._on_ready()
        yield
        await self._exchange.stop()
        self._admin.weights.close()

    def _end_loading(self) -> None:
        self._loading = False

    def _take_version(self, names: tuple[str, ...] | None, system_prompt: str) -> None:
        self._end_loading()
        self.system_prompt = system_prompt
        if names is not None:
            self.served_names = names

    # ---- requests

    async def _read(self, model: type[wire.BodyT], request: Request) -> wire.BodyT:
        if self._loading:
            raise HttpError(503, "loading: the version to serve is not loaded yet; ask again soon", code="loading")
        body = await content(request, max(_MAX_BODY, _BYTES_PER_ID * self.engine.model.max_len))

        def parse() -> wire.BodyT:
            return wire.parse_body(model, decode(body))

        return await asyncio.to_thread(parse) if len(body) > _LARGE_BODY else parse()

    def _adapter(self, name: str) -> str | None:
        """The adapter that a model's name stands for; None is the model itself."""
        if name in self.served_names:
            return None
        if name in self.engine.adapters:
            return name
        known = (*self.served_names, *self.engine.adapters)
        raise HttpError(404, f"the model '{name}' is not served: {nearest(name, known)}", code="model_not_found", param="model")

    def _require_fit(self, size: int, where: str) -> None:
        """Refuses a text that cannot fit before it is tokenized, which takes seconds for a large one."""
        limit = self.engine.model.max_len
        if size > limit * self.engine.text.longest_token:
            raise RequestError(f"the {where} has {size} characters, which no {limit} tokens hold", where=where)

    async def _compiled(self, grammar: str | None) -> str | None:
        """The same, made ready in a thread: a large schema takes up to a second, which no step shall wait for."""
        if grammar is not None:
            await asyncio.to_thread(self.engine.check_grammar, grammar)
        return grammar

    async def _prompt_logprobs(self, token_ids: tuple[int, ...], adapter: str | None) -> list[float]:
        return await asyncio.wrap_future(self._steps.call(lambda: self.engine.logprobs(token_ids, adapter)))

    # ---- generation

    async def _generate(self, request: Request) -> Response:
        body = await self._read(wire.GenerateBody, request)
        adapter = None if body.model is None else self._adapter(body.model)
        params = body.sampling_params
        asked = EngineRequest(
            uuid.uuid4().hex,
            body.token_ids,
            params.sampling(params.max_tokens),
            body.session_id,
            params.n,
            body.drawn,
            await self._compiled(params.grammar()),
            adapter,
        )
        if body.stream:
            if params.prompt_logprobs is not None:
                raise ConfigError("prompt_logprobs cannot be streamed", where="request body", key="stream")
            bursts = await self._exchange.opened(asked)
            return stream(generated.pieces(new_id("gen"), len(body.token_ids), params.n, bursts))
        answers = await unless_gone(request, self._exchange.complete(asked))
        logprobs = None if params.prompt_logprobs is None else await self._prompt_logprobs(body.token_ids, adapter)
        return reply(generated.whole(new_id("gen"), body.token_ids, answers, logprobs))

    # ---- the OpenAI wire

    async def _models(self, _: Request) -> Response:
        head = {"object": "model", "created": self._started, "owned_by": "evergrad"}
        names = () if self._loading else self.served_names
        data = [{"id": name, **head, "root": self.engine.config.model, "parent": None} for name in names]
        adapters = () if self._loading else sorted(self.engine.adapters)
        data += [{"id": name, **head, "root": name, "parent": next(iter(names), None)} for name in adapters]
        return reply({"object": "list", "data": data})

    async def _chat_completions(self, request: Request) -> Response:
        body = await self._read(ChatBody, request)
        adapter = self._adapter(body.model)
        self._require_fit(sum(len(message.text()) for message in body.messages), "messages")
        system_prompt = self.system_prompt if adapter is None else ""
        token_ids = await asyncio.to_thread(self.chat.prompt, body, system_prompt)
        limit = body.max_completion_tokens or body.max_tokens or self.engine.model.max_len
        asked = EngineRequest(
            uuid.uuid4().hex,
            token_ids,
            body.sampling(limit, self.chat.stop_token_ids),
            body.session_id,
            body.n,
            grammar=await self._compiled(self.chat.grammar(body)),
            adapter=adapter,
        )
        answer = ChatReply(self.chat, body, len(token_ids))
        events = events_of(await self._exchange.opened(asked))
        if body.stream:
            return stream(answer.stream(events))
        return reply(await unless_gone(request, answer.collect(events)))

    async def _completions(self, request: Request) -> Response:
        body = await self._read(CompletionBody, request)
        adapter = self._adapter(body.model)
        prompts = [await self._completion_prompt(prompt) for prompt in body.prompts()]
        sampling = body.sampling(max(1, body.max_tokens), self.engine.model.eos_token_ids)
        asked = [
            EngineRequest(uuid.uuid4().hex, token_ids, sampling, body.session_id, body.n, adapter=adapter)
            for token_ids in prompts
        ]
        if body.stream:
            events = events_of(await self._exchange.opened(asked[0]))
            return stream(TextReply(self.engine.text, body, len(prompts[0]), sampling.stop_token_ids).stream(events))

        async def answer(place: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            token_ids = prompts[place]
            echo = await self._echo(body, token_ids, adapter)
            text = TextReply(self.engine.text, body, len(token_ids), sampling.stop_token_ids, echo, place * body.n)
            events = events_of(self._exchange.bursts(asked[place])) if body.max_tokens else None
            return await text.collect(events), text.usage()

        async def answer_all() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(place)) for place in range(len(prompts))]
            return [task.result() for task in tasks]

        answers = await unless_gone(request, answer_all())
        choices = [choice for each, _ in answers for choice in each]
        return reply({**head_of_completions(body), "choices": choices, "usage": generated.total(use for _, use in answers)})

    async def _completion_prompt(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        self._require_fit(len(prompt), "prompt")
        return tuple(await asyncio.to_thread(self.engine.text.ids_of, prompt))

    async def _echo(self, body: CompletionBody, token_ids: tuple[int, ...], adapter: str | None) -> Echo | None:
        if not body.echo:
            return None
        if body.logprobs is None:
            return Echo(token_ids, None)
        return Echo(token_ids, (None, *await self._prompt_logprobs(token_ids, adapter)))

    # ---- health

    async def _health(self, _: Request) -> Response:
        trouble, engine = self._steps.trouble(), self.engine
        status = "ok"
        if trouble is not None:
            status = "failing"
        elif self._loading:
            status = "loading"
        elif self._steps.paused:
            status = "paused"
        load = {
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "preemptions": engine.num_preemptions,
            "kv_usage": round(engine.kv_usage, 4),
            "kv_cache_tokens": engine.config.kv_cache_tokens,
        }
        body = {"status": status, "reason": trouble, "policy_version": engine.policy_version, "load": load}
        if engine.config.quantization is not None:
            body["quantization"] = engine.quantization
        if engine.notice is not None:
            body["notice"] = engine.notice
        return reply(body, 200 if status in ("ok", "paused") else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    # ---- errors

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return error.response()

    async def _on_evergrad_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, EvergradError)
        if isinstance(error, (ConfigError, RequestError)):
            param = error.key if isinstance(error, ConfigError) else error.where
            if param == "token_ids" and request.url.path.startswith("/v1/"):
                param = "messages" if request.url.path == _CHAT else "prompt"  # of which the tokens were made
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
