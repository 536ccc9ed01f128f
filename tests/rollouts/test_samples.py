"""From groups to samples: whose advantage, which tokens, how old."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.rollouts import (
    ESTIMATORS,
    GaeConfig,
    OverlongConfig,
    appraise,
    assign_advantages,
    cut_samples,
    estimate,
    estimate_turns,
    generalized_advantages,
)
from evergrad.rollouts._samples import over_batch
from evergrad.types import (
    Completion,
    EvergradError,
    FinishReason,
    Outcome,
    PolicySpan,
    Rollout,
    RolloutGroup,
    TrainingBatch,
    TrainingSample,
    Turn,
    Usage,
)


def turn(
    prompt: tuple[int, ...],
    ids: tuple[int, ...],
    spans: tuple[PolicySpan, ...] | None = None,
    reward: float | None = None,
) -> Turn:
    logprobs = tuple(-float(each) / 100 for each in ids)
    spans = spans or (PolicySpan(0, 0, len(ids)),)
    return Turn((), prompt, Completion(ids, logprobs, FinishReason.STOP, spans, Usage(len(prompt), 0, len(ids))), reward)


def rollout(
    name: str, turns: tuple[Turn, ...], reward: float | None, outcome: Outcome = Outcome.SCORED, task: str = "t"
) -> Rollout:
    return Rollout(name, "g", task, turns, outcome, reward)


def advantages_of(samples: tuple[TrainingSample, ...], name: str) -> set[float]:
    return {
        value
        for sample in samples
        if sample.rollout_id == name
        for value, mask in zip(sample.advantages, sample.loss_mask, strict=True)
        if mask
    }


def test_turns_of_uneven_length_all_carry_their_own_rollouts_advantage() -> None:
    chain = (turn((1, 2), (11, 12)), turn((1, 2, 11, 12, 3), tuple(range(20, 27))))
    third = turn((*chain[-1].prompt_token_ids, *chain[-1].completion.token_ids, 4), (31, 32, 33))
    group = RolloutGroup("g", (rollout("a", (*chain, third), 1.0), rollout("b", (turn((1, 2), (13,)),), 0.0)))
    samples = assign_advantages(group)
    assert len(samples) == 2
    assert advantages_of(samples, "a") == {0.5}
    assert advantages_of(samples, "b") == {-0.5}
    first = samples[0]
    assert sum(first.loss_mask) == 2 + 7 + 3
    trained = [token for token, mask in zip(first.token_ids, first.loss_mask, strict=True) if mask]
    assert trained == [11, 12, *range(20, 27), 31, 32, 33]
    assert [-value * 100 for value, mask in zip(first.logprobs, first.loss_mask, strict=True) if mask] == pytest.approx(trained)


def test_faults_that_say_nothing_of_the_policy_stay_out_of_baseline_and_gradient() -> None:
    one = (turn((1,), (2,)),)
    group = RolloutGroup(
        "g",
        (
            rollout("a", one, 1.0),
            rollout("b", one, 0.0, Outcome.POLICY_FAULT),
            rollout("c", one, None, Outcome.ENVIRONMENT_FAULT),
            rollout("d", one, None, Outcome.VERIFIER_FAULT),
        ),
    )
    samples = assign_advantages(group)
    assert [sample.rollout_id for sample in samples] == ["a", "b"]
    assert advantages_of(samples, "a") == {0.5}
    assert advantages_of(samples, "b") == {-0.5}


def test_rollouts_made_to_measure_or_of_other_tasks_are_refused() -> None:
    one = (turn((1,), (2,)),)
    measured = Rollout("a", "g", "t", one, Outcome.SCORED, 1.0, source="eval")
    greedy = Rollout("a", "g", "t", one, Outcome.SCORED, 1.0, source="live", temperature=0.0)
    with pytest.raises(EvergradError, match="'eval' cannot be trained on"):
        assign_advantages(RolloutGroup("g", (measured,)))
    with pytest.raises(EvergradError, match="greedy"):
        assign_advantages(RolloutGroup("g", (greedy,)))
    mixed = RolloutGroup("g", (rollout("a", one, 1.0, task="t"), rollout("b", one, 0.0, task="u")))
    with pytest.raises(EvergradError, match="several tasks"):
        assign_advantages(mixed)


def test_over_age_tokens_are_masked_one_by_one_and_counted() -> None:
    spans = (PolicySpan(3, 0, 2), PolicySpan(4, 2, 5))
    group = RolloutGroup("g", (rollout("a", (turn((1,), (2, 3, 4, 5, 6), spans),), 1.0),))
    cut = cut_samples(group, "constant", oldest_version=4)
    (sample,) = cut.samples
    assert cut.over_age_tokens == 2
    assert sample.loss_mask == (0, 0, 0, 1, 1, 1)
    assert sample.logprobs[:3] == sample.advantages[:3] == (0.0, 0.0, 0.0)
    assert (sample.min_policy_version, sample.max_policy_version) == (4, 4)
    assert cut_samples(group, "constant", oldest_version=5).samples == ()
    whole = cut_samples(group, "constant", oldest_version=3).samples[0]
    assert (whole.min_policy_version, whole.max_policy_version) == (3, 4)


def test_near_equal_rewards_have_no_advantage_and_a_lone_winner_a_sane_one() -> None:
    for name in ("group_mean", "group_normalized", "leave_one_out"):
        assert estimate(name, [0.35] * 8) == [0.0] * 8
        residue = [0.35, 0.1 + 0.25, 0.7 / 2, 0.05 * 7, 0.35, 0.35, 1.05 / 3, 0.35 + 1e-16]
        assert estimate(name, residue) == [0.0] * 8
        lone = estimate(name, [0.35] * 7 + [0.95])
        assert max(abs(each) for each in lone) < 10
        assert lone[-1] > 0 > lone[0]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(rewards=st.lists(st.floats(-1e6, 1e6), max_size=64))
def test_any_finite_rewards_give_finite_bounded_advantages(name: str, rewards: list[float]) -> None:
    advantages = estimate(name, rewards)
    assert len(advantages) == len(rewards)
    assert all(math.isfinite(each) for each in advantages)
    if name == "group_mean" and rewards:
        assert abs(math.fsum(advantages)) <= 1e-6 * max(1.0, max(abs(each) for each in rewards)) * len(rewards)
    if name == "group_normalized":
        assert all(abs(each) <= math.sqrt(len(rewards)) * (1 + 1e-6) for each in advantages)


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.2, 0.9, 0.4, 0.4], [3.0, -1.0, 2.0]])
def test_leave_one_out_compares_with_the_others(rewards: list[float]) -> None:
    others = [[r for j, r in enumerate(rewards) if j != i] for i in range(len(rewards))]
    expected = [r - math.fsum(o) / len(o) for r, o in zip(rewards, others, strict=True)]
    assert estimate("leave_one_out", rewards) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", sorted(name for name, each in ESTIMATORS.items() if each.least_group > 1))
def test_groups_that_tell_nothing_or_are_broken_have_a_named_outcome(name: str) -> None:
    assert estimate(name, [0.7]) == [0.0]
    assert estimate(name, [0.7] * 4) == [0.0] * 4
    assert estimate(name, []) == []
    for broken in (math.nan, math.inf):
        with pytest.raises(EvergradError, match=f"reward 1 of 3 is {broken}"):
            estimate(name, [1.0, broken, 0.0])


@given(
    steps=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), max_size=8),
    discount=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_generalized_advantages_are_the_sum_of_later_errors(
    steps: list[tuple[float, float]], discount: float, lam: float
) -> None:
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    gae = GaeConfig(discount=discount, lam=lam)
    errors = [r + discount * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=bool(steps))]
    expected = [
        sum((discount * lam) ** (later - t) * errors[later] for later in range(t, len(errors))) for t in range(len(errors))
    ]
    found = generalized_advantages(rewards, values, gae)
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_rollout_is_appraised_over_all_its_samples_and_reached_by_its_reward_at_the_end() -> None:
    """Two samples of one rollout (2 and 1 tokens, reward 1), one of another (1 token, reward 0); γ = 0.5, λ = 0.5."""
    cut = (turn((1,), (2, 3)), turn((8, 9), (4,)))
    group = RolloutGroup("g", (rollout("a", cut, 1.0), rollout("b", (turn((1,), (5,)),), 0.0)))
    samples = cut_samples(group, "generalized", oldest_version=None).samples
    assert [sample.rewards for sample in samples] == [(0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0)]
    batch = TrainingBatch((samples[0], samples[2], samples[1]), 4)
    nan = math.nan  # what a critic says where the mask is 0 means nothing
    found = appraise(batch, [(nan, 0.2, 0.4), (nan, -0.3), (nan, nan, 0.6)], GaeConfig(discount=0.5, lam=0.5))
    third = 1.0 - 0.6
    second = 0.5 * 0.6 - 0.4 + 0.25 * third
    first = 0.5 * 0.4 - 0.2 + 0.25 * second
    raw = [first, second, 0.3, third]
    mean = sum(raw) / 4
    deviation = math.sqrt(sum((each - mean) ** 2 for each in raw) / 4)
    assert [s.returns for s in found.samples] == [
        pytest.approx((0.0, 0.2 + first, 0.4 + second)),
        pytest.approx((0.0, 0.0)),
        pytest.approx((0.0, 0.0, 1.0)),
    ]
    assert [each for s in found.samples for each, m in zip(s.advantages, s.loss_mask, strict=True) if m] == pytest.approx(
        [(each - mean) / deviation for each in raw]
    )
    assert found.samples[0].values == (0.0, 0.2, 0.4)
    with pytest.raises(EvergradError, match="one value for each token"):
        appraise(batch, [(0.0, 0.0)], GaeConfig())
    with pytest.raises(EvergradError, match="no rewards"):
        appraise(TrainingBatch(assign_advantages(group), 4), [(0.0,) * 3, (0.0,) * 3, (0.0,) * 2], GaeConfig())


def test_turn_by_turn_the_walk_has_one_step_a_turn() -> None:
    """Turns of 2 and 1 tokens in one sample, reward 1 at the end; γ = 1, λ = 0.5: the length of a turn decays nothing."""
    turns = (turn((1,), (2, 3)), turn((1, 2, 3, 9), (4,)))
    group = RolloutGroup("g", (rollout("a", turns, 1.0),))
    samples = cut_samples(group, "generalized", oldest_version=None).samples
    values = [(0.0, 0.2, 7.0, 0.0, 0.6)]
    (found,) = appraise(TrainingBatch(samples, 3), values, GaeConfig(step="turn", lam=0.5)).samples
    second = 1.0 - 0.6
    first = 0.6 - 0.2 + 0.5 * second
    assert found.returns == pytest.approx((0.0, first + 0.2, first + 0.2, 0.0, 1.0))
    mean = (2 * first + second) / 3
    deviation = math.sqrt((2 * (first - mean) ** 2 + (second - mean) ** 2) / 3)
    whitened = [(each - mean) / deviation for each in (first, first, second)]
    assert found.advantages == pytest.approx((0.0, *whitened[:2], 0.0, whitened[2]))


def uneven_turns() -> RolloutGroup:
    """Rollout a: turns of 2, 3 and 1 tokens that earn 0.5, nothing and −0.25, reward 1; the third begins a sample of its own.
    Rollout b: one turn of 2 tokens that earns 0.1, reward 0. Rollout c: two turns of 1 and 2 that earn nothing, reward 1."""
    a = (turn((1,), (2, 3), reward=0.5), turn((1, 2, 3, 9), (4, 5, 6), reward=0.0), turn((8, 9), (7,), reward=-0.25))
    b = (turn((1,), (20, 21), reward=0.1),)
    c = (turn((1,), (30,), reward=0.0), turn((1, 30, 9), (31, 32), reward=0.0))
    return RolloutGroup("g", (rollout("a", a, 1.0), rollout("b", b, 0.0), rollout("c", c, 1.0)))


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_each_turn_carries_its_own_return_to_go_less_what_the_group_earned_from_that_turn_on(discount: float) -> None:
    samples = cut_samples(uneven_turns(), "turn_mean", oldest_version=None, turn_discount=discount).samples
    returns = {
        "a": [0.5 + discount**2 * 0.75, discount * 0.75, 0.75],
        "b": [0.1],
        "c": [discount * 1.0, 1.0],
    }
    first = sum(each[0] for each in returns.values()) / 3
    second = (returns["a"][1] + returns["c"][1]) / 2
    expected = {
        "a": [returns["a"][0] - first, returns["a"][1] - second, 0.0],  # nobody else reached the third turn
        "b": [0.1 - first],
        "c": [returns["c"][0] - first, 1.0 - second],
    }
    found = {sample.rollout_id: [] for sample in samples}
    for sample in samples:
        found[sample.rollout_id] += [a for a, mask in zip(sample.advantages, sample.loss_mask, strict=True) if mask]
        assert not any(a for a, mask in zip(sample.advantages, sample.loss_mask, strict=True) if not mask)
    lengths = {"a": [2, 3, 1], "b": [2], "c": [1, 2]}
    for name, advantages in expected.items():
        tokens = [each for each, length in zip(advantages, lengths[name], strict=True) for _ in range(length)]
        assert found[name] == pytest.approx(tokens, abs=1e-12), name


def test_whole_rollouts_are_compared_by_all_that_they_earned() -> None:
    samples = assign_advantages(uneven_turns())
    totals = {"a": 1.25, "b": 0.1, "c": 1.0}
    for name, total in totals.items():
        assert list(advantages_of(samples, name)) == pytest.approx([total - sum(totals.values()) / 3])


@given(
    rewards=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), min_size=1, max_size=5),
    discount=st.sampled_from([1.0, 0.9]),
)
def test_turn_by_turn_advantages_add_up_to_nothing_at_each_turn_and_stay_finite(
    rewards: list[list[float]], discount: float
) -> None:
    for name in ("turn_mean", "turn_normalized"):
        found = estimate_turns(name, rewards, discount)
        assert [len(each) for each in found] == [len(each) for each in rewards]
        for place in range(5):
            column = [each[place] for each in found if len(each) > place]
            assert math.fsum(column) == pytest.approx(0.0, abs=1e-8)
            if name == "turn_normalized":
                assert all(abs(each) <= math.sqrt(len(column)) * (1 + 1e-6) for each in column)
    one_turn = [[math.fsum(each)] for each in rewards]
    assert estimate_turns("turn_mean", one_turn) == [[each] for each in estimate("group_mean", [r for (r,) in one_turn])]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_turn_that_earned_no_number_is_named(name: str, broken: float) -> None:
    with pytest.raises(EvergradError, match=f"reward 1 of 2 is {broken}, in turn 2"):
        estimate_turns(name, [[0.0, 1.0], [0.0, broken]])


def test_a_critic_is_told_what_each_turn_earned_where_it_was_earned() -> None:
    group = uneven_turns()
    samples = cut_samples(group, "generalized", oldest_version=None).samples
    assert [(s.rollout_id, s.rewards) for s in samples] == [
        ("a", (0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0)),
        ("a", (0.0, 0.0, 0.75)),
        ("b", (0.0, 0.0, 0.1)),
        ("c", (0.0, 0.0, 0.0, 0.0, 1.0)),
    ]
    # What an over-age turn earned goes to the last trained token before it; nothing that is trained came before the first.
    old, new = (PolicySpan(3, 0, 1),), (PolicySpan(4, 0, 1),)
    turns = (
        turn((1,), (2,), old, reward=0.5),
        turn((1, 2, 9), (3,), new, reward=0.25),
        turn((1, 2, 9, 3, 9), (4,), old, reward=0.125),
    )
    aged = RolloutGroup("g", (rollout("a", turns, 1.0),))
    (sample,) = cut_samples(aged, "generalized", oldest_version=4).samples
    assert sample.rewards == (0.0, 0.0, 0.0, 1.375, 0.0, 0.0)


def test_turn_by_turn_a_critics_walk_gathers_the_rewards_of_its_turns() -> None:
    """γ = 0.5 and λ = 0.5 per turn; values 0.2, 0.4, 0.3 before the turns of a, 0.1 before b's, 0.6 and 0.7 before c's."""
    samples = cut_samples(uneven_turns(), "generalized", oldest_version=None).samples
    values = [(0.0, 0.2, 9.0, 0.0, 0.4, 9.0, 9.0), (0.0, 0.0, 0.3), (0.0, 0.1, 9.0), (0.0, 0.6, 0.0, 0.7, 9.0)]
    valid = sum(sum(sample.loss_mask) for sample in samples)
    found = appraise(TrainingBatch(samples, valid), values, GaeConfig(step="turn", discount=0.5, lam=0.5)).samples
    third = 0.75 - 0.3
    second = 0.0 + 0.5 * 0.3 - 0.4 + 0.25 * third
    first = 0.5 + 0.5 * 0.4 - 0.2 + 0.25 * second
    assert found[0].returns == pytest.approx((0.0, *[first + 0.2] * 2, 0.0, *[second + 0.4] * 3))
    assert found[1].returns == pytest.approx((0.0, 0.0, third + 0.3))
    assert found[2].returns == pytest.approx((0.0, 0.1, 0.1))
    last = 1.0 - 0.7
    assert found[3].returns == pytest.approx((0.0, 0.5 * 0.7 - 0.6 + 0.25 * last + 0.6, 0.0, 1.0, 1.0))


def test_the_price_on_length_falls_in_a_line() -> None:
    price = OverlongConfig(max_length=100, cache=40)
    assert [price.penalty(n) for n in (0, 60, 70, 100, 1000)] == [0.0, 0.0, -0.25, -1.0, -1.0]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        OverlongConfig(max_length=10, cache=0)
    with pytest.raises(ValueError, match="set it to 10 at most"):
        OverlongConfig(max_length=10, cache=11)


def test_length_is_priced_before_advantages_are_taken() -> None:
    short, long = (turn((1,), (2, 3)),), (turn((1,), (2, 3)), turn((1, 2, 3, 9), (4, 5, 6)))
    group = RolloutGroup("g", (rollout("a", short, 1.0), rollout("b", long, 1.0)))
    assert not any(any(sample.advantages) for sample in assign_advantages(group))
    cut = cut_samples(group, "group_mean", oldest_version=None, overlong=OverlongConfig(max_length=6, cache=4))
    # Two tokens cost nothing; five, over two turns, cost 3/4.
    assert [max(sample.advantages, key=abs) for sample in cut.samples] == [0.375, -0.375]


@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 5), min_size=12, max_size=12),
    baseline=st.booleans(),
)
def test_reinforce_pp_whitens_all_trained_tokens_of_the_batch(
    rewards: list[list[float]], lengths: list[int], baseline: bool
) -> None:
    name = "reinforce_pp_baseline" if baseline else "reinforce_pp"
    groups = [
        RolloutGroup(
            f"g{g}",
            tuple(
                rollout(f"{g}/{i}", (turn((1,), tuple(range(2, 2 + lengths[3 * g + i]))),), reward)
                for i, reward in enumerate(each)
            ),
        )
        for g, each in enumerate(rewards)
    ]
    samples = over_batch([s for group in groups for s in cut_samples(group, name, oldest_version=None).samples], name)
    start = [r - (math.fsum(each) / len(each) if baseline else 0.0) for each in rewards for r in each]
    tokens = [value for value, sample in zip(start, samples, strict=True) for _ in range(sum(sample.loss_mask))]
    mean = math.fsum(tokens) / len(tokens)
    deviation = math.sqrt(math.fsum((t - mean) ** 2 for t in tokens) / len(tokens))
    for value, sample in zip(start, samples, strict=True):
        expected = (value - mean) / deviation if deviation > 1e-6 else 0.0
        assert [a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if m] == pytest.approx(
            [expected] * sum(sample.loss_mask), abs=1e-9
        )
        assert not any(a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if not m)


def test_an_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(EvergradError, match="did you mean 'group_mean'"):
        estimate("group_men", [1.0])


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=1, max_size=5),
)
def test_each_sampled_token_is_in_exactly_one_sample(lengths: list[tuple[int, int, bool]]) -> None:
    """Turns of any lengths, some extending what came before, some not: every sampled id is trained once, in its context."""
    turns: list[Turn] = []
    next_id, context = 100, ()
    for shown, said, extends_ in lengths:
        context = (*(context if extends_ else ()), *range(next_id, next_id + shown))
        ids = tuple(range(next_id + shown, next_id + shown + said))
        next_id += shown + said
        turns.append(turn(context, ids))
        context += ids
    samples = assign_advantages(RolloutGroup("g", (rollout("a", tuple(turns), 1.0),)), "constant")
    trained = sorted(
        token for sample in samples for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask
    )
    assert trained == sorted(token for each in turns for token in each.completion.token_ids)
    for each in turns:
        whole = each.prompt_token_ids + each.completion.token_ids
        assert any(sample.token_ids[: len(whole)] == whole for sample in samples)
