"""Staleness by slots, counts that add up, and no silent end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.envs import Taskset
from evergrad.rollouts import Buffer, BufferCounts, BufferStopped, OverlongConfig, Ticket
from evergrad.types import (
    Completion,
    EvergradError,
    FinishReason,
    Outcome,
    PolicySpan,
    Rollout,
    RolloutGroup,
    Task,
    Turn,
    Usage,
)


async def keep_filled(buffer: Buffer, tasks: Iterable[Task], run: Callable[[Task, Ticket], Awaitable[RolloutGroup]]) -> None:
    """A producer as the loop's is: runs a group in each free slot; whatever goes wrong reaches the consumer."""

    async def one(task: Task, ticket: Ticket) -> None:
        try:
            await buffer.put(ticket, await run(task, ticket))
        finally:
            await buffer.release(ticket)

    try:
        async with asyncio.TaskGroup() as running:
            for task in tasks:
                ticket = await buffer.acquire()
                if ticket is None:
                    break
                running.create_task(one(task, ticket))
        await buffer.finish()
    except* BufferStopped:
        pass  # the consumer hears of it from the buffer itself
    except* Exception as failed:
        await buffer.fail(failed.exceptions[0])


def group(name: str, rewards: Sequence[float | None], version: int = 0, fault: str = "engine: gone") -> RolloutGroup:
    rollouts = []
    for index, reward in enumerate(rewards):
        completion = Completion((5, 6), (-0.1, -0.1), FinishReason.STOP, (PolicySpan(version, 0, 2),), Usage(3, 0, 2))
        outcome = Outcome.ENVIRONMENT_FAULT if reward is None else Outcome.SCORED
        rollouts.append(
            Rollout(
                f"{name}/{index}",
                name,
                "t",
                (Turn((), (1, 2, 3), completion),),
                outcome,
                reward,
                usage=completion.usage,
                fault=fault if reward is None else "",
            )
        )
    return RolloutGroup(name, tuple(rollouts))


def conserved(counts: BufferCounts) -> bool:
    return counts.generated == counts.trained + counts.queued + sum(counts.discarded.values())


async def take_ticket(buffer: Buffer) -> Ticket:
    ticket = await asyncio.wait_for(buffer.acquire(), 1)
    assert ticket is not None
    return ticket


async def blocked(waiting: Awaitable[Any]) -> bool:
    """Whether something is still waiting when everything that can run has run."""
    task = asyncio.ensure_future(waiting)
    for _ in range(20):
        await asyncio.sleep(0)
    done = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return not done


@pytest.mark.parametrize("max_off_policy_steps", [0, 1, 3])
async def test_slots_bound_what_starts(max_off_policy_steps: int) -> None:
    buffer = Buffer(max_off_policy_steps=max_off_policy_steps, groups_per_batch=4, policy_version=100)
    first = (max_off_policy_steps + 1) * 4
    tickets = [await take_ticket(buffer) for _ in range(first)]
    assert await blocked(buffer.acquire())
    for ticket in tickets[:4]:
        await buffer.put(ticket, group(str(ticket.index), [0.0, 1.0], version=ticket.policy_version))
    await buffer.take_batch()
    assert await blocked(buffer.acquire()), "a batch that is being trained still holds its slots"
    await buffer.advance(101)
    later = [await take_ticket(buffer) for _ in range(4)]
    assert {ticket.policy_version for ticket in later} == {101}
    assert await blocked(buffer.acquire())


async def test_a_batch_holds_the_oldest_groups_in_order_whatever_finished_first() -> None:
    buffer = Buffer(max_off_policy_steps=1, groups_per_batch=3)
    tickets = [await take_ticket(buffer) for _ in range(6)]
    for ticket in reversed(tickets):
        await buffer.put(ticket, group(str(ticket.index), [0.0, 1.0]))
    batch = await buffer.take_batch()
    assert [sample.rollout_id for sample in batch.samples] == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]
    assert batch.num_valid_tokens == 12
    assert batch.metrics["reward_mean"] == 0.5
    assert batch.metrics["sampled_entropy"] == pytest.approx(0.1)


async def test_late_groups_are_masked_at_the_cut_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    buffer = Buffer(max_off_policy_steps=1, groups_per_batch=1, policy_version=100)
    slow, quick = await take_ticket(buffer), await take_ticket(buffer)
    await buffer.put(quick, group("quick", [0.0, 1.0], 100))
    await buffer.take_batch()
    await buffer.advance(101)
    second = await take_ticket(buffer)
    await buffer.put(second, group("second", [0.0, 1.0], 101))
    await buffer.take_batch()
    await buffer.advance(102)
    await buffer.put(slow, group("slow", [0.0, 1.0], slow.policy_version))
    waiting = asyncio.create_task(buffer.take_batch())
    third = await take_ticket(buffer)
    await buffer.put(third, group("third", [0.0, 1.0], 102))
    batch = await waiting
    assert {sample.rollout_id for sample in batch.samples} == {"third/0", "third/1"}
    assert buffer.counts.discarded == {"over_age": 1}
    assert conserved(buffer.counts)


async def test_a_resumed_run_starts_with_the_same_bound_not_a_larger_one() -> None:
    buffer = Buffer(max_off_policy_steps=1, groups_per_batch=2, policy_version=100)
    assert buffer.slots == 4
    tickets = [await take_ticket(buffer) for _ in range(4)]
    assert {ticket.policy_version for ticket in tickets} == {100}
    assert await blocked(buffer.acquire())
    with pytest.raises(EvergradError, match="went back"):
        await buffer.advance(99)


async def test_the_last_batches_start_no_surplus_groups() -> None:
    buffer = Buffer(max_off_policy_steps=5, groups_per_batch=2, total_batches=3)
    for _ in range(6):
        await take_ticket(buffer)
    assert await blocked(buffer.acquire())


@pytest.mark.parametrize("finish_order", list(itertools.permutations(range(4))))
async def test_which_groups_are_replaced_does_not_depend_on_who_finished_first(finish_order: tuple[int, ...]) -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=4, resamples_per_batch=2)
    wave = [await take_ticket(buffer) for _ in range(4)]
    rewards = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    for index in finish_order:
        await buffer.put(wave[index], group(str(index), rewards[index]))
    assert buffer.free_slots == 2
    second = [await take_ticket(buffer) for _ in range(2)]
    assert await blocked(buffer.acquire())
    for ticket, pair in zip(second, ([0.0, 1.0], [0.5, 0.5]), strict=True):
        await buffer.put(ticket, group(str(ticket.index), pair))
    batch = await buffer.take_batch()
    # Four of the six are needed: the two that tell something, then the oldest of those that do not.
    assert [sample.rollout_id for sample in batch.samples] == [f"{index}/{each}" for index in (0, 1, 2, 4) for each in range(2)]
    assert batch.metrics["groups"] == 6
    assert batch.metrics["groups_replaced"] == 2
    assert batch.metrics["informative_groups"] == 2
    assert batch.metrics["reward_mean"] == pytest.approx((1.0 + 0.5 + 0.0 + 1.0 + 0.5 + 0.5) / 6)
    assert conserved(buffer.counts)


async def test_all_equal_groups_are_replaced_a_bounded_number_of_times_then_kept() -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=2, resamples_per_batch=3)
    made = 0
    for _ in range(5):
        ticket = await take_ticket(buffer)
        await buffer.put(ticket, group(str(ticket.index), [1.0] * 4))
        made += 1
    batch = await buffer.take_batch()
    assert buffer.counts.discarded == {"uninformative": 3}
    assert conserved(buffer.counts)
    assert batch.num_valid_tokens == 16, "kept groups count in the denominator"
    assert not any(any(sample.advantages) for sample in batch.samples)
    assert buffer.usage.completion_tokens == made * 4 * 2, "what was thrown away was paid for"


async def test_nothing_to_learn_ends_with_a_reason() -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=1, flat_batches_allowed=2)
    for step in (1, 2, 3):
        ticket = await take_ticket(buffer)
        await buffer.put(ticket, group("g", [1.0, 1.0], buffer.policy_version))
        await buffer.take_batch()
        await buffer.advance(step)
    with pytest.raises(BufferStopped, match=r"equal rewards.*mean reward 1\.000"):
        await buffer.acquire()
    assert buffer.counts.trained == 3


async def test_compared_with_the_batch_a_group_of_equal_rewards_says_something() -> None:
    """REINFORCE++ with one rollout a task: no group is flat, none is replaced, and only a batch of equal rewards is empty."""
    buffer = Buffer(
        max_off_policy_steps=0,
        groups_per_batch=4,
        estimator="reinforce_pp",
        resamples_per_batch=3,
        flat_batches_allowed=0,
        overlong=OverlongConfig(max_length=4, cache=4),
    )
    for step, rewards in enumerate(([1.0, 0.0, 0.0, 0.0], [1.0] * 4)):
        for reward in rewards:
            ticket = await take_ticket(buffer)
            await buffer.put(ticket, group(str(ticket.index), [reward], buffer.policy_version))
        batch = await buffer.take_batch()
        found = [sample.advantages[-1] for sample in batch.samples]
        assert found == pytest.approx([[3**0.5, *[-(3**-0.5)] * 3], [0.0] * 4][step], abs=1e-12)
        assert batch.metrics["informative_groups"] == [4, 0][step]
        assert batch.metrics["groups_replaced"] == 0
        assert batch.metrics["reward_mean"] == [0.25, 1.0][step], "figures keep the verifier's reward"
        assert batch.metrics["overlong_penalty_mean"] == -0.5
        await buffer.advance(step + 1)
    with pytest.raises(BufferStopped, match="equal rewards throughout"):
        await buffer.acquire()


@pytest.mark.parametrize("estimator", ["group_mean", "turn_mean", "turn_normalized", "generalized"])
async def test_turns_that_earned_differently_tell_something_where_ends_do_not(estimator: str) -> None:
    buffer = Buffer(groups_per_batch=1, max_off_policy_steps=0, estimator=estimator, flat_batches_allowed=0)
    told = group("g", [1.0, 1.0])
    first, second = told.rollouts
    first = replace(first, turns=(replace(first.turns[0], reward=0.5),))
    await buffer.put(await take_ticket(buffer), replace(told, rollouts=(first, second)))
    batch = await buffer.take_batch()
    assert batch.metrics["informative_groups"] == 1
    assert (batch.metrics["reward_mean"], batch.metrics["turn_reward_mean"]) == (1.0, 0.25), "scores leave turns out"
    await buffer.advance(1)
    await buffer.put(await take_ticket(buffer), group("g", [1.0, 1.0], 1))
    assert (await buffer.take_batch()).metrics["informative_groups"] == 0


async def test_where_rewards_play_no_part_equal_ones_stop_nothing() -> None:
    buffer = Buffer(groups_per_batch=1, max_off_policy_steps=0, estimator="constant", flat_batches_allowed=0)
    for version in range(3):
        await buffer.put(await take_ticket(buffer), group(f"g{version}", [0.0, 0.0], version))
        batch = await buffer.take_batch()
        assert batch.metrics["informative_groups"] == 1
        assert batch.num_valid_tokens == 4
        await buffer.advance(version + 1)


async def test_too_many_faults_stop_the_run_with_counts_per_cause() -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=4, fault_limit=0.4, fault_window=16)
    for _ in range(2):
        ticket = await take_ticket(buffer)
        await buffer.put(ticket, group("g", [None, None, 1.0]))
    with pytest.raises(BufferStopped, match=r"67% of the last 6 rollouts .* 4× engine: gone"):
        await buffer.acquire()
    with pytest.raises(BufferStopped, match="not the model's"):
        await buffer.take_batch()


async def test_a_few_faults_do_not_stop_it_and_a_wholly_faulted_group_frees_its_slot() -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=2, fault_limit=0.6, fault_window=64)
    first, second = await take_ticket(buffer), await take_ticket(buffer)
    await buffer.put(first, group("a", [None, None]))
    third = await take_ticket(buffer)
    await buffer.put(second, group("b", [1.0, 0.0, 1.0]))
    await buffer.put(third, group("c", [1.0, 0.0]))
    batch = await buffer.take_batch()
    assert batch.metrics["groups"] == 2
    assert buffer.counts.discarded == {"faulted": 1}
    assert buffer.outcomes == {"environment_fault": 2, "scored": 5}


async def test_pausing_waits_for_what_runs_and_resuming_fills_up_again() -> None:
    buffer = Buffer(max_off_policy_steps=3, groups_per_batch=4, max_running=3)
    for _ in range(3):
        tickets = [await take_ticket(buffer) for _ in range(3)]
        assert await blocked(buffer.acquire())
        pausing = asyncio.create_task(buffer.pause())
        await asyncio.sleep(0)
        assert await blocked(buffer.acquire())
        for ticket in tickets:
            assert not pausing.done()
            await buffer.put(ticket, group(str(ticket.index), [0.0, 1.0]))
        await pausing
        assert await blocked(buffer.acquire())
        await buffer.resume()
    assert buffer.counts.queued == 9


async def test_what_is_left_comes_as_a_short_batch_and_then_the_end() -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=4)
    tickets = [await take_ticket(buffer) for _ in range(2)]
    await buffer.put(tickets[0], group("a", [0.0, 1.0]))
    await buffer.finish()
    assert await blocked(buffer.take_batch()), "one group still runs"
    await buffer.put(tickets[1], group("b", [0.0, 1.0]))
    assert (await buffer.take_batch()).metrics["groups"] == 2
    assert await buffer.acquire() is None
    with pytest.raises(BufferStopped, match="all groups have been trained"):
        await buffer.take_batch()


async def test_waiting_for_a_batch_is_bounded_and_says_for_what() -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=2)
    ticket = await take_ticket(buffer)
    await take_ticket(buffer)
    await buffer.put(ticket, group("a", [0.0, 1.0]))
    with pytest.raises(EvergradError, match=r"no batch within 0\.01 s: 1 groups running, 1 queued of 2"):
        await buffer.take_batch(timeout_s=0.01)
    assert buffer.counts.queued == 1, "what was queued still is"


async def test_a_dying_producer_is_heard_by_the_consumer(desk: Taskset) -> None:
    buffer = Buffer(max_off_policy_steps=0, groups_per_batch=4)
    tasks = desk.tasks("train", 8)

    async def run(task: Task, ticket: Ticket) -> RolloutGroup:
        if ticket.index == 2:
            raise ZeroDivisionError("a bug")
        return group(str(ticket.index), [0.0, 1.0])

    producer = asyncio.create_task(keep_filled(buffer, tasks, run))
    with pytest.raises(BufferStopped, match="ZeroDivisionError: a bug") as stopped:
        await buffer.take_batch()
    assert isinstance(stopped.value.__cause__, ZeroDivisionError)
    await producer


async def _train(buffer: Buffer, run: Callable[[Task, Ticket], Awaitable[RolloutGroup]], tasks: Sequence[Task]) -> int:
    producer = asyncio.create_task(keep_filled(buffer, tasks, run))
    for steps in itertools.count():
        try:
            batch = await buffer.take_batch()
        except BufferStopped:
            await producer
            return steps
        for sample in batch.samples:
            assert buffer.policy_version - sample.min_policy_version <= buffer.max_off_policy_steps
        assert conserved(buffer.counts)
        await asyncio.sleep(0.001)
        await buffer.advance(buffer.policy_version + 1)
    raise AssertionError


async def test_tasks_that_end_are_all_trained_even_when_fewer_than_the_lag(desk: Taskset) -> None:
    async def run(task: Task, ticket: Ticket) -> RolloutGroup:
        await asyncio.sleep(0)
        return group(str(ticket.index), [0.0, 1.0], ticket.policy_version)

    for count, batches in ((3, 1), (7, 2), (8, 2), (1, 1)):
        buffer = Buffer(max_off_policy_steps=5, groups_per_batch=4)
        assert await _train(buffer, run, desk.tasks("train", count)) == batches
        assert buffer.counts.trained == buffer.counts.generated == count


@settings(max_examples=40, deadline=None)
@given(
    lag=st.integers(0, 3),
    per_batch=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(["good", "flat", "faulted", "slow"]), min_size=1, max_size=40),
)
def test_counts_are_conserved_and_nothing_over_age_is_trained(
    desk: Taskset, lag: int, per_batch: int, kinds: list[str]
) -> None:
    tasks = desk.tasks("train", 40)[: len(kinds)]

    async def run(task: Task, ticket: Ticket) -> RolloutGroup:
        kind = kinds[ticket.index]
        for _ in range(200 if kind == "slow" else 1):
            await asyncio.sleep(0)
        rewards: dict[str, list[float | None]] = {"flat": [1.0, 1.0], "faulted": [None, None]}
        return group(str(ticket.index), rewards.get(kind, [0.0, 1.0]), ticket.policy_version)

    async def main() -> Buffer:
        buffer = Buffer(
            max_off_policy_steps=lag,
            groups_per_batch=per_batch,
            fault_limit=1.0,
            resamples_per_batch=1,
            flat_batches_allowed=10**6,
        )
        await asyncio.wait_for(_train(buffer, run, tasks), 60)
        return buffer

    counts = asyncio.run(main()).counts
    assert conserved(counts)
    assert counts.generated == len(kinds)
    assert counts.running == counts.queued == counts.released == 0
