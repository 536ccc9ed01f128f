"""The predicted prefix index against a brute-force one, and the limit of a replica's requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.inference._concurrency import FLOOR, START, ConcurrencyLimit
from evergrad.inference._prefixes import Prediction, PrefixIndex

SIZE = 2
NAMES = ("a", "b", "c")

prompts = st.lists(st.integers(0, 1), max_size=14)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.sampled_from(NAMES), prompts, st.integers(0, 1)),
        st.tuples(st.just("computed"), st.sampled_from(NAMES), prompts, st.integers(0, 1)),
        st.tuples(st.just("clear"), st.sampled_from(NAMES)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    ),
    max_size=40,
)


@dataclass
class Oracle:
    """One cache as a list of whole prefixes, the one that goes next first."""

    capacity: int
    prefixes: list[tuple[object, ...]] = field(default_factory=list)

    def touch(self, tokens: list[int], root: int) -> None:
        for end in range(len(tokens) // SIZE * SIZE, 0, -SIZE):
            prefix = (root, *tokens[:end])
            if prefix in self.prefixes:
                self.prefixes.remove(prefix)
            self.prefixes.append(prefix)
        del self.prefixes[: max(0, len(self.prefixes) - self.capacity)]

    def depth(self, tokens: list[int], root: int) -> int:
        depth = 0
        while (depth + 1) * SIZE <= len(tokens) and (root, *tokens[: (depth + 1) * SIZE]) in self.prefixes:
            depth += 1
        return depth


@given(operations, st.integers(1, 12), prompts)
@settings(max_examples=150, deadline=None)
def test_the_index_is_that_of_whole_prefixes(steps: list[tuple], capacity: int, probe: list[int]) -> None:
    index, oracles = PrefixIndex(SIZE), {name: Oracle(capacity) for name in NAMES}
    for name in NAMES:
        index.add(name, capacity)
    for step in steps:
        kind, name = step[:2]
        if kind in ("use", "computed"):
            tokens, root = step[2], step[3]
            chain = index.chain(tokens, root)
            if kind == "use":
                assert index.use(name, chain).blocks == oracles[name].depth(tokens, root)
            else:
                index.computed(name, chain)
            oracles[name].touch(tokens, root)
        else:
            oracles[name] = Oracle(capacity)
            index.clear(name)
            if kind == "remove":
                index.remove(name)
                index.add(name, capacity)
        for root in (0, 1):
            expected = {each: oracle.depth(probe, root) for each, oracle in oracles.items()}
            assert index.match(index.chain(probe, root)) == {each: depth for each, depth in expected.items() if depth}
        assert {each: index.num_blocks(each) for each in NAMES} == {each: len(oracles[each].prefixes) for each in NAMES}


@given(prompts, prompts, st.integers(0, 1))
def test_a_chain_that_goes_on_is_that_of_the_whole(first: list[int], more: list[int], root: int) -> None:
    index = PrefixIndex(SIZE)
    assert index.chain([*first, *more], root, after=index.chain(first, root)) == index.chain([*first, *more], root)


def test_what_an_engine_does_not_have_any_more_is_forgotten_with_all_that_is_older() -> None:
    index = PrefixIndex(SIZE)
    index.add("a", 100)
    old, asked, young = ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3])
    for tokens in (old, asked, young):
        chain = index.chain(tokens, 0)
        index.use("a", chain)
        index.computed("a", chain)
    sent = index.use("a", index.chain(asked, 0))
    assert sent == Prediction(2, sent.last_uses)
    index.correct("a", sent, cached_blocks=1)
    assert index.match(index.chain(old, 0)) == {}
    assert index.match(index.chain(asked, 0)) == {"a": 2}, "it was computed again"
    assert index.match(index.chain(young, 0)) == {"a": 2}


def test_a_prompt_on_its_way_is_not_missed_when_a_sibling_does_not_find_it() -> None:
    index = PrefixIndex(SIZE)
    index.add("a", 100)
    kept = index.chain([9, 9], 0)
    index.computed("a", kept)
    chain = index.chain([1, 1, 1, 1], 0)
    index.use("a", chain)
    sibling = index.use("a", chain)
    assert sibling == Prediction(2, ())
    index.correct("a", sibling, cached_blocks=0)
    assert index.match(kept) == {"a": 1}


def load(preemptions: int = 0, waiting: int = 0, kv_usage: float = 0.1) -> dict[str, float]:
    return {"preemptions": preemptions, "waiting": waiting, "kv_usage": kv_usage}


def turn_over(limit: ConcurrencyLimit, was_binding: bool = True) -> int:
    for _ in range(limit.value):
        limit.finished(was_binding)
    return limit.value


def test_a_limit_doubles_until_it_was_too_high_and_then_goes_in_steps() -> None:
    limit = ConcurrencyLimit()
    assert turn_over(limit) == 2 * START
    limit.observe(load(preemptions=1))
    cut = limit.value
    assert cut == int(1.6 * START)
    assert turn_over(limit) == cut + cut // 8


def test_a_limit_that_nobody_waits_for_or_a_full_cache_does_not_grow() -> None:
    limit = ConcurrencyLimit()
    assert turn_over(limit, was_binding=False) == START
    limit.observe(load(kv_usage=0.9))
    assert turn_over(limit) == START


def test_a_limit_is_cut_by_a_queue_and_not_by_who_has_just_arrived() -> None:
    limit = ConcurrencyLimit()
    limit.observe(load(waiting=3))
    limit.observe(load())
    limit.observe(load(waiting=2))
    assert limit.value == START
    for count in range(40):
        limit.observe(load(waiting=1, preemptions=count))
    assert limit.value == FLOOR
