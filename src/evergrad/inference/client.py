"""The engine as a callable: token ids in, a :class:`~evergrad.types.Completion` out. Speaks HTTP, needs no torch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from aiohttp import ClientError, ClientTimeout

from evergrad.inference._http import CONNECT_S, UNREADABLE, JsonHttp, refusal
from evergrad.inference.config import EngineError, EngineUnavailable, UpdateMode
from evergrad.types import Completion, FinishReason, PolicySpan, Sampling, Usage

_LOAD = {"running": int, "waiting": int, "preemptions": int, "kv_usage": float, "kv_cache_tokens": int}


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a completion that came since the piece before it.

    >>> Piece((7, 8), (-0.1, -0.2), (PolicySpan(3, 0, 2),)).finish_reason is None
    True
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token."""
    policy_spans: tuple[PolicySpan, ...]
    """Of these tokens; places count from the completion's start."""
    finish_reason: FinishReason | None = None
    """Only on the last piece."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed; only on the last piece."""


class EngineControls(Protocol):
    """What is asked of one engine, or of several that look like one, besides completions."""

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]: ...

    async def update_weights(self, manifest: Mapping[str, Any], *, full_precision: bool = False) -> dict[str, Any]: ...

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: Sequence[str] | None = None
    ) -> dict[str, Any]: ...

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]: ...

    async def open_sessions(self, session_ids: Iterable[str]) -> None: ...

    async def close_sessions(self, session_ids: Iterable[str]) -> int: ...

    def take_lockstep_misses(self) -> int: ...

    async def reset_prefix_cache(self) -> None: ...

    async def health(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class Completes(Protocol):
    """What answers requests: an engine, several behind a router, or two versions behind one front."""

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion: ...


class InferenceClient(EngineControls, Completes, Protocol):
    """What generates for the loop: one engine (:class:`EngineClient`), or several behind a
    :class:`~evergrad.inference.router.Router`. The methods are those of :class:`EngineClient`."""


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
        self._http = JsonHttp(base_url, token, timeout_s=timeout_s)
        self.base_url = self._http.base_url
        self._lockstep_misses = self._misses_taken = 0
        self._ending: list[str] = []
        self._farewell: asyncio.Task[int] | None = None
        """Closes what is in ``_ending`` as soon as the farewell before it was answered."""
        self._one_farewell = asyncio.Lock()

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """One completion."""
        started = time.perf_counter()
        answer = await self._http.post("/inference/v1/generate", _body(prompt_token_ids, sampling, session_id))
        try:
            return read_completion(answer, time.perf_counter() - started)
        except UNREADABLE as error:
            raise EngineError(f"the engine's answer cannot be read: {error!r}", where=self.base_url) from error

    async def stream(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None, drawn: int = 0
    ) -> AsyncGenerator[Piece, None]:
        """One completion in pieces, as they are drawn; the last one has the finish reason.

        Args:
            drawn: How many of the prompt's last tokens an earlier try at the same completion drew. With a seed, what follows
                is what would have followed there.

        Raises:
            EngineUnavailable: the engine went away; the pieces so far stay valid.
        """
        path = "/inference/v1/generate"
        body = {**_body(prompt_token_ids, sampling, session_id), "stream": True, "drawn": drawn}
        ended = False
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._http.timeout_s)
        try:
            async with self._http.session.post(f"{self.base_url}{path}", json=body, timeout=timeout) as response:
                if response.status != 200:
                    self._http.read(response.status, await response.read(), path)
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    answer = json.loads(line.removeprefix(b"data: "))
                    if "error" in answer:
                        raise refusal(answer, 503, f"{self.base_url}{path}")
                    piece = _piece(answer)
                    ended = piece.finish_reason is not None
                    yield piece
        except TimeoutError as error:
            raise EngineUnavailable("the engine did not go on in time", where=f"{self.base_url}{path}") from error
        except ClientError as error:
            raise EngineUnavailable(f"the engine cannot be reached: {error!r}", where=f"{self.base_url}{path}") from error
        except UNREADABLE as error:
            raise EngineError(f"the engine's answer cannot be read: {error!r}", where=self.base_url) from error
        if not ended:
            raise EngineUnavailable("the answer broke off", where=f"{self.base_url}{path}")

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Has the engine attach to a publisher."""
        return await self._http.post("/admin/weights/attach", {"descriptor": descriptor})

    async def update_weights(
        self, manifest: Mapping[str, Any], *, mode: UpdateMode = "keep", full_precision: bool = False
    ) -> dict[str, Any]:
        """Has the engine take a published version; refused, the old one stays.

        Args:
            mode: What becomes of the requests that run: they go on, end first, or end at once.
            full_precision: This version is not quantized, whatever the engine's configuration says.

        Returns:
            ``{policy_version, pause_s, stage_s, seconds, transfer}``: how long no token could be drawn, how long the
            engine made ready what had arrived, beside its steps, all of it, and what
            :class:`~evergrad.transfer.link.Receipt` says of bytes, rate, and the link's own.
        """
        body = {"manifest": manifest, "mode": mode, "full_precision": full_precision}
        return await self._http.post("/admin/weights/update", body)

    async def load_weights(
        self,
        weights_uri: str,
        policy_version: int,
        served_names: Sequence[str] | None = None,
        system_prompt: str = "",
        mode: UpdateMode = "keep",
    ) -> dict[str, Any]:
        """Has the engine read a folder: ``{policy_version, pause_s, seconds}``. Refused, the old version stays.

        Args:
            system_prompt: Added to the system message of every chat from then on; requests in tokens are as they are.
            mode: As for :meth:`update_weights`.
        """
        body: dict[str, Any] = {"weights_uri": weights_uri, "policy_version": policy_version, "system_prompt": system_prompt}
        body |= {"served_names": None if served_names is None else list(served_names), "mode": mode}
        return await self._http.post("/admin/weights/load", body)

    async def load_adapter(self, name: str, path: str) -> dict[str, Any]:
        """Has the engine read a PEFT folder of its own machine; from then on requests may ask for it by ``name``."""
        return await self._http.post("/admin/adapters/load", {"name": name, "path": path})

    async def drop_adapter(self, name: str) -> dict[str, Any]:
        """Requests can ask for it no more; those that have it keep it. Returns ``{adapters}``, the names that are left."""
        return await self._http.post("/admin/adapters/drop", {"name": name})

    async def pause(self, mode: UpdateMode = "keep") -> dict[str, Any]:
        """Draws no token until :meth:`resume`: ``{paused, policy_version}``. Requests that come meanwhile wait.

        Args:
            mode: What becomes of the requests that run: they stay as they are, end first, or end at once.
        """
        return await self._http.post("/admin/pause", {"mode": mode})

    async def resume(self) -> dict[str, Any]:
        """Goes on after :meth:`pause`."""
        return await self._http.post("/admin/resume", {})

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it, at temperature 1, under the weights themselves:
        a proof of which they are, also where ``quantization`` draws tokens from what is only near to them."""
        answer = await self._http.post("/admin/logprobs", {"token_ids": list(token_ids)})
        return [float(value) for value in answer["logprobs"]]

    async def open_sessions(self, session_ids: Iterable[str]) -> None:
        """From here on the engine steps only when each of them has a request waiting or running."""
        await self._http.post("/admin/sessions/open", {"ids": list(session_ids)})

    async def close_sessions(self, session_ids: Iterable[str]) -> int:
        """Stops waiting for them; returns how often the engine went on without an open session so far.

        Sessions that end while an answer is awaited are closed by one request.
        """
        self._ending.extend(session_ids)
        if self._farewell is None:
            self._farewell = asyncio.create_task(self._close_ending())
        return await asyncio.shield(self._farewell)

    async def _close_ending(self) -> int:
        async with self._one_farewell:
            self._farewell, ids, self._ending = None, self._ending, []
            answer = await self._http.post("/admin/sessions/close", {"ids": ids})
        self._lockstep_misses = int(answer["lockstep_misses"])
        return self._lockstep_misses

    def take_lockstep_misses(self) -> int:
        """How often the engine went on without an open session, since this was last asked and as of the last one closed.

        Anything but 0 means that what was sampled meanwhile depended on the clock, and will not repeat bit for bit.
        """
        taken, self._misses_taken = self._misses_taken, self._lockstep_misses
        return self._lockstep_misses - taken

    async def reset_prefix_cache(self) -> None:
        """Forgets all computed prompts, so that what follows depends on nothing before."""
        await self._http.post("/admin/reset_prefix_cache", {})

    async def health(self) -> dict[str, Any]:
        """``{status, reason, policy_version, load}`` of an engine that works; answers within five seconds or raises.

        ``load`` has the rows ``running`` and ``waiting``, ``preemptions`` so far, ``kv_usage`` (share of the cache that rows
        hold) and ``kv_cache_tokens`` (its size)."""
        answer = await self._http.send("GET", "/health", None, timeout_s=5.0)
        try:
            load = {key: read(answer["load"][key]) for key, read in _LOAD.items()}
            return {**answer, "policy_version": int(answer["policy_version"]), "load": load}
        except UNREADABLE as error:
            raise EngineError(f"the engine's answer cannot be read: {error!r}", where=f"{self.base_url}/health") from error

    async def close(self) -> None:
        await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _body(prompt_token_ids: Sequence[int], sampling: Sampling, session_id: str | None) -> dict[str, Any]:
    params = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
    }
    return {"token_ids": list(prompt_token_ids), "sampling_params": params, "session_id": session_id}


def _piece(answer: Mapping[str, Any]) -> Piece:
    token_ids, logprobs, spans, reason = _drawn(answer["choices"][0])
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Piece(token_ids, logprobs, spans, reason, details.get("cached_tokens", 0))


def _drawn(choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...], tuple[PolicySpan, ...], FinishReason | None]:
    """Token ids, their logprobs and versions, and the finish reason."""
    content, token_ids, reason = choice["logprobs"]["content"], tuple(choice["token_ids"]), choice["finish_reason"]
    if tuple(entry["token_id"] for entry in content) != token_ids:
        raise ValueError("token ids and logprobs do not belong together")
    spans = tuple(PolicySpan(int(span["version"]), span["start"], span["end"]) for span in choice["weight_versions"])
    return (
        token_ids,
        tuple(float(entry["logprob"]) for entry in content),
        spans,
        None if reason is None else FinishReason(reason),
    )


def read_completion(answer: Mapping[str, Any], seconds: float) -> Completion:
    """The first choice of an answer of ``/inference/v1/generate``, whoever gave it. Raises one of ``_http.UNREADABLE``."""
    usage = answer["usage"]
    token_ids, logprobs, spans, reason = _drawn(answer["choices"][0])
    if reason is None:
        raise ValueError("no finish reason")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        policy_spans=spans,
        usage=Usage(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            completion_tokens=usage["completion_tokens"],
            seconds=seconds,
        ),
    )
