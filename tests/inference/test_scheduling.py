"""The engine's scheduling under anything that may happen to it: what rows build on is theirs, nothing leaks, all ends once.

The model is replaced by one that computes nothing, and remembers in each place of the cache which tokens, under which adapter
and weights, were written there. Each forward holds what a row reads against the row's own tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.inference import EngineConfig
from evergrad.inference._adapters import Adapter
from evergrad.inference._model import Staged
from evergrad.inference._requests import derived_seed
from evergrad.inference._rows import Distribution, Row, Sample
from evergrad.inference._sampling import Draws
from evergrad.inference._schedule import Chunk
from evergrad.inference.engine import Engine, Event, Request
from evergrad.types import FinishReason, Sampling
from tests.inference.conftest import Results, gather

VOCABULARY = 5
Written = tuple[tuple[int, ...], int]
"""The tokens up to a place, and the adapter's serial."""


class RememberingModel:
    """Logits are a function of the tokens so far and the adapter. Small numbers of distinct ones, so that rows often agree."""

    reuses_blocks = True
    vocab_size = VOCABULARY
    device = torch.device("cpu")
    dtype = torch.float32
    eos_token_ids = ()

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.max_len = max_len
        self.version = 0
        self._memory: list[tuple[Written, int] | None] = [None] * num_slots

    def forward(self, chunks: Sequence[Chunk], wanted: list[int]) -> torch.Tensor:
        written: set[int] = set()
        ends: list[Written] = []
        for chunk in chunks:
            tokens = (*chunk.row.tokens[: chunk.end], *chunk.draft)
            for place in range(chunk.start, chunk.stop):
                slot = int(chunk.row.slots[place])
                assert slot not in written, "two rows write to one place"
                written.add(slot)
                ends.append((tokens[: place + 1], _serial(chunk.row)))
                self._memory[slot] = (ends[-1], self.version)
        for chunk in chunks:
            tokens = (*chunk.row.tokens[: chunk.end], *chunk.draft)
            for place in range(chunk.stop):
                found = self._memory[int(chunk.row.slots[place])]
                assert found is not None
                assert found[0] == (tokens[: place + 1], _serial(chunk.row)), "a row reads what is not its own"
                assert chunk.row.chain is None or found[1] == self.version, "a row that can be found again holds old weights"
        return torch.stack([logits_after(ends[place]) for place in wanted]) if wanted else torch.empty(0, VOCABULARY)

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        for offset in range(count):
            assert self._memory[source + offset] is not None
            self._memory[target + offset] = self._memory[source + offset]

    def fork(self, row: Row, child: Row) -> None:
        pass

    def check(self, tensors: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        return dict(tensors)

    def stage(self, tensors: Mapping[str, Any], *, full_precision: bool = False) -> Staged:
        return Staged(tensors, {}, full_precision)

    def bind(self, staged: Staged) -> None:
        self.version += 1


def _serial(row: Row) -> int:
    return 0 if row.adapter is None else row.adapter.serial


def logits_after(written: Written) -> torch.Tensor:
    digest = hashlib.blake2b(repr((written[0][-3:], written[1] > 0)).encode(), digest_size=VOCABULARY).digest()
    return torch.tensor([byte / 64.0 for byte in digest])


def drawn_alone(request: Request, index: int, adapter: bool) -> list[int]:
    """What one completion draws, one token after another, when nothing else is going on."""
    seed = request.sampling.seed
    assert seed is not None
    own = seed if index == 0 else derived_seed(seed, index)
    sample = Sample(request.request_id, index, request.sampling, own, (1, "", 0, index))
    tokens = request.token_ids
    while sample.finish_reason is None:
        draws = Draws(logits_after((tokens, int(adapter)))[None], [Distribution.of(request.sampling)])
        (token,) = draws.draw([0], [sample.uniform()])
        tokens = (*tokens, token)
        sample.add(token, 0.0, 0, room=1_000)
    return sample.token_ids


prompts = st.tuples(st.integers(0, 2), st.integers(1, 14)).map(lambda pair: tuple((pair[0] + at) % 3 for at in range(pair[1])))
requests = st.fixed_dictionaries(
    {
        "token_ids": prompts,
        "n": st.integers(1, 4),
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "seed": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (4,)]),
        "adapter": st.sampled_from([None, None, "a"]),
    }
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), requests),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("flip"), st.sampled_from(["keep", "drain", "abort"])),
        st.tuples(st.just("hold"), st.booleans()),
        st.tuples(st.just("reload"), st.none()),
        st.tuples(st.just("forget"), st.none()),
    ),
    min_size=3,
    max_size=40,
)
shapes = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 4),
        "kv_cache_tokens": st.sampled_from([32, 48, 256]),
        "max_rows": st.integers(1, 6),
        "max_batch_tokens": st.integers(2, 24),
        "draft_tokens": st.sampled_from([0, 3]),
    }
)


class Run:
    """An engine, all that was asked of it, and what came of it."""

    def __init__(self, shape: dict[str, int]) -> None:
        config = EngineConfig(model="none", max_model_len=28, draft_batch_tokens=shape["max_batch_tokens"], **shape)
        self.model = RememberingModel(config.kv_cache_tokens, max_len=28)
        self.engine = Engine(config, self.model)  # type: ignore[arg-type]
        self.engine.adapters["a"] = Adapter("a", {})
        self.asked: dict[str, Request] = {}
        self.results: Results = {}
        self.versions = 0

    def take(self, events: Sequence[Event]) -> None:
        gather(events, self.results)

    def submit(self, settings: dict[str, Any]) -> None:
        settings = dict(settings)
        token_ids, n, adapter = settings.pop("token_ids"), settings.pop("n"), settings.pop("adapter")
        name = str(len(self.asked))
        self.asked[name] = Request(name, token_ids, Sampling(**settings), n=n, adapter=adapter)
        self.engine.submit(self.asked[name])

    def step(self) -> None:
        engine, config = self.engine, self.engine.config
        before = engine.num_computed
        self.take(engine.step())
        # Drafts fill a step up to their own limit.
        assert engine.num_computed - before <= max(config.max_batch_tokens, config.draft_batch_tokens)
        self.check()

    def flip(self, mode: str) -> None:
        engine = self.engine
        if mode == "drain":
            engine.hold()
            while not engine.drained:
                self.step()
        elif mode == "abort":
            self.take(engine.abort_all())
            assert engine.drained
        self.versions += 1
        engine.stage_base()
        engine.commit(self.versions)
        engine.admit()

    def check(self) -> None:
        """Each block is held by exactly the rows that have it, and by no row twice."""
        scheduler, pool = self.engine._scheduler, self.engine._pool
        assert len(scheduler.running) <= self.engine.config.max_rows
        held = Counter(block for row in scheduler.running for block in row.blocks)
        assert all(len(set(row.blocks)) == len(row.blocks) for row in scheduler.running)
        assert not any(row.blocks for row in scheduler.waiting)
        assert pool._holders == [held[block] for block in range(pool.num_blocks)]
        assert pool.available == pool.num_blocks - len(held)
        assert sorted({*pool._free, *pool._cached, *held}) == list(range(pool.num_blocks))
        owned = {
            (sample.request_id, sample.index) for row in (*scheduler.running, *scheduler.waiting) for sample in row.samples
        }
        assert owned == {(name, index) for name, rows in self.engine._owners.items() for index in rows}


@settings(max_examples=150, deadline=None)
@given(events, shapes)
def test_whatever_happens_each_request_ends_once_with_its_own_tokens(
    steps: list[tuple[str, Any]], shape: dict[str, int]
) -> None:
    run = Run(shape)
    engine = run.engine
    for kind, value in steps:
        if kind == "submit":
            run.submit(value)
        elif kind == "step":
            for _ in range(value):
                run.step()
        elif kind == "abort":
            run.take(engine.abort(str(value)))
        elif kind == "flip":
            run.flip(value)
        elif kind == "hold":
            (engine.hold if value else engine.admit)()
        elif kind == "reload":
            engine.drop_adapter("a")
            engine.adapters["a"] = Adapter("a", {})
        else:
            engine.reset_prefix_cache()
        run.check()
    engine.admit()
    while engine.has_work:
        run.step()
    # Every completion ended, and gather() has seen no event after an end.
    assert {key for key, done in run.results.items() if done.finish_reason is not None} == {
        (name, index) for name, request in run.asked.items() for index in range(request.n)
    }
    for (name, index), done in run.results.items():
        alone = drawn_alone(run.asked[name], index, run.asked[name].adapter is not None)
        whole = done.finish_reason != FinishReason.ABORT
        assert done.token_ids == (alone if whole else alone[: len(done.token_ids)])
        assert [span.end for span in done.spans][-1:] == ([len(done.token_ids)] if done.token_ids else [])
    # Nothing is left behind.
    assert engine._pool.available == engine._pool.num_blocks
    assert (engine._owners, engine._scheduler._joinable, engine.num_running, engine.num_waiting) == ({}, {}, 0, 0)
