"""Reading requests and writing answers: limits, errors in OpenAI's shape, server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from evergrad.config import ConfigError

T = TypeVar("T")

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
        return reply(self.body, self.status)


class _AsciiResponse(JSONResponse):
    """JSON in ASCII: half of a surrogate pair, quoted from a request, has no place in UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def reply(body: Any, status: int = 200) -> Response:
    return _AsciiResponse(body, status_code=status)


def sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def stream(parts: AsyncGenerator[str, None]) -> Response:
    """Server-sent events as they come; what goes wrong after the start is said among them, since the status is sent."""

    async def safe() -> AsyncGenerator[str, None]:
        async with aclosing(parts):
            try:
                async for part in parts:
                    yield part
            except HttpError as error:
                yield sse(error.body)

    return StreamingResponse(safe(), media_type="text/event-stream")


async def content(request: Request, limit: int) -> bytes:
    """The body of a request.

    Raises:
        HttpError: it has more than ``limit`` bytes, whether or not its length was told before.
    """
    length = request.headers.get("content-length", "")
    told = int(length) if length.isascii() and length.isdigit() else 0
    found, pieces = bytearray(), request.stream()
    if told <= limit:
        async for chunk in pieces:
            found += chunk
            if len(found) > limit:
                break
        else:
            return bytes(found)
    if "expect" not in request.headers:  # who asks before sending need not send
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                async for _ in pieces:
                    pass
    raise HttpError(413, f"the body has more than the {limit} bytes that this model's context can need", code="too_large")


def decode(body: bytes) -> Any:
    """
    Raises:
        ConfigError: not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}", where="request body") from error


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; cancelled when the client goes away.

    Raises:
        HttpError: the client is gone.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(499, "the client closed the connection", code="client_closed")
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
