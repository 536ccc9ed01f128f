"""Administration: weights, adapters, pauses, probes and sessions, for who has the token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evergrad.config import ConfigError
from evergrad.inference import _wire as wire
from evergrad.inference._loop import StepLoop
from evergrad.inference._web import HttpError, decode, reply
from evergrad.inference._weights import DRAIN_S, WeightUpdates
from evergrad.inference.engine import Engine
from evergrad.transfer.process import in_passing_thread


class Administration:
    """The routes under ``/admin``.

    Args:
        token: Demanded as a bearer; None closes the routes.
        on_new_weights: Called after an update.
        on_load: Called between the same two steps, with the new names if there are any, and the system prompt.
    """

    def __init__(
        self,
        engine: Engine,
        steps: StepLoop,
        token: str | None,
        on_new_weights: Callable[[], None],
        on_load: Callable[[tuple[str, ...] | None, str], None],
    ) -> None:
        self._engine, self._steps, self._token = engine, steps, token
        self._on_new_weights, self._on_load = on_new_weights, on_load
        self.weights = WeightUpdates(steps)

    def routes(self) -> list[Route]:
        handlers = {
            "weights/attach": self._attach,
            "weights/update": self._update,
            "weights/load": self._load,
            "adapters/load": self._load_adapter,
            "adapters/drop": self._drop_adapter,
            "pause": self._pause,
            "resume": self._resume,
            "logprobs": self._logprobs,
            "reset_prefix_cache": self._reset_prefix_cache,
            "sessions/open": self._open_sessions,
            "sessions/close": self._close_sessions,
        }
        return [Route(f"/admin/{path}", self._guarded(handler), methods=["POST"]) for path, handler in handlers.items()]

    def _guarded(self, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if self._token is None:
                raise HttpError(403, "administration is closed: the server was started without EVERGRAD_TOKEN", code="closed")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise HttpError(401, "administration needs the bearer token in EVERGRAD_TOKEN", code="unauthorized")
            body = await request.body()
            return reply(await handler(decode(body) if body else {}))

        return guarded

    # ---- weights and adapters

    async def _attach(self, data: Any) -> Any:
        body = wire.parse_body(wire.AttachBody, data)
        return await self._or_conflict(lambda: self.weights.attach(body.descriptor))

    async def _update(self, data: Any) -> Any:
        body = wire.parse_body(wire.UpdateBody, data)
        report = await self._or_conflict(
            lambda: self.weights.update(body.manifest, body.mode, full_precision=body.full_precision)
        )
        self._on_new_weights()
        return report

    async def _load(self, data: Any) -> Any:
        body = wire.parse_body(wire.LoadBody, data)

        def loaded() -> None:
            self._on_load(body.served_names, body.system_prompt)

        return await self._or_conflict(lambda: self.weights.load(body.weights_uri, body.policy_version, loaded, body.mode))

    async def _load_adapter(self, data: Any) -> Any:
        body = wire.parse_body(wire.AdapterBody, data)
        return await self._or_conflict(lambda: self.weights.load_adapter(body.name, body.path))

    async def _drop_adapter(self, data: Any) -> Any:
        body = wire.parse_body(wire.AdapterName, data)
        await asyncio.wrap_future(self._steps.call(lambda: self._engine.drop_adapter(body.name)))
        return {"adapters": sorted(self._engine.adapters)}

    async def _or_conflict(self, change: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return await asyncio.to_thread(in_passing_thread, change)
        except Exception as error:
            # Whatever went wrong, nothing was committed: the old version serves on, and the caller must know why.
            version = self._engine.policy_version
            raise HttpError(409, f"{error}. Version {version} is still served", code="update_refused") from error

    # ---- steps

    async def _pause(self, data: Any) -> Any:
        body = wire.parse_body(wire.PauseBody, data)
        if body.mode == "drain":
            try:
                await asyncio.wait_for(asyncio.wrap_future(self._steps.drain()), DRAIN_S)
            except TimeoutError as error:
                await asyncio.wrap_future(self._steps.resume())
                raise HttpError(409, f"requests did not end within {DRAIN_S:.0f} s", code="not_drained") from error
        await asyncio.wrap_future(self._steps.pause(ending_all=body.mode == "abort"))
        return {"paused": True, "policy_version": self._engine.policy_version}

    async def _resume(self, data: Any) -> Any:
        _require_no_body(data)
        await asyncio.wrap_future(self._steps.resume())
        return {"paused": False, "policy_version": self._engine.policy_version}

    async def _logprobs(self, data: Any) -> Any:
        body = wire.parse_body(wire.TokensBody, data)

        def probe() -> dict[str, Any]:
            logprobs = self._engine.logprobs(body.token_ids, body.adapter, exact=True)
            return {"logprobs": logprobs, "policy_version": self._engine.policy_version}

        return await asyncio.wrap_future(self._steps.call(probe))

    async def _reset_prefix_cache(self, data: Any) -> Any:
        _require_no_body(data)
        await asyncio.wrap_future(self._steps.call(self._engine.reset_prefix_cache))
        return {"policy_version": self._engine.policy_version}

    async def _open_sessions(self, data: Any) -> Any:
        body = wire.parse_body(wire.SessionsBody, data)
        await asyncio.wrap_future(self._steps.open_sessions(body.ids))
        return {"open": len(self._steps.lockstep)}

    async def _close_sessions(self, data: Any) -> Any:
        body = wire.parse_body(wire.SessionsBody, data)
        await asyncio.wrap_future(self._steps.close_sessions(body.ids))
        return {"open": len(self._steps.lockstep), "lockstep_misses": self._steps.lockstep.num_misses}


def _require_no_body(data: Any) -> None:
    if data:
        raise ConfigError("this route takes no body", where="request body")
