"""SGLang behind the engine's interface, against answers written after its documentation: none runs where this was written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from evergrad.inference import EngineError
from evergrad.inference.backends import SglangClient
from evergrad.transfer import SlotPublisher, load_tensors
from evergrad.types import FinishReason, PolicySpan, Sampling, Usage
from tests.inference.played import Answer, Server, adapter_of


@pytest.fixture
def small(model_folder: Path) -> Path:
    return model_folder


def sglang_answers(small: Path) -> dict[str, Answer]:
    def generate(body: Any) -> Any:
        meta = {
            "id": "x",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 3,
            "cached_tokens": 1,
            "weight_version": "4",
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
            "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None], [-1.0, 9, None]],
            "input_token_logprobs": [[None if not at else -0.3, token, None] for at, token in enumerate(body["input_ids"])],
        }
        return {"text": "", "output_ids": [7, 8, 9], "meta_info": meta}

    return {
        "/generate": generate,
        "/get_model_info": {"model_path": str(small), "weight_version": "default"},
        "/get_server_info": {"dtype": "float32", "enable_lora": False, "max_total_num_tokens": 4096, "version": "0.5.23"},
        "/health": "",
        "/pause_generation": {"status": "ok"},
        "/continue_generation": {"status": "ok"},
        "/update_weight_version": {"success": True, "new_version": "0"},
        "/update_weights_from_disk": {"success": True, "message": "Succeeded to update model weights."},
        "/load_lora_adapter": {"success": True, "loaded_adapters": {}},
        "/unload_lora_adapter": {"success": True, "loaded_adapters": {}},
    }


@asynccontextmanager
async def sglang(answers: dict[str, Answer], model: Path, **options: Any) -> AsyncIterator[tuple[SglangClient, Server]]:
    server = Server(answers)
    async with server.test_server as running:
        options = {"route": "reload", "scratch": model.parent / "scratch", **options}
        async with SglangClient(str(running.make_url("")), model, **options) as client:
            yield client, server


async def test_sglang_is_asked_and_read_as_its_documentation_has_it(small: Path) -> None:
    async with sglang(sglang_answers(small), small) as (client, server):
        await client.open()
        server.asked.clear()
        done = await client([5, 6], Sampling(temperature=0.7, max_tokens=3, stop_token_ids=(4,), seed=2**31 + 3))
        assert await client.logprobs([5, 6, 7]) == [-0.3, -0.3]
        first, probe = server.bodies("/generate")
        health = await client.health()
    assert first == {
        "input_ids": [5, 6],
        "return_logprob": True,
        "stream": False,
        "extra_key": "evergrad-0-0",
        "sampling_params": {
            "max_new_tokens": 3,
            "temperature": 0.7,
            "stop_token_ids": [4],
            "ignore_eos": True,
            "sampling_seed": 3,
        },
    }
    assert probe["logprob_start_len"] == 0
    assert done.token_ids == (7, 8, 9)
    assert done.logprobs == (-0.5, -0.25, -1.0)
    assert done.policy_spans == (PolicySpan(3, 0, 1), PolicySpan(4, 1, 3))
    assert done.finish_reason is FinishReason.LENGTH
    assert done.usage == Usage(2, 1, 3, done.usage.seconds)
    assert health["load"]["kv_cache_tokens"] == 4096


async def test_sglang_takes_a_folder_while_it_stands_still(small: Path, tmp_path: Path) -> None:
    tensors = load_tensors(small)
    async with sglang(sglang_answers(small), small, scratch=tmp_path) as (client, server):
        with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}) as publisher:
            await client.attach(publisher.descriptor)
            await client.update_weights(publisher.stage(tensors.items(), 5).as_dict())
            assert server.paths() == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
            assert server.bodies("/pause_generation") == [{"mode": "in_place"}]
            (body,) = server.bodies("/update_weights_from_disk")
            assert (body["weight_version"], body["flush_cache"]) == ("5", False)
            server.answers["/update_weights_from_disk"] = {"success": False, "message": "no such file"}
            with pytest.raises(EngineError, match=r"weights are unknown.*no such file"):
                await client.update_weights(publisher.stage(tensors.items(), 6).as_dict())


async def test_sglang_takes_adapters_under_new_names(small: Path, tmp_path: Path) -> None:
    config, tensors = adapter_of(small)
    async with sglang(sglang_answers(small), small, route="adapter", scratch=tmp_path) as (client, server):
        with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}) as publisher:
            await client.attach({**publisher.descriptor, "adapter": config})
            for version in (1, 2):
                await client.update_weights(publisher.stage(tensors.items(), version).as_dict())
                done = await client([1], Sampling())
                assert done.policy_spans == (PolicySpan(version, 0, 3),)
        names = [body["lora_name"] for body in server.bodies("/load_lora_adapter")]
        assert [body["lora_path"] for body in server.bodies("/generate")] == names
        assert [body["lora_name"] for body in server.bodies("/unload_lora_adapter")] == names[:1]


async def test_what_sglang_cannot_do_is_refused(small: Path) -> None:
    async with sglang(sglang_answers(small), small) as (client, server):
        for sampling in (Sampling(top_p=0.9), Sampling(top_k=3), Sampling(min_p=0.1)):
            with pytest.raises(EngineError, match="top_p = 1"):
                await client([1], sampling)
        with pytest.raises(EngineError, match="stop_token_ids"):
            await client([1], Sampling(stop=("\n",)))
        assert server.asked == []
    wrong: list[tuple[str, Any, str]] = [
        ("/get_model_info", {"model_path": "models/other"}, "has read 'models/other'"),
        ("/get_server_info", {"dtype": "bfloat16"}, "--dtype float32"),
        ("/get_server_info", {"dtype": "float32", "enable_lora": False}, "--enable-lora"),
    ]
    for path, answer, message in wrong:
        async with sglang({**sglang_answers(small), path: answer}, small, route="adapter") as (client, _):
            with pytest.raises(EngineError, match=message):
                await client.open()
