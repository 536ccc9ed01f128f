"""What the server offers besides single completions: texts, stops, prompts' log-probabilities, adapters, pauses, figures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from evergrad.inference import EngineClient, EngineConfig, EngineError
from evergrad.inference.engine import Engine
from evergrad.inference.server import EngineServer
from evergrad.types import FinishReason, PolicySpan, Sampling
from tests.inference.conftest import load_reference, prompt_of, reference_logprobs
from tests.inference.test_families import make_adapter, tuned_reference
from tests.inference.test_server import TOKEN, Server, serving

ADMIN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[Server]:
    with serving(model_folder, served_names=["agent"]) as running:
        yield running


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        yield http


@pytest.fixture
async def texts(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as texts:
        yield texts


async def generate(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def admin(http: httpx.AsyncClient, route: str, **body: Any) -> httpx.Response:
    return await http.post(f"/admin/{route}", json=body or None, headers=ADMIN)


# ── Texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_completion_is_generate_with_texts(
    texts: openai.AsyncOpenAI, http: httpx.AsyncClient, model_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer.encode("Where is it?", add_special_tokens=False)
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "n": 2}
    params = {**settings, "stop_token_ids": [2]}
    expected = (await generate(http, token_ids=ids, sampling_params=params))["choices"]
    for prompt in ("Where is it?", ids):
        answer = await texts.completions.create(model="agent", prompt=prompt, logprobs=1, **settings)
        for choice, wanted in zip(answer.choices, expected, strict=True):
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == pytest.approx([one["logprob"] for one in wanted["logprobs"]["content"]])
            spoken = [token for token in wanted["token_ids"] if token != 2]
            assert choice.text == tokenizer.decode(spoken, skip_special_tokens=True)
            assert choice.finish_reason == wanted["finish_reason"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
    streamed = ["", ""]
    async for chunk in await texts.completions.create(model="agent", prompt="Where is it?", stream=True, **settings):
        for part in chunk.choices:
            streamed[part.index] += part.text
    assert streamed == [choice.text for choice in answer.choices]
    several = await texts.completions.create(model="agent", prompt=["Where is it?", "Who?"], **settings)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[:2]] == streamed


async def test_an_echo_has_the_prompts_logprobs(texts: openai.AsyncOpenAI, model_folder: Path) -> None:
    """What evaluation harnesses score answers by: the log-probability of a text that is given."""
    prompt = list(prompt_of(30))
    expected = reference_logprobs(load_reference(model_folder), prompt[:1], prompt[1:])[range(29), prompt[1:]].tolist()
    for max_tokens in (0, 1):
        answer = await texts.completions.create(
            model="agent", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:30] == pytest.approx(expected, abs=1e-4)
        assert len(choice.logprobs.token_logprobs) == 30 + max_tokens


async def test_prompt_logprobs_come_on_request(http: httpx.AsyncClient, model_folder: Path) -> None:
    prompt = list(prompt_of(20, seed=5))
    params = {"max_tokens": 3, "temperature": 0.5, "seed": 1}
    plain = await generate(http, token_ids=prompt, sampling_params=params)
    assert "prompt_logprobs" not in plain
    asked = await generate(http, token_ids=prompt, sampling_params={**params, "prompt_logprobs": 1})
    first, *rest = asked["prompt_logprobs"]
    assert first is None
    assert [one["token_id"] for one in rest] == prompt[1:]
    expected = reference_logprobs(load_reference(model_folder), prompt[:1], prompt[1:])[range(19), prompt[1:]].tolist()
    assert [one["logprob"] for one in rest] == pytest.approx(expected, abs=1e-4)
    assert asked["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


async def test_a_stop_text_ends_at_the_token_that_completes_it(http: httpx.AsyncClient, model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    params = {"max_tokens": 60, "temperature": 1.0, "seed": 9}
    free = (await generate(http, token_ids=[5, 6, 7], sampling_params=params))["choices"][0]["token_ids"]
    letters = [place for place in range(4, 50) if all(32 < ord(c) < 127 for c in tokenizer.decode(free[place : place + 2]))]
    stop = tokenizer.decode(free[letters[0] : letters[0] + 2])
    end = next(at for at in range(1, 61) if stop in tokenizer.decode(free[:at], skip_special_tokens=True))
    for n in (1, 3):
        (cut, *_) = (await generate(http, token_ids=[5, 6, 7], sampling_params={**params, "stop": [stop], "n": n}))["choices"]
        assert cut["token_ids"] == free[:end]
        assert cut["finish_reason"] == "stop"
    # A try that goes on from the first of them sees the stop, although a part of it was drawn before.
    again = await generate(
        http, token_ids=[5, 6, 7, *free[: end - 1]], drawn=end - 1, sampling_params={**params, "max_tokens": 9, "stop": stop}
    )
    assert again["choices"][0]["token_ids"] == free[end - 1 : end]


async def test_a_grammar_that_broke_off_goes_on_where_it_was(http: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"], "additionalProperties": False}
    params = {"max_tokens": 60, "seed": 2, "structured_outputs": {"json": schema}}
    whole = (await generate(http, token_ids=[5, 6], sampling_params=params))["choices"][0]
    assert whole["finish_reason"] == "stop"
    for cut in range(1, len(whole["token_ids"])):
        before = whole["token_ids"][:cut]
        rest = await generate(http, token_ids=[5, 6, *before], drawn=cut, sampling_params=params)
        assert rest["choices"][0]["token_ids"] == whole["token_ids"][cut:]
    refused = await http.post("/inference/v1/generate", json={"token_ids": [5, 6, 7], "drawn": 1, "sampling_params": params})
    assert refused.status_code == 400
    assert "does not follow the grammar" in refused.json()["error"]["message"]


# ── Adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_adapter_is_a_model_from_its_loading_to_its_dropping(
    server: Server, http: httpx.AsyncClient, texts: openai.AsyncOpenAI, model_folder: Path, tmp_path: Path
) -> None:
    folder = make_adapter(model_folder, tmp_path / "adapter", 3)
    prompt, params = list(prompt_of(20)), {"max_tokens": 8, "seed": 1}
    plain = await generate(http, token_ids=prompt, sampling_params=params)
    async with server.client() as client:
        assert (await client.load_adapter("tuned", str(folder)))["adapters"] == ["tuned"]
    assert "tuned" in [model.id async for model in texts.models.list()]
    tuned = await generate(http, token_ids=prompt, sampling_params=params, model="tuned")
    expected = reference_logprobs(tuned_reference(model_folder, folder), prompt, tuned["choices"][0]["token_ids"])
    found = [one["logprob"] for one in tuned["choices"][0]["logprobs"]["content"]]
    assert found == pytest.approx(expected[range(8), tuned["choices"][0]["token_ids"]].tolist(), abs=1e-4)
    again = await generate(http, token_ids=prompt, sampling_params=params)
    assert again["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    async with server.client() as client:
        with pytest.raises(EngineError, match="status 409"):
            await client.load_adapter("bad", str(tmp_path / "none"))
        assert (await client.drop_adapter("tuned"))["adapters"] == []
    gone = await http.post("/inference/v1/generate", json={"token_ids": prompt, "model": "tuned"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert (await admin(http, "adapters/drop", name="tuned")).status_code == 400


# ── Pauses and updates ───────────────────────────────────────────────────────────────────────────────────────────────────


async def rows(http: httpx.AsyncClient) -> tuple[int, int]:
    load = (await http.get("/health")).json()["load"]
    return load["running"], load["waiting"]


async def until_running(http: httpx.AsyncClient, number: int) -> None:
    for _ in range(2000):
        if sum(await rows(http)) >= number:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing runs")


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_a_pause_does_what_it_says_with_what_runs(
    server: Server, http: httpx.AsyncClient, mode: Literal["keep", "drain", "abort"]
) -> None:
    async with server.client() as client:
        running = [asyncio.create_task(client(prompt_of(9, seed=i), Sampling(max_tokens=120, seed=i))) for i in range(4)]
        await until_running(http, 4)
        assert (await client.pause(mode))["paused"]
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "paused")
        late = asyncio.create_task(client(prompt_of(12), Sampling(max_tokens=5, seed=1)))
        await until_running(http, 1)
        if mode == "keep":
            assert (await rows(http))[0] == 4
        else:
            for done in await asyncio.gather(*running):
                assert done.finish_reason is (FinishReason.LENGTH if mode == "drain" else FinishReason.ABORT)
                assert (len(done.token_ids) == 120) is (mode == "drain")
        assert not late.done()
        assert not (await client.resume())["paused"]
        assert len((await late).token_ids) == 5
        if mode == "keep":
            assert [len(done.token_ids) for done in await asyncio.gather(*running)] == [120] * 4


@pytest.mark.parametrize("mode", ["keep", "drain", "abort", "paused"])
async def test_an_update_does_what_it_says_with_what_runs(model_folder: Path, other_folder: Path, mode: Any) -> None:
    with serving(model_folder, max_rows=3) as server:
        async with server.client() as client, httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            running = [asyncio.create_task(client(prompt_of(9, seed=i), Sampling(max_tokens=150, seed=i))) for i in range(6)]
            await until_running(http, 6)
            for _ in range(500):
                if (await rows(http))[0] == 3:
                    break
            if mode == "paused":
                await client.pause()
            how = "keep" if mode == "paused" else mode
            report = await client.load_weights(str(other_folder), 1, mode=how)
            assert report["policy_version"] == 1
            assert report["pause_s"] >= 0
            assert ("drain_s" in report) is (mode == "drain")
            if mode == "paused":
                with pytest.raises(EngineError, match=r"status 409.*cannot drain"):
                    await client.load_weights(str(other_folder), 2, mode="drain")
                assert await client.resume() == {"paused": False, "policy_version": 1}
            finished = await asyncio.gather(*running)
            versions = [tuple(span.policy_version for span in done.policy_spans) for done in finished]
            if mode == "abort":
                assert {done.finish_reason for done in finished} == {FinishReason.ABORT}
            else:
                assert {len(done.token_ids) for done in finished} == {150}
            if mode == "drain":
                # Each was drawn under one version: what had begun under the old one, what waited under the new one.
                assert sorted(versions) == [(0,)] * 3 + [(1,)] * 3
            after = await client(prompt_of(5), Sampling(max_tokens=3))
            assert after.policy_spans == (PolicySpan(1, 0, 3),)


# ── Figures and health ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_figures_are_prometheus(http: httpx.AsyncClient) -> None:
    async def figures() -> dict[str, float]:
        answer = await http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            assert family.documentation
            for sample in family.samples:
                found[sample.name + "".join(sample.labels.values())] = sample.value
        return found

    before = await figures()
    await generate(http, token_ids=list(prompt_of(11, seed=77)), sampling_params={"max_tokens": 7, "n": 2, "temperature": 0})
    after = await figures()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["evergrad_engine_tokens_drawn_total"] == 14
    assert grown["evergrad_engine_tokens_computed_total"] >= 17
    assert grown["evergrad_engine_prompt_tokens_cached_total"] >= 11
    assert grown["evergrad_engine_completions_totallength"] == 2
    assert grown["evergrad_engine_request_seconds_count"] == 2
    assert grown["evergrad_engine_first_token_seconds_count"] == 1
    assert (after["evergrad_engine_rows_running"], after["evergrad_engine_kv_usage"]) == (0, 0)


async def test_a_stuck_engine_is_told_from_a_working_one(model_folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(model_folder), device="cpu", kv_cache_tokens=1024, stuck_after_s=0.5))
    served = EngineServer(engine, TOKEN)
    running = uvicorn.Server(uvicorn.Config(served.app, port=0, log_config=None))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:  # noqa: ASYNC110 (a flag of the other thread)
        await asyncio.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    release = threading.Event()
    try:
        async with EngineClient(f"http://127.0.0.1:{port}", TOKEN) as client:
            assert (await client.health())["status"] == "ok"
            served._steps.call(release.wait)
            await asyncio.sleep(0.6)
            with pytest.raises(EngineError, match=r"status 503.*at one thing for more than 0.5 s"):
                await client.health()
            release.set()
            assert len((await client(prompt_of(5), Sampling(max_tokens=2))).token_ids) == 2
            assert (await client.health())["status"] == "ok"
    finally:
        release.set()
        running.should_exit = True
        thread.join()
