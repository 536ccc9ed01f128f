"""A real vLLM server on the CPU: what it draws, how versions get in, and that nothing of it is left behind.

Needs the program in EVERGRAD_VLLM (``make test-vllm`` sets it). All but the last share one server: a start takes a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from evergrad.inference import EngineError, EngineUnavailable, Router
from evergrad.inference.backends import VllmClient, VllmServerConfig
from evergrad.loop.placement import LocalPlacement, Worker
from evergrad.registry.tiny import make_tiny
from evergrad.transfer import SlotPublisher, WirePublisher
from evergrad.transfer.transports import TcpOutbox
from evergrad.types import FinishReason, PolicySpan, Sampling

COMMAND = os.environ.get("EVERGRAD_VLLM", "")
RECORDS = os.environ.get("EVERGRAD_RECORD", "")
"""Where to write what was asked and answered, for the tests that need no server."""
PROMPT = [5, 6, 7, 8] * 20
TOLERANCE = 1e-3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not COMMAND, reason="EVERGRAD_VLLM names no vllm program; make test-vllm does"),
    pytest.mark.asyncio(loop_scope="module"),
]


class Truth:
    """The model in transformers, whose weights tests change and publish."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def nudge(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        logits = self.model(torch.tensor([list(token_ids)])).logits[0] / temperature
        scores = torch.log_softmax(logits, dim=-1)
        return [float(scores[place, token]) for place, token in enumerate(token_ids[1:])]

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(each.shape), each.dtype) for name, each in self.model.named_parameters()}


def differ(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads 32 wide, which vLLM's attention on a CPU knows; embeddings apart, without which it cannot read folders there."""
    place = make_tiny(tmp_path_factory.mktemp("vllm") / "small", hidden_size=128)
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, tie_word_embeddings=False)
    torch.nn.init.normal_(model.lm_head.weight, std=0.05, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    torch.manual_seed(0)
    return Truth(folder)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


async def server(placement: LocalPlacement, folder: Path, **settings: Any) -> Worker:
    arguments = ("--enforce-eager", "--max-model-len", "1024")
    config = VllmServerConfig(model=str(folder), threads=1, command=COMMAND, arguments=arguments, **settings)
    return await placement.start("vllm", "evergrad.inference.backends.vllm_server", config)


@pytest.fixture(scope="module")
async def worker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    async with LocalPlacement(tmp_path_factory.mktemp("logs")) as placement:
        yield await server(placement, folder)


@pytest.fixture(scope="module")
async def client(worker: Worker, folder: Path, scratch: Path) -> AsyncIterator[VllmClient]:
    found = VllmClient(worker.base_url, folder, route="slots", scratch=scratch, token=worker.token)
    records = record(found) if RECORDS else None
    await found.open()
    yield found
    await found.close()
    if records is not None:
        write_records(records, folder)


def write_records(records: list[dict[str, Any]], folder: Path) -> None:
    """Without what nobody reads, and without the names of this machine."""
    for each in records:
        if each["kind"][1].startswith("/server_info"):
            config = json.loads(each["answer"])["vllm_config"]
            model = {key: config["model_config"][key] for key in ("dtype", "logprobs_mode", "max_model_len")}
            kept = {"model_config": model, **{key: config[key] for key in ("device_config", "lora_config")}}
            each["answer"] = json.dumps({"vllm_config": kept})
        if each["kind"][1] == "/metrics":
            lines = (line for line in each["answer"].splitlines() if line.startswith("vllm:") and "_bucket" not in line)
            each["answer"] = "\n".join(lines)
    text = json.dumps(records, indent=1).replace(str(folder.parent), "models")
    Path(RECORDS).write_text(text + "\n", encoding="utf-8")


def record(client: VllmClient) -> list[dict[str, Any]]:
    """Keeps what is asked and answered from here on, the first of each kind."""
    records: list[dict[str, Any]] = []
    plain = client._http.exchange

    async def exchange(
        method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        status, content = await plain(method, path, body, timeout_s)
        kind = (method, path, sorted((body or {}).get("sampling_params", {})))
        if kind not in [record["kind"] for record in records]:
            records.append({"kind": kind, "body": body, "status": status, "answer": content.decode()})
        return status, content

    client._http.exchange = exchange  # type: ignore[method-assign]
    return records


async def test_what_is_drawn_has_the_logprobs_of_what_it_was_drawn_from(client: VllmClient, truth: Truth) -> None:
    for temperature in (1.0, 0.6):
        done = await client(PROMPT, Sampling(max_tokens=12, temperature=temperature, seed=3))
        whole = [*PROMPT, *done.token_ids]
        assert differ(done.logprobs, truth.logprobs(whole, temperature)[len(PROMPT) - 1 :]) < TOLERANCE
        assert done.policy_spans == (PolicySpan(0, 0, 12),)
        assert (done.finish_reason, done.usage.completion_tokens) == (FinishReason.LENGTH, 12)


async def test_a_stop_token_is_the_last_one_and_the_models_own_end_is_none(client: VllmClient) -> None:
    free = await client(PROMPT, Sampling(max_tokens=20, temperature=0.0))
    stop = free.token_ids[5]
    stopped = await client(PROMPT, Sampling(max_tokens=20, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


async def test_a_long_prompt_with_a_seed_does_not_end_it(client: VllmClient) -> None:
    """On a CPU vLLM dies of what is computed in pieces and seeded."""
    prompts = [[20 + index] * 900 for index in range(8)]
    done = await asyncio.gather(*(client(prompt, Sampling(max_tokens=2, seed=1)) for prompt in prompts))
    assert all(len(each.token_ids) == 2 for each in done)


async def test_a_prefix_is_found_again_until_it_is_given_up(client: VllmClient) -> None:
    prompt = [9, 10, 11, 12] * 100
    await client(prompt, Sampling(max_tokens=1))
    assert (await client(prompt, Sampling(max_tokens=1))).usage.cached_tokens > 0
    await client.reset_prefix_cache()
    assert (await client(prompt, Sampling(max_tokens=1))).usage.cached_tokens == 0


async def test_a_version_from_shared_memory_is_what_it_scores_and_draws_with(client: VllmClient, truth: Truth) -> None:
    with SlotPublisher(truth.layout()) as publisher:
        await client.attach(publisher.descriptor)
        for version in (1, 2):
            truth.nudge()
            report = await client.update_weights(publisher.stage(truth.model.named_parameters(), version).as_dict())
            assert report["policy_version"] == version
            assert report["pause_s"] > 0
            assert report["transfer"]["bytes"] > 0
            done = await client(PROMPT, Sampling(max_tokens=8, seed=1))
            assert done.usage.cached_tokens == 0
            assert done.policy_spans == (PolicySpan(version, 0, 8),)
            whole = [*PROMPT, *done.token_ids]
            expected = truth.logprobs(whole)
            assert differ(await client.logprobs(whole), expected) < TOLERANCE
            assert differ(done.logprobs, expected[len(PROMPT) - 1 :]) < TOLERANCE
        assert (await client.health())["policy_version"] == 2


async def test_what_was_published_in_part_lies_over_the_base(client: VllmClient, folder: Path, truth: Truth) -> None:
    changed = {name: tensor for name, tensor in truth.model.named_parameters() if "q_proj" in name or "down_proj" in name}
    base = Truth(folder)
    with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in changed.items()}) as publisher:
        await client.attach(publisher.descriptor)
        await client.update_weights(publisher.stage(changed.items(), 3).as_dict())
    base.model.load_state_dict(changed, strict=False)
    assert differ(await client.logprobs(PROMPT), base.logprobs(PROMPT)) < TOLERANCE


async def test_a_request_under_way_goes_on_and_says_where_it_changed(client: VllmClient, truth: Truth) -> None:
    with SlotPublisher(truth.layout()) as publisher:
        await client.attach(publisher.descriptor)
        before = client.policy_version
        running = [asyncio.create_task(client([*PROMPT, index], Sampling(max_tokens=800, seed=index))) for index in range(4)]
        await asyncio.sleep(2.0)
        await client.update_weights(publisher.stage(truth.model.named_parameters(), before + 1).as_dict())
        late = asyncio.create_task(client(PROMPT, Sampling(max_tokens=4)))
        for done in await asyncio.gather(*running):
            assert [span.policy_version for span in done.policy_spans] == [before, before + 1]
            assert done.policy_spans[0].end == done.policy_spans[1].start
            assert (done.policy_spans[0].start, done.policy_spans[1].end) == (0, len(done.token_ids))
        assert (await late).policy_spans == (PolicySpan(before + 1, 0, 4),)


async def test_a_version_over_tcp_gets_in_by_a_folder_too(
    worker: Worker, folder: Path, scratch: Path, client: VllmClient, truth: Truth
) -> None:
    reader = VllmClient(worker.base_url, folder, route="reload", scratch=scratch, token=worker.token)
    truth.nudge()
    with WirePublisher(truth.layout(), TcpOutbox("127.0.0.1")) as publisher:
        await reader.attach(publisher.descriptor)
        version = client.policy_version + 1
        await reader.update_weights(publisher.stage(truth.model.named_parameters(), version).as_dict())
        assert differ(await reader.logprobs(PROMPT), truth.logprobs(PROMPT)) < TOLERANCE
        assert (await reader.health())["policy_version"] == version
        assert os.listdir(scratch) == []
        await reader.close()
    fresh = VllmClient(worker.base_url, folder, route="slots", scratch=scratch, token=worker.token)
    await fresh.open()  # a new run begins with the base, whatever the last one left
    assert differ(await fresh.logprobs(PROMPT), Truth(folder).logprobs(PROMPT)) < TOLERANCE
    await fresh.close()


async def test_weights_that_are_not_finite_never_reach_it(worker: Worker, folder: Path, scratch: Path, truth: Truth) -> None:
    client = VllmClient(worker.base_url, folder, route="slots", scratch=scratch, token=worker.token)
    await client.open()
    before = await client.logprobs(PROMPT)
    broken = {name: tensor.detach().clone() for name, tensor in truth.model.named_parameters()}
    next(iter(broken.values()))[0, 0] = float("nan")
    with SlotPublisher(truth.layout()) as publisher:
        await client.attach(publisher.descriptor)
        with pytest.raises(EngineError, match=r"not finite.*version 0 is still served"):
            await client.update_weights(publisher.stage(broken.items(), 1).as_dict())
    assert await client.logprobs(PROMPT) == before
    await client.close()


async def test_a_stranger_may_ask_only_whether_it_is_there(worker: Worker, folder: Path, scratch: Path) -> None:
    stranger = VllmClient(worker.base_url, folder, route="slots", scratch=scratch, token="guess")
    await stranger._http.tell("GET", "/health")
    with pytest.raises(EngineError, match="EVERGRAD_TOKEN"):
        await stranger.pause()
    with pytest.raises(EngineError, match="EVERGRAD_TOKEN"):
        await stranger.logprobs(PROMPT)
    await stranger.close()


async def test_an_update_that_fails_half_way_is_the_end_of_it(
    worker: Worker, folder: Path, scratch: Path, truth: Truth
) -> None:
    client = VllmClient(worker.base_url, folder, route="slots", scratch=scratch, token=worker.token)
    with SlotPublisher(truth.layout()) as publisher:
        await client.attach(publisher.descriptor)
        await client._http.post("/start_weight_update", {})  # somebody else's, so that ours is refused
        with pytest.raises(EngineError, match="weights are unknown"):
            await client.update_weights(publisher.stage(truth.model.named_parameters(), 7).as_dict())
        with pytest.raises(EngineUnavailable, match="weights are unknown"):
            await client(PROMPT, Sampling(max_tokens=1))
        with pytest.raises(EngineUnavailable, match="weights are unknown"):
            await client.health()
    await client.close()


async def test_adapters_are_loaded_beside_each_other(folder: Path, tmp_path: Path) -> None:
    """Their own server, and behind a router; then it is killed, and nothing of it is left."""
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    model = get_peft_model(base, settings).eval()
    adapter = {**settings.to_dict(), "target_modules": sorted(settings.target_modules), "base_model_name_or_path": str(folder)}
    adapter = {key: value for key, value in adapter.items() if isinstance(value, (str, int, float, list, bool, type(None)))}
    adapter |= {"peft_type": "LORA", "task_type": "CAUSAL_LM"}

    def parts() -> dict[str, torch.Tensor]:
        return {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if "lora_" in n}

    async with LocalPlacement(tmp_path / "logs") as placement:
        worker = await server(placement, folder, lora_rank=4)
        alone = VllmClient(
            worker.base_url, folder, route="adapter", scratch=tmp_path / "scratch", token=worker.token, lora_rank=4
        )
        await alone.open()
        async with Router() as router:
            await router.add("a", alone)
            layout = {name: (tuple(part.shape), part.dtype) for name, part in parts().items()}
            with SlotPublisher(layout) as publisher:
                await router.attach({**publisher.descriptor, "adapter": adapter})
                for version in (1, 2, 3):
                    with torch.no_grad():
                        for part in parts().values():
                            part.add_(torch.randn_like(part) * 0.1)
                    running = asyncio.create_task(router(PROMPT, Sampling(max_tokens=200, seed=1), session_id="s"))
                    await asyncio.sleep(0.5)
                    report = await router.update_weights(publisher.stage(parts().items(), version).as_dict())
                    assert report["pause_s"] == 0.0
                    assert (await running).policy_spans == (PolicySpan(version - 1, 0, 200),)
                    done = await router(PROMPT, Sampling(max_tokens=6, seed=1), session_id="t")
                    assert done.policy_spans == (PolicySpan(version, 0, 6),)
                    with torch.no_grad():
                        scores = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], dim=-1)
                    expected = [float(scores[place, token]) for place, token in enumerate(PROMPT[1:])]
                    assert differ(await router.logprobs(PROMPT), expected) < TOLERANCE
        family = psutil.Process(worker.process.pid).children(recursive=True)
        worker.process.kill()
        gone, alive = psutil.wait_procs(family, timeout=30)
    assert gone
    assert not alive
