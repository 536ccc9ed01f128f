"""vLLM and SGLang behind the engine's interface: what they are asked, how their answers are read, what is refused.

vLLM's answers are those that ``test_vllm.py`` recorded from a real server; SGLang's are written after its documentation.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from evergrad.inference import EngineError, EngineUnavailable
from evergrad.inference.backends import BackendConfig, SglangClient, VllmClient, VllmServerConfig
from evergrad.inference.backends.evergrad_vllm import RequireToken
from evergrad.loop.placement import LocalPlacement, WorkerDied
from evergrad.transfer import SlotPublisher, load_tensors
from evergrad.types import FinishReason, PolicySpan, Sampling, Usage

RECORDS = json.loads((Path(__file__).parent / "recorded" / "vllm.json").read_text(encoding="utf-8"))
Answer = Any | Callable[[Any], Any]


def recorded(method: str, path: str, parameter: str = "") -> Any:
    """What a real vLLM answered, JSON or text; to the request with that sampling parameter, where there are several."""
    for each in RECORDS:
        if each["kind"][:2] == [method, path] and (not parameter or parameter in each["kind"][2]):
            try:
                return json.loads(each["answer"])
            except ValueError:
                return each["answer"]
    raise LookupError(f"{method} {path} was not recorded")


class Server:
    """Plays a server: answers by path, and remembers in order what it was asked."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.test_server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        answer = self.answers.get(request.path_qs, self.answers.get(request.path))
        if callable(answer):
            answer = answer(body)
            if asyncio.iscoroutine(answer):
                answer = await answer
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if isinstance(answer, web.Response):
            return answer
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]


def vllm_answers() -> dict[str, Answer]:
    """All routes of the recorded server."""

    def generate(body: Any) -> Any:
        kind = "prompt_logprobs" if "prompt_logprobs" in body["sampling_params"] else "top_p"
        return recorded("POST", "/inference/v1/generate", kind)

    routes = {each["kind"][1]: recorded(each["kind"][0], each["kind"][1]) for each in RECORDS}
    return {**routes, "/inference/v1/generate": generate}


@asynccontextmanager
async def vllm(answers: dict[str, Answer], model: Path, **options: Any) -> AsyncIterator[tuple[VllmClient, Server]]:
    server = Server(answers)
    server.answers.setdefault("/pause", {"status": "paused"})
    async with server.test_server as running:
        options = {"route": "slots", "scratch": model.parent / "scratch", **options}
        async with VllmClient(str(running.make_url("")), model, **options) as client:
            yield client, server


@pytest.fixture
def small(model_folder: Path) -> Path:
    """The model under the name that the recorded server had read."""
    place = model_folder.parent / "small"
    assert place == model_folder
    return place


# ---- vLLM


async def test_a_request_names_all_that_decides_what_is_drawn(small: Path) -> None:
    async with vllm(vllm_answers(), small) as (client, server):
        sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=12, stop_token_ids=(4,), seed=3)
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


def adapter_of(small: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    base = load_tensors(small)
    weight = base["model.layers.0.self_attn.q_proj.weight"]
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(2, weight.shape[1]),
        f"{module}.lora_B.weight": torch.ones(weight.shape[0], 2),
    }
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4.0,
        "base_model_name_or_path": str(small),
        "target_modules": ["q_proj"],
    }
    return config, tensors


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


# ---- SGLang


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
        with pytest.raises(EngineError, match="top_p = 1"):
            await client([1], Sampling(top_p=0.9))
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


# ---- both


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


# ---- configuration


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "sglang"}, "not started by the run.*url"),
        ({"url": "http://a:1"}, "leave url out"),
        ({"backend": "vllm", "url": "gpu1:8000"}, "http://HOST:PORT"),
        ({"backend": "vllm", "url": "http://a:1", "arguments": ["--x"]}, "arguments are for a vLLM that the run starts"),
        ({"backend": "vllm", "arguments": ["--dtype=bfloat16"]}, "'--dtype' is set by the run"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackendConfig(**settings)


# ---- the server that a run starts


def program(folder: Path, text: str) -> str:
    """A ``vllm`` of a few lines."""
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


SERVES = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import entry_points
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/told":
            plugins = [each.value for each in entry_points(group="vllm.general_plugins")]
            self.wfile.write(json.dumps([sys.argv, dict(os.environ), plugins, child.pid]).encode())
    def log_message(self, *words):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


async def test_it_is_told_what_a_run_needs_and_ends_with_all_its_workers(tmp_path: Path) -> None:
    config = VllmServerConfig(
        model="m", command=program(tmp_path, SERVES), threads=1, lora_rank=5, arguments=("--max-num-seqs", "8")
    )
    async with LocalPlacement(tmp_path / "logs", stuck_after_s=1.0) as placement:
        worker = await placement.start("vllm", "evergrad.inference.backends.vllm_server", config)
        await asyncio.sleep(1.5)
        assert worker.process.returncode is None  # its health has no body, and that is well
        told = VllmClient(worker.base_url, tmp_path, route="slots", scratch=tmp_path)
        words, environment, plugins, child = json.loads(await told._http.tell("GET", "/told"))
        await told.close()
        assert words[1:3] == ["serve", "m"]
        for name, value in {"--max-lora-rank": "8", "--dtype": "float32", "--max-num-seqs": "8"}.items():
            assert words[words.index(name) + 1] == value
        assert environment["EVERGRAD_TOKEN"] == worker.token
        assert environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert plugins == ["evergrad_vllm:register"]
        family = [psutil.Process(worker.process.pid), psutil.Process(child)]
        await worker.stop()
        assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.parametrize(
    ("text", "message"), [("raise SystemExit(7)", "exit code 7 before it was ready"), (None, "no program")]
)
async def test_one_that_does_not_start_says_why(tmp_path: Path, text: str | None, message: str) -> None:
    command = str(tmp_path / "nowhere") if text is None else program(tmp_path, text)
    async with LocalPlacement(tmp_path / "logs") as placement:
        with pytest.raises(WorkerDied, match=message):
            await placement.start(
                "vllm", "evergrad.inference.backends.vllm_server", VllmServerConfig(model="m", command=command)
            )


async def test_the_door_wants_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_TOKEN", "secret")
    passed: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    door = RequireToken(app)
    for path, key in (("/pause", b"Bearer secret"), ("/pause", b"Bearer guess"), ("/resume", b""), ("/health", b"")):
        headers = [(b"authorization", key)] if key else []
        await door({"type": "http", "path": path, "headers": headers}, None, send)
    assert passed == ["/pause", "/health"]
    assert [message["status"] for message in sent if "status" in message] == [401, 401]
    monkeypatch.setenv("EVERGRAD_TOKEN", "")
    assert not RequireToken(app)._allowed([(b"authorization", b"Bearer ")])


def test_the_plugin_imports_nothing_of_the_house() -> None:
    """vLLM's environment has no evergrad."""
    folder = Path(__file__).parents[2] / "src" / "evergrad" / "inference" / "backends"
    for name in ("evergrad_vllm.py", "evergrad_vllm_slots.py"):
        text = (folder / name).read_text(encoding="utf-8")
        assert "import evergrad" not in text
        assert "from evergrad" not in text
    code = "import sys; sys.path.insert(0, sys.argv[1]); import evergrad_vllm; print(evergrad_vllm.BACKEND)"
    found = subprocess.run([sys.executable, "-I", "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "evergrad_slots"
