"""What servers of another make have in common: the methods of the house's own engine, over what they can do.

The walk of one version::

    attach ─▶ Arrivals ── take: proved beside the live one ──▶ pause ─▶ the server's own route ─▶ resume ──▶ keep
                                                  (an adapter: loaded beside the live one, no pause)

New requests wait while weights change, so that each is salted with the version that it begins under: what the server computed
under another is never found again. Requests under way stand still meanwhile and go on with what they have computed, as in the
house's own engine.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from evergrad.inference._folders import local_folder
from evergrad.inference._http import JsonHttp
from evergrad.inference.backends._arrivals import Arrivals, Arrived, read_folder, write_model
from evergrad.inference.client import Piece
from evergrad.inference.config import EngineError, EngineUnavailable
from evergrad.types import Completion, EvergradError, Sampling

Route = Literal["slots", "reload", "adapter"]
"""How a version gets into a server: from shared memory through its weight-transfer routes, from a folder that it reads as a
whole, or as a LoRA adapter that it loads beside the others."""

MODEL_TIMEOUT_S = 600.0
_IDLE_S = 3.0
"""How long a connection is kept; both servers keep one for five seconds."""
_CHECK_TEMPERATURE = 0.5
_CHECK_TOKENS = 8
_SAME = 1e-4
"""Nats within which two log-probabilities are of one distribution."""


class ForeignClient(ABC):
    """One server of another make, as the loop and the router see an engine. Call :meth:`open` first.

    Such a server does not step in lockstep with open sessions, so what it samples depends on when requests come; each session
    that is opened counts as one that was not waited for. A completion arrives whole, since only its end says which versions
    drew it.

    Args:
        model: Folder that the server has read; its weights are the base of what is published.
        route: How versions get in.
        scratch: Folder that the server can read too; versions that travel as files lie there.
        token: The server's key, where it wants one.
        timeout_s: Of one call, queueing included.
    """

    def __init__(
        self,
        base_url: str,
        model: Path,
        *,
        route: Route,
        scratch: Path,
        token: str | None = None,
        timeout_s: float = MODEL_TIMEOUT_S,
    ) -> None:
        self._http = JsonHttp(base_url, token, timeout_s=timeout_s, idle_s=_IDLE_S)
        self.base_url = self._http.base_url
        self.model, self.route, self._scratch = model, route, scratch
        self.policy_version = 0
        self._arrivals = Arrivals()
        self._changing = asyncio.Lock()
        self._going = asyncio.Event()
        self._going.set()
        self._broken: str | None = None
        """Why nothing is asked of the server any more: a change of weights failed half-way."""
        self._forgotten = 0
        """How often the prefix cache was given up."""
        self._open_sessions: set[str] = set()
        self._sessions = self._sessions_taken = 0
        self._adapter: str | None = None
        """Name of the one that is asked for."""
        self._adapters: dict[str, Path] = {}
        self._asking: Counter[str | None] = Counter()
        """Requests under way with each adapter."""

    # ---- what each server does in its own way

    @abstractmethod
    async def open(self) -> None:
        """Finds out whether the server can do what is asked of it, and has it serve the base as version 0.

        Raises:
            EngineError: it cannot; the message says why, and what to change.
        """

    @abstractmethod
    async def _complete(self, prompt: Sequence[int], sampling: Sampling) -> Completion: ...

    @abstractmethod
    async def _score(self, token_ids: Sequence[int]) -> list[float]: ...

    @abstractmethod
    async def _pause(self) -> None:
        """Requests under way stand still, new ones wait."""

    @abstractmethod
    async def _resume(self) -> None: ...

    @abstractmethod
    async def _reload(self, folder: Path, policy_version: int) -> None:
        """Reads whole weights from a folder over the ones before. The server is paused."""

    @abstractmethod
    async def _add_adapter(self, name: str, folder: Path) -> None:
        """Loads an adapter beside the others."""

    @abstractmethod
    async def _remove_adapter(self, name: str) -> None: ...

    @abstractmethod
    async def health(self) -> dict[str, Any]:
        """As :meth:`evergrad.inference.client.EngineClient.health`."""

    # ---- generation

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """One completion.

        Raises:
            EngineError: the server refuses it, its answer cannot be read, or texts are to end the completion.
        """
        if sampling.stop:
            # Where such a server ends, and which of the tokens it returns, has not been held against what ours does.
            raise EngineError("only Evergrad's own engine ends at texts", hint="use stop_token_ids in place of stop")
        await self._going.wait()
        self._require_whole()
        return await self._complete(prompt_token_ids, sampling)

    async def stream(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None, drawn: int = 0
    ) -> AsyncGenerator[Piece, None]:
        """One completion as a single piece.

        Args:
            drawn: How many of the prompt's last tokens an earlier try drew. The seed is another then, so that no draw is made
                twice.
        """
        if drawn and sampling.seed is not None:
            digest = blake2b(f"{sampling.seed}:{drawn}".encode(), digest_size=7).digest()
            sampling = replace(sampling, seed=int.from_bytes(digest, "big"))
        done = await self(prompt_token_ids, sampling, session_id=session_id)
        yield Piece(done.token_ids, done.logprobs, done.policy_spans, done.finish_reason, done.usage.cached_tokens)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it, at temperature 1."""
        await self._going.wait()
        self._require_whole()
        return await self._score(token_ids)

    @property
    def cache_salt(self) -> str:
        """What a request must have in common with another one to find what that one computed."""
        return f"evergrad-{self.policy_version}-{self._forgotten}"

    async def reset_prefix_cache(self) -> None:
        """From here on nothing that was computed before is found; it makes room as it grows old."""
        self._forgotten += 1

    async def open_sessions(self, session_ids: Iterable[str]) -> None:
        """Counts them: the server does not wait for them."""
        fresh = set(session_ids) - self._open_sessions
        self._open_sessions |= fresh
        self._sessions += len(fresh)

    async def close_sessions(self, session_ids: Iterable[str]) -> int:
        self._open_sessions -= set(session_ids)
        return self._sessions

    def take_lockstep_misses(self) -> int:
        """How many sessions were opened since this was last asked, none of which the server waited for."""
        taken, self._sessions_taken = self._sessions_taken, self._sessions
        return self._sessions - taken

    # ---- weights

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Attaches to a publisher on the server's behalf."""
        with _as_engine_error("the publisher cannot be used"):
            return await asyncio.to_thread(self._arrivals.attach, descriptor)

    async def update_weights(self, manifest: Mapping[str, Any], *, full_precision: bool = False) -> dict[str, Any]:
        """Has the server take a published version; what it returns is as with the house's own engine.

        Args:
            full_precision: Nothing else is done: what the server computes by is how it was started.

        Raises:
            EngineError: the version does not pass its proof, and the old one is served on; or the server failed half-way, and
                serves nothing any more.
        """
        async with self._changing:
            started = time.perf_counter()
            self._require_whole()
            with _as_engine_error(f"version {self.policy_version} is still served"):
                arrived = await asyncio.to_thread(self._arrivals.take, manifest)
            try:
                pause_s = await self._bring(arrived)
            except BaseException:
                self._arrivals.drop()
                raise
            self._arrivals.keep()
            report = {"policy_version": arrived.policy_version, "pause_s": pause_s, "seconds": time.perf_counter() - started}
            return {**report, "transfer": dict(arrived.transfer)}

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Has the server read a folder: ``{policy_version, pause_s, seconds}``. It serves under its own names alone."""
        async with self._changing:
            started, folder, pause_s = time.perf_counter(), local_folder(weights_uri), 0.0
            self._require_whole()
            is_adapter = (folder / "adapter_config.json").is_file()
            if self.route == "adapter":
                if not is_adapter:
                    raise EngineError("a server that takes adapters cannot take a whole model", where=weights_uri)
                await self._take_adapter(folder, policy_version)
            else:
                if is_adapter:
                    with _as_engine_error(f"version {self.policy_version} is still served"):
                        folder = await asyncio.to_thread(self._merged, folder, policy_version)
                pause_s = await self._while_paused(policy_version, lambda: self._reload(folder, policy_version))
                await self._discard(folder)
            return {"policy_version": policy_version, "pause_s": pause_s, "seconds": time.perf_counter() - started}

    async def pause(self) -> None:
        """Requests under way stand still, and new ones wait, until :meth:`resume`."""
        self._going.clear()
        try:
            await self._pause()
        except BaseException:
            self._going.set()
            raise

    async def resume(self) -> None:
        """Undoes :meth:`pause`."""
        await self._resume()
        self._going.set()

    async def _bring(self, arrived: Arrived) -> float:
        """Gets a version in; returns for how many seconds nothing was drawn."""
        version = arrived.policy_version
        folder = self._scratch / f"version-{version}-{time.time_ns():x}"  # a new path for each: servers remember what they read
        if self.route == "adapter":
            with _as_engine_error(f"version {self.policy_version} is still served"):
                await asyncio.to_thread(arrived.write_adapter, folder)
            await self._take_adapter(folder, version)
            return 0.0
        with _as_engine_error(f"version {self.policy_version} is still served"):
            await asyncio.to_thread(arrived.write_model, folder, self.model)
        pause_s = await self._while_paused(version, lambda: self._reload(folder, version))
        await self._discard(folder)
        return pause_s

    async def _take_adapter(self, folder: Path, policy_version: int) -> None:
        """Asks for an adapter from now on; those that no request uses any more are let go."""
        name = f"policy-{policy_version}-{time.time_ns():x}"
        await self._add_adapter(name, folder)
        self._adapter, self._adapters[name], self.policy_version = name, folder, policy_version
        for old in [each for each in self._adapters if each != name and not self._asking[each]]:
            await self._remove_adapter(old)
            await self._discard(self._adapters.pop(old))

    @contextmanager
    def _asks(self) -> Iterator[str | None]:
        """The adapter to ask for, which stays loaded for as long as the block lasts."""
        adapter = self._adapter
        self._asking[adapter] += 1
        try:
            yield adapter
        finally:
            self._asking[adapter] -= 1

    async def _discard(self, folder: Path) -> None:
        if folder.parent == self._scratch:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _while_paused(self, policy_version: int, change: Callable[[], Awaitable[None]]) -> float:
        """Makes a change that takes the place of the weights that serve; returns for how many seconds nothing was drawn.

        Raises:
            EngineError: it failed. What the server holds then is nobody's version, and nothing is asked of it any more.
        """
        started = time.perf_counter()
        await self.pause()
        try:
            await change()
        except BaseException as error:
            self._broken = f"its weights are unknown since an update to version {policy_version} failed: {error}"
            self._going.set()
            if not isinstance(error, Exception):
                raise
            raise EngineError(self._broken, where=self.base_url, hint="start the server again, then the run") from error
        self.policy_version = policy_version
        await self.resume()
        return time.perf_counter() - started

    def _merged(self, adapter: Path, policy_version: int) -> Path:
        folder = self._scratch / f"version-{policy_version}-{time.time_ns():x}"
        write_model(folder, self.model, *read_folder(adapter, self.model))
        return folder

    # ---- the server

    async def require_own_distribution(self, prompt: Sequence[int]) -> None:
        """Has the server draw a few tokens at a low temperature, and compares what it says of them with what it says at 1.

        Raises:
            EngineError: they are the same, so that log-probabilities are not of the distribution that was drawn from.
        """
        drawn = await self._complete(prompt, Sampling(temperature=_CHECK_TEMPERATURE, max_tokens=_CHECK_TOKENS, seed=1))
        plain = (await self._score([*prompt, *drawn.token_ids]))[len(prompt) - 1 :]
        told = [pair for pair in zip(drawn.logprobs, plain, strict=True) if pair[1] < -0.1]
        if told and all(abs(own - other) < _SAME for own, other in told):
            raise EngineError(
                "the server's log-probabilities leave the temperature out, so they are not those that tokens were drawn with",
                where=self.base_url,
                hint=self._processed_hint,
            )

    _processed_hint = ""
    """How the server is told to give the log-probabilities of what it draws from."""

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise EngineUnavailable(self._broken, where=self.base_url)

    async def close(self) -> None:
        for folder in self._adapters.values():
            await self._discard(folder)
        await asyncio.to_thread(self._arrivals.close)
        await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@contextmanager
def _as_engine_error(consequence: str) -> Iterator[None]:
    """What the house's own engine answers when it refuses: the cause, and that nothing has changed."""
    try:
        yield
    except EngineError:
        raise
    except EvergradError as error:
        raise EngineError(f"{error}. So {consequence}") from error
