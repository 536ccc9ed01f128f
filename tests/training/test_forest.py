"""Prefix forests: every sample is a path, every path is computed once, and the block cut covers the ancestor relation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.training import attention
from evergrad.training.forest import Forest, Together, TrainedTokens, deal, grow, plant
from evergrad.types import TrainingSample
from tests.training.conftest import make_sample


@st.composite
def trained(draw: st.DrawFn) -> list[TrainedTokens]:
    """Samples over three tokens, so that beginnings, whole samples and forks coincide all the time."""
    items = []
    for number in range(draw(st.integers(1, 8))):
        token_ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=12))
        positions = draw(st.sets(st.integers(1, len(token_ids) - 1), min_size=1))
        logprobs = tuple(-float(100 * number + position) for position in range(len(token_ids)))
        temperature = draw(st.sampled_from([0.5, 1.0]))
        sample = TrainingSample(tuple(token_ids), (0,) * len(token_ids), logprobs, logprobs, 0, 0, temperature)
        items.append(TrainedTokens(sample, np.array(sorted(positions)), len(positions)))
    return items


def path_to(forest: Forest, node: int) -> tuple[int, ...]:
    """Tokens from the root to ``node``, found by the ancestor rule alone."""
    nodes = [other for other in range(node + 1) if other <= node < forest.ends[other]]
    assert [int(forest.depths[other]) for other in nodes] == list(range(len(nodes)))
    return tuple(int(forest.token_ids[other]) for other in nodes)


@settings(max_examples=300, deadline=None)
@given(trained(), st.integers(1, 30))
def test_every_token_is_predicted_from_its_own_context_and_every_context_is_there_once(
    items: list[TrainedTokens], size: int
) -> None:
    forests = plant(items, size)
    expected = sorted(
        (item.sample.token_ids[:p], item.sample.token_ids[p], item.sample.temperature, item.sample.logprobs[p])
        for item in items
        for p in item.positions.tolist()
    )
    found = []
    for forest in forests:
        contexts = [path_to(forest, node) for node in range(forest.num_nodes)]
        assert len(set(contexts)) == len(contexts)
        rows = list(zip(forest.rows.tolist(), forest.temperatures.tolist(), strict=True))
        assert len(set(rows)) == len(rows)
        assert forest.row_of_pair.tolist() == sorted(forest.row_of_pair.tolist())
        assert set(forest.row_of_pair.tolist()) == set(range(len(rows)))
        pairs = [(*rows[row], target) for row, target in zip(forest.row_of_pair, forest.targets.tolist(), strict=True)]
        assert len(set(pairs)) == len(pairs)
        for pair, logprob, advantage in zip(
            forest.pair_of_token, forest.column("logprobs"), forest.column("advantages"), strict=True
        ):
            node, temperature, target = pairs[pair]
            found.append((contexts[node], target, temperature, logprob))
            assert advantage == logprob
    assert sorted(found) == expected
    if len(forests) == 1:
        needed = {item.sample.token_ids[:end] for item in items for end in range(1, int(item.positions[-1]) + 1)}
        assert forests[0].num_nodes == len(needed)
    assert all(forest.num_nodes <= max(size, 11) for forest in forests)


@settings(max_examples=300, deadline=None)
@given(trained(), st.integers(1, 5), st.sampled_from([None, 1, 3]))
def test_the_block_cut_is_the_ancestor_relation(items: list[TrainedTokens], max_queries: int, window: int | None) -> None:
    import torch

    (forest,) = plant(items, 10**6)
    before, attention._MAX_QUERIES = attention._MAX_QUERIES, max_queries
    try:
        plan = attention.AttentionPlan.of(forest, torch.device("cpu"), window)
    finally:
        attention._MAX_QUERIES = before
    assert [block.queries.start for block in plan.blocks] == [0, *[block.queries.stop for block in plan.blocks[:-1]]]
    assert plan.blocks[-1].queries.stop == forest.num_nodes
    for block in plan.blocks:
        assert block.queries.stop - block.queries.start <= max_queries
        keys = [node for start, stop in block.ranges for node in range(start, stop)]
        assert keys == plan.key_index[block.gathered].tolist()
        assert len(set(keys)) == len(keys)
        for row, query in enumerate(range(block.queries.start, block.queries.stop)):
            closed = keys[block.num_open :]
            seen = {*keys[: block.num_open], *(key for column, key in enumerate(closed) if block.bias[row, column] == 0)}
            ancestors = {node for node in range(query + 1) if query < forest.ends[node]}
            if window is not None:
                ancestors = {node for node in ancestors if forest.depths[query] - forest.depths[node] < window}
            assert seen == ancestors


@settings(max_examples=200, deadline=None)
@given(trained(), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(1, 30))
def test_groups_are_kept_whole(items: list[TrainedTokens], groups: list[int], size: int) -> None:
    """Group 0 stands for samples without one."""
    items = [
        dataclasses.replace(item, sample=dataclasses.replace(item.sample, group_id=f"g{group}" if group else ""))
        for item, group in zip(items, groups, strict=False)
    ]
    forests = plant(items, size, keep="group")
    assert sorted(id(item) for forest in forests for item in forest.items) == sorted(map(id, items))
    for name in {item.sample.group_id for item in items} - {""}:
        homes = [forest for forest in forests if any(item.sample.group_id == name for item in forest.items)]
        assert len(homes) == 1
    for forest in forests:
        names = [item.sample.group_id or number for number, item in enumerate(forest.items)]
        assert len(set(forest.group_of_rollout.tolist())) == len(set(names))
        assert forest.sample_of_token.tolist() == [n for n, item in enumerate(forest.items) for _ in item.positions]
        assert forest.num_nodes <= size or len(set(names)) == 1


def test_a_group_costs_its_distinct_tokens() -> None:
    samples = [make_sample([1, 2, 3], [4, 5, 6, last, 9]) for last in (7, 7, 8)]
    items = [TrainedTokens(sample, np.arange(3, 8), 5) for sample in samples]
    (forest,) = plant(items, 1000)
    # Six tokens for all, one more where they differ; the last token of each is predicted, not computed.
    assert forest.num_nodes == 8
    assert len(forest.targets) == 3 + 2 + 2
    assert len(forest.rows) == 3 + 1 + 2
    assert len(forest.pair_of_token) == 15


@pytest.mark.parametrize("order", [1, -1])
def test_the_cut_does_not_depend_on_the_order_of_samples(order: int) -> None:
    samples = [make_sample([1, 2], [number % 3, number % 5, 4]) for number in range(9)]
    items = [TrainedTokens(sample, np.arange(2, 5), 3) for sample in samples][::order]
    cut = plant(items, 7)
    assert [forest.token_ids.tolist() for forest in cut] == [forest.token_ids.tolist() for forest in plant(items[::-1], 7)]


@settings(max_examples=300, deadline=None)
@given(trained(), st.integers(1, 30), st.integers(1, 4), st.sampled_from([None, "group"]))
def test_samples_are_dealt_once_evenly_and_in_as_few_turns_as_one_would_take(
    items: list[TrainedTokens], size: int, count: int, keep: Together | None
) -> None:
    items = [
        dataclasses.replace(item, sample=dataclasses.replace(item.sample, group_id=f"g{number // 2}"))
        for number, item in enumerate(items)
    ]
    alone = plant(items, size, keep=keep)
    shares = deal(items, size, count, keep=keep)
    assert len(shares) == count
    dealt = [item for share in shares for part in share for item in part]
    assert sorted(map(id, dealt)) == sorted(map(id, items))
    # Nobody waits for longer than one turn, and there are no more turns than it takes.
    turns = [len(share) for share in shares]
    assert max(turns) - min(turns) <= 1
    assert max(turns) <= -(-len(alone) // count)
    groups = [{item.sample.group_id for item in part} for share in shares for part in share]
    if keep:
        assert sum(map(len, groups)) == len(set().union(*groups))
    for share in shares:
        for part in share:
            forest = grow(part)
            whole = {item.sample.group_id for item in part} if keep else {id(item) for item in part}
            assert forest.num_nodes <= size or len(whole) == 1


@pytest.mark.parametrize(
    ("common", "prompt", "at_most", "expected"),
    [
        (0, 256, 1024, [1, 1, 1, 1]),  # 256 + 8 · 31 nodes a group
        (20, 236, 1024, [1, 1, 1, 1]),  # a template's first words are computed four times
        (0, 120, 1024, [1, 1, 1, 1]),  # 368: a second one would leave 512 behind
        (0, 512, 1024, [1, 1, 1, 1]),  # 760: whole, though it is more than enough
        (0, 256, 2048, [2, 2]),
        (0, 0, 1024, [2, 2]),  # 248
    ],
)
def test_forests_end_where_little_is_shared(common: int, prompt: int, at_most: int, expected: list[int]) -> None:
    """Groups of eight answers of 32 tokens; how many whole groups each forest has."""
    groups = [
        [make_sample([1] * common + [100 + g] * prompt, [200 + 10 * g + member, *[3] * 31]) for member in range(8)]
        for g in range(4)
    ]
    items = [TrainedTokens(s, np.arange(common + prompt or 1, len(s.token_ids)), 32) for group in groups for s in group]
    found = [{item.sample.token_ids[common + prompt] // 10 for item in forest.items} for forest in plant(items, at_most)]
    assert [len(each) for each in found] == expected
    assert sum(expected) == len(set().union(*found))


def test_what_shares_more_than_little_is_cut_where_it_must_be() -> None:
    samples = [make_sample([1] * 40, [member, *[3] * 31]) for member in range(40)]
    items = [TrainedTokens(sample, np.arange(40, 72), 32) for sample in samples]
    assert [forest.num_nodes for forest in plant(items, 1024)] == [40 + 31 * 31, 40 + 9 * 31]


def test_shares_are_about_equal() -> None:
    groups = [[make_sample([g, g, g, g], [g, member, 1, 2]) for member in range(4)] for g in range(10, 26)]
    items = [TrainedTokens(sample, np.arange(4, 8), 4) for group in groups for sample in group]
    for count in (2, 3, 4):
        sizes = [sum(grow(part).num_nodes for part in share) for share in deal(items, 64, count)]
        assert max(sizes) <= 1.2 * sum(sizes) / count, sizes
