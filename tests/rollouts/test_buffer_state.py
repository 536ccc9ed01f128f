"""A buffer whose run is killed: what waited is trained once, what ran begins anew, and nothing is left out."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.rollouts import Buffer, BufferState, Ticket, read_buffer_state, write_buffer_state
from evergrad.types import EvergradError, Message, RolloutGroup
from tests.rollouts.test_buffer import blocked, conserved, group, take_ticket


def rich(name: str, version: int) -> RolloutGroup:
    """A group with all that a record can hold."""
    plain = group(name, [0.25, None], version)
    turn = replace(plain.rollouts[0].turns[0], messages=(Message("assistant", 'hé\n"'),), reward=0.5)
    first = replace(plain.rollouts[0], turns=(turn,), reward_parts={"a": 1.0, "b": math.inf}, slice="hard", temperature=0.6)
    return replace(plain, rollouts=(first, *plain.rollouts[1:]), teacher_prompts={(1, 2, 3): (1, 9, 2, 3)})


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    state = BufferState(12, (7, 9), {8: rich("g8", 3), 10: group("g10", [0.1 + 0.2], 4)}, 2, (True, False))
    write_buffer_state(tmp_path / "waiting.jsonl", state)
    assert read_buffer_state(tmp_path / "waiting.jsonl") == state
    write_buffer_state(tmp_path / "waiting.jsonl", BufferState())
    assert read_buffer_state(tmp_path / "waiting.jsonl") == BufferState()


@pytest.mark.parametrize("text", ["", "{}", '{"next_index": 1}\n{"index"', '{"next_index":1,"unfinished":[],"flat_batches":0}'])
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "waiting.jsonl"
    path.write_text(text)
    with pytest.raises(EvergradError, match=r"cannot be read: .*waiting\.jsonl.*Next: "):
        read_buffer_state(path)
    with pytest.raises(EvergradError, match="cannot be read"):
        read_buffer_state(tmp_path / "absent")


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    (tmp_path / "waiting.jsonl").symlink_to("/dev/full")
    with pytest.raises(EvergradError, match="No space left"):
        write_buffer_state(tmp_path / "waiting.jsonl", BufferState(3))


async def test_the_gaps_are_filled_first_and_what_waited_is_trained(tmp_path: Path) -> None:
    before = Buffer(max_off_policy_steps=2, groups_per_batch=2, policy_version=7)
    tickets = [await take_ticket(before) for _ in range(6)]
    for number in (5, 1, 3, 0):  # 2 and 4 are slow
        await before.put(tickets[number], group(str(number), [0.0, 1.0], 7))
    batch = await before.take_batch()
    assert {sample.group_id for sample in batch.samples} == {"0", "1"}
    await before.advance(8)
    write_buffer_state(tmp_path / "waiting.jsonl", before.state())

    after = Buffer(
        max_off_policy_steps=2, groups_per_batch=2, policy_version=8, start=read_buffer_state(tmp_path / "waiting.jsonl")
    )
    assert (after.counts.queued, after.counts.generated) == (2, 2)
    # Six slots, two of them taken by what waits.
    begun = [await take_ticket(after) for _ in range(4)]
    assert begun == [Ticket(2, 8), Ticket(4, 8), Ticket(6, 8), Ticket(7, 8)]
    assert await blocked(after.acquire())
    batch = await after.take_batch()
    assert {sample.group_id for sample in batch.samples} == {"3", "5"}
    assert batch.metrics["staleness_max"] == 1
    assert conserved(after.counts)


async def test_what_waited_too_long_is_over_age_after_a_resumption_too() -> None:
    old = BufferState(next_index=2, queued={0: group("0", [0.0, 1.0], 3), 1: group("1", [0.0, 1.0], 5)})
    buffer = Buffer(max_off_policy_steps=1, groups_per_batch=1, policy_version=6, start=old)
    batch = await buffer.take_batch()
    assert {sample.group_id for sample in batch.samples} == {"1"}
    assert buffer.counts.discarded == {"over_age": 1}


async def test_a_run_that_learns_nothing_stops_as_soon_as_if_it_had_not_been_killed() -> None:
    async def batches_until_the_end(start: BufferState | None, most: int) -> tuple[int, BufferState]:
        buffer = Buffer(max_off_policy_steps=0, groups_per_batch=1, flat_batches_allowed=3, start=start)
        for made in range(most):
            try:
                ticket = await take_ticket(buffer)
                await buffer.put(ticket, group(str(ticket.index), [1.0, 1.0], buffer.policy_version))
                await buffer.take_batch()
                await buffer.advance(buffer.policy_version + 1)
            except EvergradError:
                return made, buffer.state()
        return most, buffer.state()

    alone, _ = await batches_until_the_end(None, 99)
    killed, state = await batches_until_the_end(None, 2)
    rest, _ = await batches_until_the_end(state, 99)
    assert killed + rest == alone == 4


async def one_session(draw: Random, buffer: Buffer, batches: int, trained: Counter[str]) -> BufferState:
    """Some batches of groups that take as long as is drawn; what it leaves when it is killed right after the last of them."""

    async def run(ticket: Ticket) -> None:
        for _ in range(draw.choice([1, 5, 80])):
            await asyncio.sleep(0)
        await buffer.put(ticket, group(str(ticket.index), [0.0, 1.0], ticket.policy_version))

    async def produce() -> None:
        async with asyncio.TaskGroup() as running:
            while ticket := await buffer.acquire():
                running.create_task(run(ticket))

    producer = asyncio.create_task(produce())
    for _ in range(batches):
        batch = await buffer.take_batch()
        trained.update({sample.group_id for sample in batch.samples})
        assert all(buffer.policy_version - sample.min_policy_version <= buffer.max_off_policy_steps for sample in batch.samples)
        await asyncio.sleep(0)
        await buffer.advance(buffer.policy_version + 1)
    assert conserved(buffer.counts)
    state = buffer.state()
    producer.cancel()
    await asyncio.gather(producer, return_exceptions=True)
    return state


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), lag=st.integers(0, 3), per_batch=st.integers(1, 3))
def test_however_often_it_is_killed_every_group_is_used_once(seed: int, lag: int, per_batch: int) -> None:
    async def main() -> None:
        draw, trained, state, version, discarded = Random(seed), Counter[str](), BufferState(), 0, 0
        while version < 9:
            buffer = Buffer(
                max_off_policy_steps=lag,
                groups_per_batch=per_batch,
                policy_version=version,
                total_batches=9 - version,
                start=state,
            )
            state = await one_session(draw, buffer, min(draw.randint(1, 3), 9 - version), trained)
            version, discarded = buffer.policy_version, discarded + sum(buffer.counts.discarded.values())
        assert set(trained.values()) == {1}
        assert len(trained) == 9 * per_batch
        assert state.next_index == len(trained) + discarded + len(state.queued) + len(state.unfinished)

    asyncio.run(asyncio.wait_for(main(), 60))
