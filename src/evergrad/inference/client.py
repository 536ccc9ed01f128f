"""The engine as a callable: token ids in, a :class:`~evergrad.types.Completion` out. Speaks HTTP, needs no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from evergrad.inference.config import EngineError
from evergrad.types import Completion, FinishReason, PolicySpan, Sampling, Usage


class EngineClient:
    """One engine server.

    >>> engine = EngineClient("http://127.0.0.1:8000", token="secret")  # doctest: +SKIP
    >>> completion = await engine([1, 2, 3], Sampling(max_tokens=8), session_id="r1")  # doctest: +SKIP

    Every method raises :class:`EngineError` when the engine refuses, cannot be reached, or does not answer in time.

    Args:
        token: For the administrative methods; the value of EVERGRAD_TOKEN at the server.
        timeout_s: Of one call, queueing included.
    """

    def __init__(self, base_url: str, token: str | None = None, *, timeout_s: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        # As many connections as rollouts: a session that waits for a connection would hold up all others.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=False,  # an engine is ours: a proxy of the environment has no business between us and it
        )
        self._lockstep_misses = self._misses_taken = 0

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """One completion."""
        started = time.perf_counter()
        params = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": sampling.stop_token_ids,
        }
        body = {"token_ids": list(prompt_token_ids), "sampling_params": params, "session_id": session_id}
        answer = await self._post("/inference/v1/generate", body)
        try:
            return _completion(answer, time.perf_counter() - started)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"the engine's answer cannot be read: {error!r}", where=self.base_url) from error

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Has the engine map a publisher's slots."""
        return await self._post("/admin/weights/attach", {"descriptor": descriptor})

    async def update_weights(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Has the engine take a published version: ``{policy_version, pause_s, seconds}``. Refused, the old one stays."""
        return await self._post("/admin/weights/update", {"manifest": manifest})

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Has the engine read a folder: ``{policy_version, pause_s, seconds}``. Refused, the old version stays."""
        names = None if served_names is None else list(served_names)
        body = {"weights_uri": weights_uri, "policy_version": policy_version, "served_names": names}
        return await self._post("/admin/weights/load", body)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it, at temperature 1."""
        answer = await self._post("/admin/logprobs", {"token_ids": list(token_ids)})
        return [float(value) for value in answer["logprobs"]]

    async def open_sessions(self, session_ids: Iterable[str]) -> None:
        """From here on the engine steps only when each of them has a request waiting or running."""
        await self._post("/admin/sessions/open", {"ids": list(session_ids)})

    async def close_sessions(self, session_ids: Iterable[str]) -> int:
        """Stops waiting for them; returns how often the engine went on without an open session so far."""
        answer = await self._post("/admin/sessions/close", {"ids": list(session_ids)})
        # Answers may overtake each other; the count only grows.
        self._lockstep_misses = max(self._lockstep_misses, int(answer["lockstep_misses"]))
        return int(answer["lockstep_misses"])

    def take_lockstep_misses(self) -> int:
        """How often the engine went on without an open session, since this was last asked and as of the last one closed.

        Anything but 0 means that what was sampled meanwhile depended on the clock, and will not repeat bit for bit.
        """
        taken, self._misses_taken = self._misses_taken, self._lockstep_misses
        return self._lockstep_misses - taken

    async def reset_prefix_cache(self) -> None:
        """Forgets all computed prompts, so that what follows depends on nothing before."""
        await self._post("/admin/reset_prefix_cache", {})

    async def health(self) -> dict[str, Any]:
        """``{status, reason, policy_version}`` of an engine that works; answers within five seconds or raises."""
        return await self._send("GET", "/health", None, timeout=5.0)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._send("POST", path, body)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body, **options)
        except httpx.TimeoutException as error:
            raise EngineError("the engine did not answer in time", where=f"{self.base_url}{path}") from error
        except httpx.HTTPError as error:
            raise EngineError(f"the engine cannot be reached: {error!r}", where=f"{self.base_url}{path}") from error
        try:
            answer = response.json()
        except ValueError as error:
            raise EngineError(f"status {response.status_code}, not JSON", where=f"{self.base_url}{path}") from error
        if response.status_code != 200:
            detail = answer.get("error", answer)
            message = detail.get("message") if "message" in detail else detail.get("reason")
            raise EngineError(f"status {response.status_code}: {message}", where=f"{self.base_url}{path}")
        return dict(answer)


def _completion(answer: Mapping[str, Any], seconds: float) -> Completion:
    choice, usage = answer["choices"][0], answer["usage"]
    content = choice["logprobs"]["content"]
    token_ids = tuple(choice["token_ids"])
    if tuple(entry["token_id"] for entry in content) != token_ids:
        raise ValueError("token ids and logprobs do not belong together")
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(float(entry["logprob"]) for entry in content),
        finish_reason=FinishReason(choice["finish_reason"]),
        policy_spans=tuple(PolicySpan(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]),
        usage=Usage(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            completion_tokens=usage["completion_tokens"],
            seconds=seconds,
        ),
    )
