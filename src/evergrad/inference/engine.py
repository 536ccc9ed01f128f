"""The engine: requests in, one step at a time, drawn tokens out. No threads, no sockets, no clock.

The walk of one request::

    submit ── Scheduler.enqueue (equal requests share a row) ──▶ step: Scheduler.next_step (blocks, prefix cache)
    ──▶ plan_step, Model.forward ──▶ Draws.draw (per sample, by seed) ──▶ fork where samples part ──▶ Event

Between two steps weights may change (:meth:`Engine.commit`): rows go on, their later tokens carry the new version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from evergrad.config import nearest
from evergrad.inference._adapters import Adapter
from evergrad.inference._blocks import BlockPool
from evergrad.inference._drafts import CONTEXT, Drafter
from evergrad.inference._grammar import Grammars, Matcher, advanced
from evergrad.inference._loading import load_model
from evergrad.inference._model import Model, Staged
from evergrad.inference._requests import (
    Event,
    Request,
    RequestError,
    check_request,
    check_tokens,
    closing,
    derived_seed,
    progress,
    sample_of,
)
from evergrad.inference._rows import Distribution, Row, Sample
from evergrad.inference._sampling import Draws
from evergrad.inference._schedule import Chunk, Scheduler
from evergrad.inference._text import TokenText
from evergrad.inference.config import EngineConfig, EngineError
from evergrad.transfer.adapters import adapter_parts
from evergrad.types import FinishReason

__all__ = ["Engine", "Event", "Request", "RequestError"]


class Engine:
    """Continuous batching over a paged cache.

    >>> engine = Engine(EngineConfig(model="models/tiny"))  # doctest: +SKIP
    >>> engine.submit(Request("a", (1, 2, 3), Sampling(max_tokens=4)))  # doctest: +SKIP
    >>> events = [event for _ in range(4) for event in engine.step()]  # doctest: +SKIP
    """

    def __init__(self, config: EngineConfig, model: Model | None = None) -> None:
        """
        Args:
            model: The loaded model; None loads the configuration's.

        Raises:
            EngineError: the folder holds no model that can be served, or the device cannot be used.
        """
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.model, self.notice = load_model(config) if model is None else (model, None)
        """``notice`` says what is lost with this model, compared to those that the engine computes itself."""
        self.policy_version = config.policy_version
        self.text = TokenText(Path(config.model))
        self.adapters: dict[str, Adapter] = {}
        self._owners: dict[str, dict[int, Row]] = {}
        self._arrivals = 0
        self._session_requests: dict[str, int] = {}
        self._staged: Staged | None = None
        self.num_steps = self.num_drawn = self.num_computed = 0
        self.num_drafted = self.num_accepted = 0
        self._pool = BlockPool(config.kv_cache_tokens // config.block_size, config.block_size, reuse=self.model.reuses_blocks)
        self._drafter = Drafter(config.draft_tokens if self.model.reuses_blocks else 0)
        self._scheduler = Scheduler(self._pool, self._drafter, self._copy_block, config, self.model.max_len)
        self._grammars = Grammars(self.text, self.model.vocab_size, self.model.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    @property
    def quantization(self) -> str | None:
        """Of the live version's products; None where they are in full precision."""
        return self.config.quantization if self.model.quantizes else None

    @property
    def drained(self) -> bool:
        """Nothing is left of what had begun; with :meth:`hold`, nothing runs any more."""
        return not self._scheduler.running and not any(row.started for row in self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Rows, not requests."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Rows, not requests."""
        return len(self._scheduler.waiting)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were not computed, over all samples."""
        return self._scheduler.num_cached

    @property
    def kv_usage(self) -> float:
        """Share of the cache's blocks that rows hold; the others are free, or kept for reuse alone."""
        return 1.0 - self._pool.available / self._pool.num_blocks

    def submit(self, request: Request) -> None:
        """Puts a request in the queue.

        Raises:
            RequestError: an empty or over-long prompt, a token outside of the vocabulary, or an id that is in use.
        """
        if request.request_id in self._owners:
            raise RequestError(f"request '{request.request_id}' is already running", where="request_id")
        check_request(request, self.model)
        adapter = self._adapter(request.adapter)
        matcher = self._matcher(request)
        self._arrivals += 1
        session = request.session_id
        group = (1, "", self._arrivals)
        if session is not None and session in self._session_requests:
            # Within a session requests come one after another, so place and seed do not depend on when others arrived.
            self._session_requests[session] += 1
            group = (0, session, self._session_requests[session])
        seed = request.sampling.seed
        if seed is None:
            seed = derived_seed(self.config.seed, *group)
        samples = [sample_of(request, index, seed, group, self.text) for index in range(request.n)]
        distribution = Distribution.of(request.sampling, (request.grammar, request.drawn) if request.grammar else None)
        row = self._scheduler.enqueue(request.token_ids, distribution, samples, samples[0].order, adapter)
        row.matcher = row.matcher or matcher
        self._owners[request.request_id] = dict.fromkeys(range(request.n), row)

    def check_grammar(self, grammar: str) -> None:
        """Compiles a grammar for the requests that bring it. May run in another thread while steps go on.

        Raises:
            RequestError: it cannot be used.
        """
        try:
            self._grammars.start(grammar)
        except EngineError as error:
            raise RequestError(error.what, where=error.where, hint=error.hint) from error

    def hold(self) -> None:
        """From here on nothing begins; what has begun goes on. Undone by :meth:`admit`."""
        self._scheduler.admits_new = False

    def admit(self) -> None:
        self._scheduler.admits_new = True

    def abort(self, request_id: str) -> list[Event]:
        """Ends what is left of a request; what it has drawn so far stays valid. Unknown ids are ignored."""
        events: list[Event] = []
        for index, row in list(self._owners.get(request_id, {}).items()):
            sample = next(one for one in row.samples if one.request_id == request_id and one.index == index)
            sample.finish_reason = FinishReason.ABORT
            events.append(closing(sample))
            self._leave(row, sample)
        return events

    def abort_all(self) -> list[Event]:
        """Ends everything that waits or runs."""
        return [event for request_id in list(self._owners) for event in self.abort(request_id)]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Computes one batch and draws the next token of every sample whose row is computed to its end."""
        chunks = self._scheduler.next_step()
        if not chunks:
            if self._scheduler.has_work:
                raise EngineError("requests wait, and none can be started")
            return []
        drawing = [chunk for chunk in chunks if chunk.draws]
        logits = self._forward(chunks)
        for chunk in chunks:
            chunk.row.num_computed = chunk.end
        self._pool.written()
        self.num_steps += 1
        return self._draw(drawing, logits) if drawing else []

    @torch.inference_mode()
    def logprobs(self, token_ids: tuple[int, ...], adapter: str | None = None, *, exact: bool = False) -> list[float]:
        """Log-probability of each token but the first, given those before it, at temperature 1.

        Goes the way of a request (paged cache, live weights), but finds and leaves nothing in the prefix cache.

        Args:
            exact: Under the live weights themselves: a proof of which they are. Else under what tokens are drawn from, which
                with ``quantization`` is near to that.

        Raises:
            RequestError: as :meth:`submit`.
        """
        check_tokens(token_ids, self.model, room=0)
        size = self.config.block_size
        row = Row(list(token_ids), len(token_ids), Distribution(1.0, 1.0, 0), [], (0, "", 0, 0), self._adapter(adapter))
        num_blocks = -(-len(token_ids) // size)
        self._scheduler.make_room(num_blocks)
        row.add_blocks([self._pool.take() for _ in range(num_blocks)], size)
        try:
            return self.model.score(row, self.config.max_batch_tokens, exact=exact)
        finally:
            self._pool.drop(row.blocks)

    def stage_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        whole: bool = False,
        known_finite: bool = False,
        full_precision: bool = False,
    ) -> None:
        """Checks new weights and keeps them for :meth:`commit`; on CPU, in the engine's dtype, they are not copied.

        May run in another thread while steps go on.

        Args:
            whole: Every parameter must be there; else those that are not are the base's.
            known_finite: The caller has looked at every value.
            full_precision: This version is not quantized, whatever the configuration says.

        Raises:
            EngineError: a name, shape or value that does not fit. What was staged before is dropped; what is live stays.
        """
        self._staged = None
        checked = self.model.check(tensors, whole=whole, known_finite=known_finite)
        self._staged = self.model.stage(checked, full_precision=full_precision)

    def stage_base(self) -> None:
        """Keeps the weights that the engine started from for :meth:`commit`."""
        self._staged = self.model.stage({})

    def commit(self, policy_version: int) -> None:
        """Makes the staged weights live, between two steps. Nothing computed before is found by later prompts.

        Raises:
            EngineError: nothing is staged.
        """
        if self._staged is None:
            raise EngineError("no weights are staged", hint="call stage_weights first")
        self.model.bind(self._staged)
        self._staged = None
        self.policy_version = policy_version
        # Guesses too: not a bit of what follows depends on what was asked under the old weights.
        self.reset_prefix_cache()

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        """Reads an adapter in PEFT layout for :meth:`add_adapter`. May run in another thread while steps go on.

        Raises:
            EngineError, TransferError: a damaged file, or an adapter that does not fit the base.
        """
        return self.model.adopt(name, adapter_parts(self.model.base, folder, self.config.model))

    def add_adapter(self, adapter: Adapter) -> None:
        """Serves it under its name, in place of one that had that: requests of that one go on with it. Between two steps."""
        if adapter.name in self.adapters:
            self.drop_adapter(adapter.name)
        self.model.adapters.cover(adapter)
        self.adapters[adapter.name] = adapter

    def drop_adapter(self, name: str) -> None:
        """Serves it no more; requests that have it go on with it.

        Raises:
            EngineError: there is none of that name.
        """
        adapter = self._adapter(name)
        assert adapter is not None
        del self.adapters[name]
        self._pool.forget_adapter(adapter.serial)

    def reset_prefix_cache(self) -> None:
        """Forgets what was computed and guessed; without running rows, the engine is then as it was at its start."""
        self._scheduler.forget_prefixes()
        self._drafter.forget()

    def open_session(self, session_id: str) -> None:
        """From here on the session's requests have their place in the queue, and seeds where they bring none, by the session's
        name and by how many it made: whatever the order in which those of several sessions arrive."""
        self._session_requests.setdefault(session_id, 0)

    def close_session(self, session_id: str) -> None:
        """Ends what :meth:`open_session` began; requests that run are not touched."""
        self._session_requests.pop(session_id, None)

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if name not in self.adapters:
            raise RequestError(f"there is no adapter '{name}'", where="adapter", hint=nearest(name, self.adapters))
        return self.adapters[name]

    def _matcher(self, request: Request) -> Matcher | None:
        if request.grammar is None:
            return None
        self.check_grammar(request.grammar)
        matcher = self._grammars.start(request.grammar)
        matcher.advance(request.token_ids[len(request.token_ids) - request.drawn :])
        if matcher.error is not None:
            raise RequestError(f"what was drawn before does not follow the grammar: {matcher.error}", where="drawn")
        return matcher

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        wanted, at = list[int](), 0
        for chunk in chunks:
            at += chunk.stop - chunk.start
            if chunk.draws:
                wanted.extend(range(at - 1 - len(chunk.draft), at))
        self.num_computed += at
        return self.model.forward(chunks, wanted)

    def _draw(self, chunks: list[Chunk], logits: torch.Tensor) -> list[Event]:
        """Draws for every sample at every position of its row's draft, then keeps what it would have drawn step by step."""
        positions = [(chunk, ahead) for chunk in chunks for ahead in range(len(chunk.draft) + 1)]
        allowed = {
            place: chunk.row.matcher.allowed() for place, (chunk, _) in enumerate(positions) if chunk.row.matcher is not None
        }
        draws = Draws(logits, [chunk.row.distribution for chunk, _ in positions], allowed)
        unusable = {chunk for place, (chunk, _) in enumerate(positions) if not draws.usable[place]}
        places = [place for place, (chunk, _) in enumerate(positions) if chunk not in unusable]
        asks = [(place, sample) for place in places for sample in positions[place][0].row.samples]
        wanted = [place for place, _ in asks]
        tokens = draws.draw(wanted, [sample.uniform(positions[place][1]) for place, sample in asks])
        logprobs = draws.logprobs(wanted, tokens)
        drawn: dict[int, list[tuple[int, float]]] = {}
        for (_, sample), token, logprob in zip(asks, tokens, logprobs, strict=True):
            drawn.setdefault(id(sample), []).append((token, logprob))
        events: list[Event] = []
        for chunk in chunks:
            events += self._fail(chunk.row) if chunk in unusable else self._take(chunk, drawn)
        return events

    def _fail(self, row: Row) -> list[Event]:
        events: list[Event] = []
        reason = None if row.matcher is None else row.matcher.error
        for sample in list(row.samples):
            sample.finish_reason = FinishReason.ABORT
            events.append(closing(sample, error=reason or "the model gave values that are not finite"))
            self._leave(row, sample)
        return events

    def _take(self, chunk: Chunk, drawn: Mapping[int, Sequence[tuple[int, float]]]) -> list[Event]:
        """Gives each sample of a row what it drew, up to where it leaves the draft; parts those that left it differently."""
        row, events = chunk.row, list[Event]()
        after = advanced(row.matcher, (drawn[id(sample)][0][0] for sample in row.samples))
        parted: dict[tuple[int, ...], list[Sample]] = {}
        for sample in row.samples:
            taken: tuple[int, ...] = ()
            for token, logprob in drawn[id(sample)]:
                room = self.model.max_len - len(row.tokens) - len(taken) - 1
                sample.add(token, logprob, self.policy_version, room)
                if after and after[token].ended and sample.finish_reason is None:
                    # Too costly to follow is the other way for a grammar to end.
                    sample.finish_reason = FinishReason.ABORT if after[token].error else FinishReason.STOP
                events.append(progress(sample))
                taken = (*taken, token)
                if sample.finish_reason is not None or taken != chunk.draft[: len(taken)]:
                    break
            self.num_drawn += len(taken)
            if chunk.guess is not None:
                self._drafter.outcome(chunk.guess, taken[0] == chunk.guess.tokens[0])
            parted.setdefault(taken, []).append(sample)
        self._part(row, chunk, parted, after)
        return events

    def _part(
        self, row: Row, chunk: Chunk, parted: Mapping[tuple[int, ...], list[Sample]], after: Mapping[int, Matcher]
    ) -> None:
        """Splits a row by the tokens its samples took: those that took most keep it, each other group gets a copy."""
        base = chunk.end
        going = {taken: [one for one in samples if one.finish_reason is None] for taken, samples in parted.items()}
        longest = max(parted, key=len)
        kept = max((taken for taken in parted if going[taken]), key=len, default=longest)
        # In reverse, since each copy is put right behind the row.
        for taken, samples in reversed(going.items()):
            if samples and taken != kept:
                child = self._scheduler.fork(row, taken, base + len(taken) - 1)
                child.samples = samples
                child.matcher = after.get(taken[0])
                self.model.fork(row, child)
                for sample in samples:
                    self._owners[sample.request_id][sample.index] = child
                    row.samples.remove(sample)
        self.num_drafted += len(chunk.draft)
        self.num_accepted += len(longest) - 1
        for taken in parted:
            # With the tokens before them, which are the context of the first ones.
            self._drafter.learn([*row.tokens[-CONTEXT:], *taken], min(base, CONTEXT))
        row.extend(kept)
        row.num_computed = base + len(kept) - 1
        row.matcher = after.get(kept[0])
        for sample in [one for one in row.samples if one.finish_reason is not None]:
            self._leave(row, sample)

    def _leave(self, row: Row, sample: Sample) -> None:
        row.samples.remove(sample)
        owner = self._owners[sample.request_id]
        del owner[sample.index]
        if not owner:
            del self._owners[sample.request_id]
        if not row.samples:
            self._scheduler.remove(row)

    def _copy_block(self, source: int, target: int, count: int) -> None:
        size = self.config.block_size
        self.model.copy_tokens(source * size, target * size, count)
