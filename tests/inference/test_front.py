"""The front of two versions: sessions keep their sides, a failing candidate is no customer's trouble, and a rollback under
load loses nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.inference import EngineError, EngineUnavailable, Front, Shadow, Split
from evergrad.inference.front import place
from evergrad.types import Completion, FinishReason, PolicySpan, Sampling, Side
from tests.inference.conftest import prompt_of
from tests.inference.test_server import serving

SESSIONS = st.lists(st.one_of(st.integers(0, 40).map(str), st.floats(0.0, 1.0)), max_size=80)
"""Requests by the id of their session; a number is a new share, if it is a larger one."""


@given(SESSIONS, st.text())
def test_a_session_never_changes_sides_while_the_share_grows(events: list[str | float], salt: str) -> None:
    split, sides = Split(salt), dict[str, Side]()
    for event in events:
        if isinstance(event, str):
            assert sides.setdefault(event, split.side(event)) is split.side(event)
        elif event >= split.share:
            split.widen(event)


@given(st.text(), st.floats(0, 1), st.lists(st.text(), max_size=20))
def test_sides_are_reproducible_by_salt_and_share_alone(salt: str, share: float, sessions: list[str]) -> None:
    """Another process, or this one after a restart, deals alike, whatever the order."""
    one, other = Split(salt, share), Split(salt, share)
    assert [one.side(each) for each in sessions] == [other.side(each) for each in reversed(sessions)][::-1]
    assert all((place(salt, each) < share) is (one.side(each) is Side.CANDIDATE) for each in sessions)


@given(st.text(), st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_growing_share_keeps_those_it_had(salt: str, session: str, a: float, b: float) -> None:
    smaller, larger = sorted((a, b))
    if Split(salt, smaller).side(session) is Side.CANDIDATE:
        assert Split(salt, larger).side(session) is Side.CANDIDATE


def test_shares_are_what_they_say_and_each_release_begins_with_other_sessions() -> None:
    sessions = [f"customer-{number}" for number in range(20_000)]
    first, second = ([each for each in sessions if place(salt, each) < 0.05] for salt in ("production/v2/1", "production/v3/2"))
    for dealt in (first, second):
        assert len(dealt) == pytest.approx(1000, abs=100)  # three standard errors are 92
    assert len(set(first) & set(second)) == pytest.approx(50, abs=25)
    assert Split("x", 1.0).side("any") is Side.CANDIDATE
    assert Split("x", 1.0).side(None) is Side.INCUMBENT, "a session that cannot be known again"
    with pytest.raises(EngineError, match="only grow"):
        Split("x", 0.5).widen(0.4)


class Says:
    """An engine that says its own number, or fails."""

    def __init__(self, number: int, error: EngineError | None = None) -> None:
        self.number, self.error, self.asked = number, error, list[str | None]()

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        self.asked.append(session_id)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Completion((self.number,), (-0.1,), FinishReason.LENGTH, (PolicySpan(self.number, 0, 1),))


async def test_each_session_is_answered_by_its_side() -> None:
    split = Split("salt", 0.3)
    front = Front(Says(1), Says(2), split)
    for number in range(60):
        said = await front([5], Sampling(), session_id=f"s{number}")
        assert said.token_ids == ((2,) if split.side(f"s{number}") is Side.CANDIDATE else (1,))
    assert (await front([5], Sampling())).token_ids == (1,)


async def test_where_the_candidate_fails_the_incumbent_answers_to_the_sessions_end() -> None:
    incumbent, candidate = Says(1), Says(2, EngineUnavailable("died"))
    front = Front(incumbent, candidate, Split("salt", 1.0))
    for _ in range(3):
        assert (await front([5], Sampling(), session_id="a")).token_ids == (1,)
    assert candidate.asked == ["a"], "a session that was taken over is not given back"
    assert front.failed == {"a": "died"}
    assert front.side("a") is Side.CANDIDATE, "it was dealt to the candidate, and counts for it"


async def test_what_both_refuse_is_no_fault_of_the_candidate() -> None:
    front = Front(Says(1, EngineError("too long")), Says(2, EngineError("too long")), Split("salt", 1.0))
    with pytest.raises(EngineError, match="too long"):
        await front([5], Sampling(), session_id="a")
    assert front.failed == {}


async def test_a_shadow_answers_copies_that_nobody_sees() -> None:
    candidate = Says(2)
    shadow = Shadow(Says(1), candidate, concurrency=2)
    said = await asyncio.gather(*(shadow([5], Sampling(), session_id=str(number)) for number in range(5)))
    assert {each.token_ids for each in said} == {(1,)}
    await shadow.settle()
    assert (shadow.answered, shadow.equal, shadow.left_out, shadow.failures) == (2, 0, 3, [])
    assert candidate.asked == [None, None]
    same = Shadow(Says(1), Says(1))
    broken = Shadow(Says(1), Says(2, EngineUnavailable("died")))
    for each in (same, broken):
        assert (await each([5], Sampling(), session_id="a")).token_ids == (1,)
        await each.settle()
        await each.close()
    assert (same.answered, same.equal) == (1, 1)
    assert (broken.answered, broken.failures) == (0, ["died"])


async def test_rollback_under_load_loses_nothing_and_the_predecessor_answers_as_it_did(
    model_folder: Path, other_folder: Path
) -> None:
    """Real engines, 200 requests in flight while the candidate is rolled back."""
    sampling = Sampling(temperature=0.0, max_tokens=8)
    prompts = [prompt_of(20, seed=number) for number in range(200)]
    with serving(model_folder) as first, serving(other_folder) as second:
        incumbent, candidate = first.client(), second.client()
        before = [await incumbent(prompt, sampling) for prompt in prompts[:20]]
        split = Split("production/v2/1", 0.5)
        front = Front(incumbent, candidate, split)
        ended = asyncio.Semaphore(0)

        async def ask(number: int) -> Completion:
            done = await front(prompts[number], sampling, session_id=f"s{number}")
            ended.release()
            return done

        flying = [asyncio.create_task(ask(number)) for number in range(200)]
        for _ in range(5):
            await ended.acquire()
        assert sum(not each.done() for each in flying) > 100
        front.roll_back()
        during = await asyncio.gather(*flying)
        await incumbent.reset_prefix_cache()  # what was computed in another batch may differ in the last bit
        after = [await front(prompt, sampling, session_id=f"s{number}") for number, prompt in enumerate(prompts[:20])]
        await incumbent.close()
        await candidate.close()
    assert all(each.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) and each.token_ids for each in during)
    assert not front.failed
    by = Counter(split.side(f"s{number}") for number in range(200))
    assert min(by.values()) > 60
    spoke = {tuple(each.token_ids) for each in before}
    assert [(each.token_ids, each.logprobs) for each in after] == [(each.token_ids, each.logprobs) for each in before]
    moved = [number for number in range(20) if split.side(f"s{number}") is Side.CANDIDATE]
    assert any(during[number].token_ids not in spoke for number in moved), "the two versions of this test say different things"
