"""Real engines behind the router: pieces of a completion, one that goes on elsewhere, and a replica that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from evergrad.inference import EngineClient, EngineError, Piece, Router
from evergrad.transfer import SlotPublisher, load_tensors
from evergrad.types import Completion, FinishReason, PolicySpan, Sampling
from tests.inference.conftest import load_reference, prompt_of, reference_logprobs
from tests.inference.test_server import serving


async def pieces_of(client: EngineClient, prompt: Sequence[int], sampling: Sampling, drawn: int = 0) -> list[Piece]:
    return [piece async for piece in client.stream(prompt, sampling, drawn=drawn)]


async def test_pieces_are_the_whole_and_go_on_anywhere(model_folder: Path) -> None:
    with serving(model_folder) as server:
        async with server.client() as client:
            prompt, sampling = prompt_of(30), Sampling(temperature=1.0, max_tokens=24, seed=3)
            whole = await client(prompt, sampling)
            pieces = await pieces_of(client, prompt, sampling)
            assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
            assert [value for piece in pieces for value in piece.logprobs] == pytest.approx(whole.logprobs, abs=1e-5)
            assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [FinishReason.LENGTH]
            assert len(pieces) > 1
            assert pieces[-1].policy_spans[-1].end == 24
            assert pieces[-1].cached_tokens == 29
            for at in (1, 9, 23):
                left = Sampling(temperature=1.0, max_tokens=24 - at, seed=3)
                more = await pieces_of(client, (*prompt, *whole.token_ids[:at]), left, drawn=at)
                assert [token for piece in more for token in piece.token_ids] == list(whole.token_ids[at:])
            with pytest.raises(EngineError, match="31 of the prompt's 30 tokens cannot have been drawn"):
                await pieces_of(client, prompt, sampling, drawn=31)
            with pytest.raises(EngineError, match="outside of the vocabulary"):
                await pieces_of(client, [5000], sampling)
        async with httpx.AsyncClient(base_url=server.url) as http:
            body = {"token_ids": list(prompt), "sampling_params": {"max_tokens": 3, "n": 2, "seed": 1}, "stream": True}
            text = (await http.post("/inference/v1/generate", json=body)).text
            assert text.endswith("data: [DONE]\n\n")
            assert text.count('"usage"') == 1


async def test_a_replica_is_killed_and_nothing_is_lost(model_folder: Path, other_folder: Path) -> None:
    """Sessions of three turns over two engines; the weights change under way, then one engine dies, then another joins."""
    old, new = load_reference(model_folder), load_reference(other_folder)
    tensors = load_tensors(other_folder)
    publisher = SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()})
    with publisher, serving(model_folder) as first, serving(model_folder) as second, serving(model_folder) as third:
        async with Router() as router:
            await router.add("first", first.client())
            await router.add("second", second.client())
            await router.attach(publisher.descriptor)
            turns: list[tuple[tuple[int, ...], Sampling, Completion]] = []
            ended = asyncio.Semaphore(0)

            async def session(group: int, index: int) -> None:
                prompt = prompt_of(40, seed=group)
                for turn in range(3):
                    sampling = Sampling(max_tokens=50, seed=1000 * group + 10 * index + turn)
                    done = await router(prompt, sampling, session_id=f"g{group}/{index}")
                    turns.append((prompt, sampling, done))
                    ended.release()
                    prompt = (*prompt, *done.token_ids[:10], 7, 8, 9)

            sessions = [asyncio.create_task(session(group, index)) for group in range(4) for index in range(3)]
            for _ in range(4):
                await ended.acquire()
            receipt = await router.update_weights(publisher.stage(tensors.items(), policy_version=1).as_dict())
            assert (receipt["policy_version"], receipt["left_behind"]) == (1, {})
            for _ in range(8):
                await ended.acquire()
            victim = next(name for name, each in (await router.health())["replicas"].items() if each["running"])
            (first if victim == "first" else second).process.kill()
            await router.add("third", third.client())
            await asyncio.gather(*sessions)
            states = {name: each["state"] for name, each in (await router.health())["replicas"].items()}
            assert states.pop(victim) == "down"
            assert set(states.values()) == {"ready"}
            assert (await third.client().health())["policy_version"] == 1
    assert len(turns) == 36
    seen: set[int] = set()
    for prompt, sampling, done in turns:
        assert len(done.token_ids) == sampling.max_tokens
        assert done.policy_spans[0].start == 0
        seen |= check_spans(prompt, done, old, new)
    assert seen == {0, 1}


def check_spans(prompt: tuple[int, ...], done: Completion, old, new) -> set[int]:  # type: ignore[no-untyped-def]
    """Each token's logprob is that of the version which its span names, given all tokens before it."""
    expected = {0: reference_logprobs(old, prompt, done.token_ids), 1: reference_logprobs(new, prompt, done.token_ids)}
    place, versions = 0, set[int]()
    for span in done.policy_spans:
        assert span == PolicySpan(span.policy_version, place, span.end)
        # After a change under way keys and values of the old weights stay: the version is right, the number is in between.
        if span is done.policy_spans[0]:
            for at in range(span.start, span.end):
                value = float(expected[span.policy_version][at, done.token_ids[at]])
                assert done.logprobs[at] == pytest.approx(value, abs=1e-3)
        versions.add(span.policy_version)
        place = span.end
    assert place == len(done.token_ids)
    return versions
