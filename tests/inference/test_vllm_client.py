"""vLLM behind the engine's interface: what it is asked, how its answers are read, what is refused.

The answers are those that ``test_vllm.py`` recorded from a real server.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from evergrad.inference import EngineError, EngineUnavailable
from evergrad.transfer import SlotPublisher, load_tensors
from evergrad.types import FinishReason, PolicySpan, Sampling
from tests.inference.played import RECORDS, Answer, adapter_of, recorded, vllm, vllm_answers


@pytest.fixture
def small(model_folder: Path) -> Path:
    """The model, which has the name that the recorded server had read."""
    assert model_folder.name == "small"
    return model_folder


async def test_a_request_names_all_that_decides_what_is_drawn(small: Path) -> None:
    async with vllm(vllm_answers(), small) as (client, server):
        sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, max_tokens=12, stop_token_ids=(4,), seed=3)
        done = await client([5, 6], sampling, session_id="s")
        (body,) = server.bodies("/inference/v1/generate")
    assert body == {
        "model": None,
        "token_ids": [5, 6],
        "cache_salt": "evergrad-0-0",
        "sampling_params": {
            "max_tokens": 12,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.05,
            "seed": 3,
            "stop_token_ids": [4],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }
    answer = recorded("POST", "/inference/v1/generate", "top_p")["choices"][0]
    assert done.token_ids == tuple(answer["token_ids"])
    assert done.logprobs == tuple(each["logprob"] for each in answer["logprobs"]["content"])
    assert all(logprob <= 0 for logprob in done.logprobs)
    assert done.policy_spans == (PolicySpan(0, 0, len(done.token_ids)),)
    assert done.finish_reason is FinishReason.LENGTH


async def test_a_probe_is_read_token_by_token(small: Path) -> None:
    probe = next(each for each in RECORDS if "prompt_logprobs" in each["kind"][2])
    told = json.loads(probe["answer"])["prompt_logprobs"]
    async with vllm(vllm_answers(), small) as (client, _):
        found = await client.logprobs(probe["body"]["token_ids"])
    assert len(found) == len(told) - 1
    assert found == [next(iter(place.values()))["logprob"] for place in told[1:]]


async def test_what_has_no_logprob_or_no_version_is_no_completion(small: Path) -> None:
    whole = recorded("POST", "/inference/v1/generate", "top_p")

    def changed(change: Callable[[Any], None]) -> Any:
        answer = json.loads(json.dumps(whole))
        change(answer["choices"][0])
        return answer

    wrong: list[tuple[str, Callable[[Any], None]]] = [
        ("no log-probability", lambda choice: choice["logprobs"]["content"][2].update(logprob=-9999.0)),
        ("cannot be read", lambda choice: choice["logprobs"]["content"][2].update(token_id=0, logprob=-1.0)),
        ("cannot be read", lambda choice: choice.update(weight_versions=None)),
        ("cannot be read", lambda choice: choice["weight_versions"][0].update(version="default")),
        ("cannot be read", lambda choice: choice.update(finish_reason="repetition")),
    ]
    for message, change in wrong:
        async with vllm({"/inference/v1/generate": changed(change)}, small) as (client, _):
            with pytest.raises(EngineError, match=message):
                await client([1, 2], Sampling())


async def test_a_server_that_can_do_it_is_opened_and_begins_with_the_base(small: Path) -> None:
    async with vllm(vllm_answers(), small) as (client, server):
        await client.open()
        assert server.bodies("/update_weight_version") == [{"new_version": "0"}]
        assert "/collective_rpc" not in server.paths()
        await client([1, 2], Sampling(seed=3))
        assert server.bodies("/inference/v1/generate")[-1]["sampling_params"]["seed"] is None  # on a CPU
        health = await client.health()
    assert health["load"]["kv_cache_tokens"] > 0
    assert {key: type(value) for key, value in health["load"].items()} == {
        "running": int,
        "waiting": int,
        "preemptions": int,
        "kv_usage": float,
        "kv_cache_tokens": int,
    }


async def test_weights_of_an_earlier_run_are_taken_out_first(small: Path) -> None:
    answers = {**vllm_answers(), "/weight_info": {"weight_version": "12"}, "/collective_rpc": {"results": [None]}}
    async with vllm(answers, small) as (client, _):
        with pytest.raises(EngineError, match=r"embeddings are tied.*leave engine\.url out"):
            await client.open()
    answers["/server_info?config_format=json"]["vllm_config"]["device_config"] = {"device_type": "cuda"}
    async with vllm(answers, small, route="reload") as (client, server):
        await client.open()
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(small)}}
        assert server.bodies("/collective_rpc") == [reload]
        order = [path for path in server.paths() if path in ("/pause", "/collective_rpc", "/update_weight_version", "/resume")]
    assert order[:4] == ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/version", {"version": "0.11.2"}, r"0\.11\.2 does not say which weights.*0\.32 or newer"),
        ("/server_info?config_format=json", None, "VLLM_SERVER_DEV_MODE=1"),
        ("logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("dtype", "torch.bfloat16", "--dtype float32"),
        ("/v1/models", {"data": [{"root": "models/other"}]}, "has read 'models/other'.*start it on"),
        ("lora_config", {"max_lora_rank": 8}, "no adapters of rank 16.*--max-lora-rank 16"),
    ],
)
async def test_what_a_server_cannot_do_is_said_with_what_to_change(small: Path, path: str, change: Any, message: str) -> None:
    answers = vllm_answers()
    info = json.loads(json.dumps(answers["/server_info?config_format=json"]))
    if path.startswith("/"):
        answers[path] = change
    elif path == "lora_config":
        info["vllm_config"][path] = change
    else:
        info["vllm_config"]["model_config"][path] = change
    if not path.startswith("/server_info"):
        answers["/server_info?config_format=json"] = info
    rank = 16 if path == "lora_config" else None
    async with vllm(answers, small, lora_rank=rank) as (client, _):
        with pytest.raises(EngineError, match=message):
            await client.open()


def slot_answers() -> dict[str, Answer]:
    return {
        **vllm_answers(),
        "/collective_rpc": {"results": [None]},
        "/v1/load_lora_adapter": "Success",
        "/v1/unload_lora_adapter": "Success",
    }


async def test_a_version_is_taken_while_the_server_stands_still(small: Path) -> None:
    tensors = load_tensors(small)
    async with vllm(slot_answers(), small) as (client, server):
        with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}) as publisher:
            await client.attach(publisher.descriptor)
            (info,) = server.bodies("/init_weight_transfer_engine")
            assert info["init_info"]["base"] == str(small)
            assert [each["name"] for each in info["init_info"]["tensors"]] == list(tensors)
            server.asked.clear()
            manifest = publisher.stage(tensors.items(), 5).as_dict()
            report = await client.update_weights(manifest)
            assert server.paths() == ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
            slot = publisher.descriptor["slots"][manifest["slot"]]
            assert server.bodies("/update_weights") == [{"update_info": slot}]
            assert server.bodies("/finish_weight_update") == [{"weight_version": "5"}]
    assert report["policy_version"] == client.policy_version == 5
    assert client.cache_salt == "evergrad-5-0"


async def test_a_request_that_comes_while_weights_change_begins_under_the_new_ones(small: Path) -> None:
    tensors = load_tensors(small)
    halfway, go_on = asyncio.Event(), asyncio.Event()

    async def update(body: Any) -> Any:
        halfway.set()
        await go_on.wait()
        return {}

    async with vllm({**slot_answers(), "/update_weights": update}, small) as (client, server):
        with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}) as publisher:
            await client.attach(publisher.descriptor)
            updating = asyncio.create_task(client.update_weights(publisher.stage(tensors.items(), 5).as_dict()))
            await halfway.wait()
            asking = asyncio.create_task(client([1, 2], Sampling()))
            await asyncio.sleep(0.1)
            assert server.bodies("/inference/v1/generate") == []
            go_on.set()
            await asyncio.gather(updating, asking)
        (body,) = server.bodies("/inference/v1/generate")
    assert body["cache_salt"] == "evergrad-5-0"


async def test_a_whole_folder_is_written_where_the_server_reads_one(small: Path, tmp_path: Path) -> None:
    """What was published lies over the base's other tensors, and the folder is gone afterwards."""
    base = load_tensors(small)
    name = next(each for each in base if "q_proj" in each)
    read: dict[str, torch.Tensor] = {}

    def reload(body: Any) -> Any:
        folder = Path(body["kwargs"]["weights_path"])
        assert folder.parent == tmp_path
        assert (folder / "config.json").is_file()
        read.update(load_tensors(folder))
        return {"results": [None]}

    async with vllm({**slot_answers(), "/collective_rpc": reload}, small, route="reload", scratch=tmp_path) as (client, _):
        with SlotPublisher({name: (tuple(base[name].shape), base[name].dtype)}) as publisher:
            await client.attach(publisher.descriptor)
            await client.update_weights(publisher.stage([(name, base[name] + 1)], 1).as_dict())
    assert read.keys() == base.keys()
    assert all(torch.equal(tensor, base[each] + (each == name)) for each, tensor in read.items())
    assert os.listdir(tmp_path) == []


async def test_a_failure_half_way_is_the_end_and_one_before_changes_nothing(small: Path) -> None:
    tensors = load_tensors(small)
    failing = web.json_response({"error": {"message": "out of memory"}}, status=500)
    async with vllm({**slot_answers(), "/update_weights": lambda _: failing}, small) as (client, server):
        with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}) as publisher:
            await client.attach(publisher.descriptor)
            manifest = publisher.stage(tensors.items(), 5).as_dict()
            with pytest.raises(EngineError, match=r"checksum.*version 0 is still served"):
                await client.update_weights({**manifest, "checksums": dict.fromkeys(manifest["checksums"], "00")})
            assert "/pause" not in server.paths()
            assert (await client([1, 2], Sampling())).token_ids
            with pytest.raises(EngineError, match=r"weights are unknown.*out of memory"):
                await client.update_weights(manifest)
            assert server.paths()[-1] == "/update_weights"  # not resumed
            for ask in (client([1, 2], Sampling()), client.logprobs([1, 2]), client.health()):
                with pytest.raises(EngineUnavailable, match="weights are unknown"):
                    await ask


async def test_adapters_have_names_of_their_own_and_leave_when_nobody_uses_them(small: Path, tmp_path: Path) -> None:
    config, tensors = adapter_of(small)
    answers, release = slot_answers(), asyncio.Event()
    seen: list[dict[str, torch.Tensor]] = []

    async def slow(body: Any) -> Any:
        if body["token_ids"] == [9, 9]:
            await release.wait()
        return recorded("POST", "/inference/v1/generate", "top_p")

    def load(body: Any) -> str:
        seen.append(load_tensors(body["lora_path"]))
        return "Success"

    answers |= {"/inference/v1/generate": slow, "/v1/load_lora_adapter": load}
    async with vllm(answers, small, route="adapter", lora_rank=2, scratch=tmp_path) as (client, server):
        with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}) as publisher:
            await client.attach({**publisher.descriptor, "adapter": config})
            await client.update_weights(publisher.stage(tensors.items(), 1).as_dict())
            old = asyncio.create_task(client([9, 9], Sampling()))
            await asyncio.sleep(0.1)
            report = await client.update_weights(publisher.stage(((n, 2 * t) for n, t in tensors.items()), 2).as_dict())
            new = await client([8, 8], Sampling())
            assert server.bodies("/v1/unload_lora_adapter") == []
            release.set()
            assert {span.policy_version for span in (await old).policy_spans} == {1}
            assert {span.policy_version for span in new.policy_spans} == {2}
            await client.update_weights(publisher.stage(tensors.items(), 3).as_dict())
        names = [body["lora_name"] for body in server.bodies("/v1/load_lora_adapter")]
        assert [body["model"] for body in server.bodies("/inference/v1/generate")] == names[:2]
        assert [body["lora_name"] for body in server.bodies("/v1/unload_lora_adapter")] == names[:2]
    assert report["pause_s"] == 0.0
    assert "/pause" not in server.paths()
    assert len(set(names)) == 3
    assert all(torch.equal(seen[1][name], 2 * seen[0][name]) for name in tensors)


async def test_log_probabilities_that_leave_the_temperature_out_are_found_out(small: Path) -> None:
    """Whatever the server says of itself."""
    drawn = recorded("POST", "/inference/v1/generate", "top_p")["choices"][0]
    plain = [None, *({str(token): {"logprob": 0.0}} for token in (2, 3, 4))]
    plain += [{str(each["token_id"]): {"logprob": each["logprob"]}} for each in drawn["logprobs"]["content"]]
    answers = vllm_answers()
    generate = answers["/inference/v1/generate"]
    answers["/inference/v1/generate"] = lambda body: (
        {"prompt_logprobs": plain} if "prompt_logprobs" in body["sampling_params"] else generate(body)
    )
    async with vllm(answers, small) as (client, _):
        with pytest.raises(EngineError, match=r"leave the temperature out.*processed_logprobs"):
            await client.require_own_distribution([1, 2, 3, 4])


async def test_every_session_counts_as_not_waited_for(small: Path) -> None:
    async with vllm(vllm_answers(), small) as (client, server):
        await client.open_sessions(["a", "b"])
        await client.open_sessions(["b", "c"])
        assert await client.close_sessions(["a"]) == 3
        assert [client.take_lockstep_misses(), client.take_lockstep_misses()] == [3, 0]
        assert server.asked == []


async def test_a_completion_is_one_piece_and_a_second_try_draws_anew(small: Path) -> None:
    async with vllm(vllm_answers(), small) as (client, server):
        (whole,) = [piece async for piece in client.stream([1, 2], Sampling(seed=4))]
        async for _ in client.stream([1, 2, 3], Sampling(seed=4), drawn=1):
            pass
        seeds = [body["sampling_params"]["seed"] for body in server.bodies("/inference/v1/generate")]
    assert whole.finish_reason is FinishReason.LENGTH
    assert seeds[0] == 4
    assert 0 <= seeds[1] < 2**63
    assert seeds[1] != 4
