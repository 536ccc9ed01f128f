"""Engines without a model, in time that costs nothing: what a router is tested and measured against.

:class:`VirtualClock` is an event loop that never sleeps: when nothing can run, its clock jumps to the next timer. On it,
:class:`SimulatedEngine` batches, prefills in chunks, shares prefixes, evicts, preempts, dies and takes new weights as an engine
does, and says what its steps would have taken. Tokens are a function of seed and place, so that a completion that was moved
from one engine to another can be compared with one that was not.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

from evergrad.inference import EngineError, EngineUnavailable, Piece
from evergrad.types import FinishReason, PolicySpan, Sampling

T = TypeVar("T")

BLOCK = 16
VOCABULARY = 32_000


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Looks at files without waiting, and has the clock jump instead."""

    clock: VirtualClock

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and nothing is left that could happen")
            self.clock.now += timeout
        return ready


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everything waits.

    >>> run_virtually(asyncio.sleep(3600.0, "an hour later, at once"))
    'an hour later, at once'
    """

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.clock = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main)


@dataclass(frozen=True)
class EngineSpeed:
    """What a step takes, and what fits. The defaults resemble an 8B model in bf16 on one 80 GB GPU."""

    step_s: float = 0.008
    """Reading the weights once."""
    row_s: float = 0.00004
    """Per sequence in the step."""
    prefill_token_s: float = 0.00004
    context_token_s: float = 4e-9
    """Per token of all contexts, whose keys and values are read."""
    kv_cache_tokens: int = 131_072
    max_rows: int = 256
    max_batch_tokens: int = 4096


@dataclass(eq=False)
class _Row:
    prompt: tuple[int, ...]
    sampling: Sampling
    drawn_before: int
    chain: list[int] = field(default_factory=list)
    """Hashes of the full blocks when it was admitted."""
    chained_as: tuple[int, int] = (0, -1)
    """Tokens and version that the chain was made of."""
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    told: int = 0
    """Tokens that the stream has given."""
    cached_tokens: int = 0
    to_prefill: int = 0
    private: int = 0
    """Blocks that nobody shares: the prompt's last part and the completion."""
    held: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    admitted_once: bool = False

    def draw(self, count: int, policy_version: int) -> None:
        start = self.drawn_before + len(self.tokens)
        self.tokens += tokens_at(self.sampling.seed, start, start + count)
        self.versions += [policy_version] * count

    @property
    def left(self) -> int:
        return self.sampling.max_tokens - len(self.tokens)

    @property
    def context(self) -> int:
        return len(self.prompt) + len(self.tokens)


def tokens_at(seed: int | None, start: int, end: int) -> list[int]:
    """The tokens that a seed draws at places ``[start, end)`` of its completion, wherever they are drawn."""
    first = (seed or 0) % 1_000_003
    return [(first * 7_919 + place * 104_729) % VOCABULARY for place in range(start, end)]


class SimulatedEngine:
    """One replica; speaks as :class:`evergrad.inference.EngineClient` does. Use inside a running event loop."""

    def __init__(self, speed: EngineSpeed | None = None, policy_version: int = 0) -> None:
        self.speed = speed or EngineSpeed()
        self.policy_version = policy_version
        self.capacity = self.speed.kv_cache_tokens // BLOCK
        self.running: list[_Row] = []
        self.waiting: deque[_Row] = deque()
        self.num_preemptions = self.num_finished = self.num_aborted = 0
        self.prefilled_tokens = 0
        self.refuses_weights = False
        self.open: set[str] = set()
        self._held: Counter[int] = Counter()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self._wake = asyncio.Event()
        self._alive = True
        self._hung = False
        self._steps: asyncio.Task[None] | None = None

    # ---- what a client has

    async def stream(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None, drawn: int = 0
    ) -> AsyncGenerator[Piece, None]:
        await self._reachable()
        prompt = tuple(prompt_token_ids)
        row = _Row(prompt, sampling, drawn)
        if -(-(len(prompt) + sampling.max_tokens) // BLOCK) > self.capacity:
            raise EngineError(f"{len(prompt)} + {sampling.max_tokens} tokens do not fit")
        self.waiting.append(row)
        self._start()
        try:
            while True:
                await row.news.wait()
                row.news.clear()
                if self._hung:
                    await asyncio.Event().wait()
                if len(row.tokens) > row.told or not self._alive:
                    done = not row.left and self._alive
                    yield _piece(row, done)
                    row.told = len(row.tokens)
                    if done:
                        return
                if not self._alive:
                    raise EngineUnavailable("the engine died")
        finally:
            if row in self.waiting or row in self.running:
                self._abort(row)

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        await self._reachable()
        return {}

    async def update_weights(self, manifest: Mapping[str, Any], *, full_precision: bool = False) -> dict[str, Any]:
        await self._reachable()
        if self.refuses_weights:
            raise EngineError("the weights were refused")
        await asyncio.sleep(0.1)
        self.policy_version = int(manifest["policy_version"])
        self._cached.clear()
        return {"policy_version": self.policy_version, "pause_s": 0.0, "seconds": 0.1}

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        return await self.update_weights({"policy_version": policy_version})

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        await self._reachable()
        return [-float(self.policy_version)] * (len(token_ids) - 1)

    async def open_sessions(self, session_ids: Iterable[str]) -> None:
        await self._reachable()
        self.open.update(session_ids)

    async def close_sessions(self, session_ids: Iterable[str]) -> int:
        await self._reachable()
        self.open.difference_update(session_ids)
        return 0

    def take_lockstep_misses(self) -> int:
        return 0

    async def reset_prefix_cache(self) -> None:
        await self._reachable()
        self._cached.clear()

    async def health(self) -> dict[str, Any]:
        await self._reachable(timeout_s=5.0)
        load = {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "preemptions": self.num_preemptions,
            "kv_usage": (len(self._held) + self._private) / self.capacity,
            "kv_cache_tokens": self.speed.kv_cache_tokens,
        }
        return {"status": "ok", "reason": None, "policy_version": self.policy_version, "load": load}

    async def close(self) -> None:
        if self._steps is not None:
            self._steps.cancel()

    # ---- what can happen to it

    def kill(self) -> None:
        """Ends it with all that it has; what was drawn by then had been sent."""
        self._alive = False
        for row in [*self.running, *self.waiting]:
            row.news.set()

    def hang(self) -> None:
        """It answers nothing more, and closes nothing."""
        self._hung = True

    def revive(self) -> None:
        """A new process in its place: nothing cached, and the first weights."""
        self._alive, self._hung, self.policy_version = True, False, 0
        self.running, self.waiting = [], deque()
        self._held, self._cached, self._private = Counter(), OrderedDict(), 0
        if self._steps is not None:
            self._steps.cancel()
            self._steps = None

    async def _reachable(self, timeout_s: float = 600.0) -> None:
        if self._hung:
            await asyncio.sleep(timeout_s)
            raise EngineUnavailable("the engine did not answer in time")
        if not self._alive:
            raise EngineUnavailable("the engine cannot be reached")

    # ---- how it works

    def _start(self) -> None:
        if self._steps is None:
            self._steps = asyncio.create_task(self._run())
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._admit()
            if not self.running:
                await self._wake.wait()
                continue
            prefill = self._share_prefill()
            seconds = self._step_seconds(prefill)
            # While nobody reads a prompt, steps are alike until a row ends, a block runs out or somebody arrives.
            steps = 1 if prefill else max(1, min(min(row.left for row in self.running), self._steps_until_full()))
            steps = await self._pass(steps, seconds)
            if self._hung or not self._alive:
                return
            self._advance(prefill, steps)

    async def _pass(self, steps: int, seconds: float) -> int:
        """Lets so many steps go by, less when somebody arrives; returns how many."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        if steps == 1:
            await asyncio.sleep(seconds)
            return 1
        try:
            async with asyncio.timeout(steps * seconds):
                await self._wake.wait()
        except TimeoutError:
            return steps
        done = min(steps, int((loop.time() - started) / seconds) + 1)
        await asyncio.sleep(max(0.0, started + done * seconds - loop.time()))
        return done

    def _step_seconds(self, prefill: Mapping[_Row, int]) -> float:
        speed, rows = self.speed, len(self.running)
        context = sum(row.context for row in self.running)
        tokens = sum(prefill.values())
        return speed.step_s + speed.row_s * rows + speed.prefill_token_s * tokens + speed.context_token_s * context

    def _free(self) -> int:
        return self.capacity - len(self._held) - len(self._cached) - self._private

    def _available(self) -> int:
        return self.capacity - len(self._held) - self._private

    def _make_free(self, blocks: int) -> None:
        while self._free() < blocks:
            self._cached.popitem(last=False)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.speed.max_rows:
            row = self.waiting[0]
            if row.chained_as != (row.context, self.policy_version):
                row.chain = _chain((*row.prompt, *row.tokens), self.policy_version)
                row.chained_as = (row.context, self.policy_version)
            limit = (row.context - 1) // BLOCK
            matched = 0
            while matched < limit and (row.chain[matched] in self._held or row.chain[matched] in self._cached):
                matched += 1
            needed = row.context // BLOCK + 1 - matched
            reused = sum(block in self._cached for block in row.chain[:matched])
            if needed + reused > self._available():
                return
            self.waiting.popleft()
            self.running.append(row)
            for block in row.chain[:matched]:
                self._cached.pop(block, None)
            self._make_free(needed)
            row.held = row.chain
            row.private = row.context // BLOCK + 1 - len(row.chain)
            for block in row.chain[matched:]:
                self._cached.pop(block, None)
            self._held.update(row.chain)
            self._private += row.private
            if not row.admitted_once:
                row.cached_tokens, row.admitted_once = matched * BLOCK, True
            row.to_prefill = row.context - matched * BLOCK

    def _share_prefill(self) -> dict[_Row, int]:
        budget, shares = self.speed.max_batch_tokens, dict[_Row, int]()
        for row in self.running:
            if row.to_prefill and budget:
                shares[row] = min(budget, row.to_prefill)
                budget -= shares[row]
        return shares

    def _steps_until_full(self) -> int:
        """Steps until rows may need more blocks than there are; a block lasts for so many tokens."""
        rows = len(self.running)
        return max(1, (self._available() // max(1, rows)) * BLOCK)

    def _advance(self, prefill: Mapping[_Row, int], steps: int) -> None:
        for row, tokens in prefill.items():
            row.to_prefill -= tokens
            self.prefilled_tokens += tokens
        for row in list(self.running):
            if row.to_prefill or not row.private:
                continue  # reads its prompt, or gave way meanwhile
            first = not row.tokens
            row.draw(min(steps, row.left), self.policy_version)
            if not row.left:
                self._finish(row)
                row.news.set()
                continue
            if first:
                row.news.set()
            more = row.context // BLOCK + 1 - len(row.held) - row.private
            while more > self._available():
                victim = self.running[-1]
                self._preempt(victim)
                if victim is row:
                    break
            else:
                self._make_free(more)
                row.private += more
                self._private += more

    def _finish(self, row: _Row) -> None:
        self.num_finished += 1
        self.running.remove(row)
        self._release(row)
        whole = _chain((*row.prompt, *row.tokens[:-1]), row.versions[-1])
        if row.versions[0] == row.versions[-1] == self.policy_version:
            self._remember(whole)

    def _preempt(self, row: _Row) -> None:
        self.num_preemptions += 1
        self.running.remove(row)
        self._release(row)
        self.waiting.appendleft(row)

    def _abort(self, row: _Row) -> None:
        self.num_aborted += 1
        if row in self.running:
            self.running.remove(row)
            self._release(row)
        else:
            self.waiting.remove(row)
        self._wake.set()

    def _release(self, row: _Row) -> None:
        computed = (row.context - row.to_prefill) // BLOCK
        for place, block in reversed(list(enumerate(row.held))):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                if place < computed:
                    self._cached[block] = None
        self._private -= row.private
        row.held, row.private = [], 0

    def _remember(self, chain: Sequence[int]) -> None:
        for block in reversed(chain):
            if block in self._held:
                continue
            if block not in self._cached and self._free() < 1:
                if not self._cached:
                    return
                self._cached.popitem(last=False)
            self._cached[block] = None
            self._cached.move_to_end(block)


def _chain(tokens: Sequence[int], version: int) -> list[int]:
    last, found = hash((version, -1)), list[int]()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        last = hash((last, tokens[start : start + BLOCK]))
        found.append(last)
    return found


def _piece(row: _Row, done: bool) -> Piece:
    new = row.tokens[row.told :]
    spans, start = list[PolicySpan](), row.told
    for version, places in groupby(row.versions[row.told :]):
        end = start + len(list(places))
        spans.append(PolicySpan(version, start, end))
        start = end
    reason = FinishReason.LENGTH if done else None
    return Piece(tuple(new), (-0.5,) * len(new), tuple(spans), reason, row.cached_tokens if done else 0)
