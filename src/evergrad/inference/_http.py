"""JSON over HTTP with an engine server, whoever made it: what goes wrong is an :class:`EngineError` with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from evergrad.inference.config import EngineError, EngineUnavailable

UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer raises that is not as it should be."""
CONNECT_S = 10.0


class JsonHttp:
    """One server's routes.

    Args:
        token: Sent as a bearer with every request.
        timeout_s: Of one call, queueing included.
        idle_s: For which a connection is kept; less than the server does, which would otherwise close it under a request.
    """

    def __init__(self, base_url: str, token: str | None = None, *, timeout_s: float = 600.0, idle_s: float = 30.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s, self._idle_s = timeout_s, idle_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: ClientSession | None = None

    @property
    def session(self) -> ClientSession:
        """Opened in the event loop that first needs it."""
        if self._session is None:
            self._session = ClientSession(
                headers=self._headers,
                # As many connections as rollouts: a session that waits for a connection would hold up all others.
                connector=TCPConnector(limit=0, keepalive_timeout=self._idle_s),
                trust_env=False,  # an engine is ours: a proxy of the environment has no business between us and it
                read_bufsize=2**20,
            )
        return self._session

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send("POST", path, body)

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The answer's JSON object.

        Raises:
            EngineError: any status but 200, or no JSON object.
            EngineUnavailable: no answer, or one that says that another server may do the same work.
        """
        status, content = await self.exchange(method, path, body, timeout_s)
        return self.read(status, content, path)

    async def tell(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> str:
        """As :meth:`send`, where a good answer need not be JSON: its text."""
        status, content = await self.exchange(method, path, body, timeout_s)
        if status != 200:
            self.read(status, content, path)
        return content.decode(errors="replace")

    async def exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """Status and content of the answer.

        Raises:
            EngineUnavailable: there is none.
        """
        timeout = ClientTimeout(total=timeout_s or self.timeout_s, sock_connect=CONNECT_S)
        try:
            async with self.session.request(method, f"{self.base_url}{path}", json=body, timeout=timeout) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnavailable("the engine did not answer in time", where=f"{self.base_url}{path}") from error
        except ClientError as error:
            raise EngineUnavailable(f"the engine cannot be reached: {error!r}", where=f"{self.base_url}{path}") from error

    def read(self, status: int, content: bytes, path: str) -> dict[str, Any]:
        """The answer's JSON object; any status but 200 is an error."""
        where = f"{self.base_url}{path}"
        try:
            answer = json.loads(content)
        except ValueError as error:
            kind = EngineUnavailable if status == 503 else EngineError
            raise kind(f"status {status}, not JSON", where=where) from error
        if not isinstance(answer, dict):
            raise EngineError(f"status {status}, no JSON object", where=where)
        if status != 200:
            raise refusal(answer, status, where)
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def refusal(answer: Mapping[str, Any], status: int, where: str) -> EngineError:
    """What a server's refusal says, as an error."""
    detail = answer.get("error", answer)
    if not isinstance(detail, Mapping):
        detail = {"message": detail}
    message = next((detail[key] for key in ("message", "reason", "detail") if key in detail), None)
    # A model that gives no numbers would give none elsewhere: the weights are the same.
    elsewhere = status == 503 and detail.get("code") != "model_failed"
    return (EngineUnavailable if elsewhere else EngineError)(f"status {status}: {message}", where=where)
