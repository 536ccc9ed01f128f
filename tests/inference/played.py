"""Servers that play vLLM: what a real one answered, as ``test_vllm.py`` recorded it, and what they were asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from evergrad.inference.backends import VllmClient
from evergrad.transfer import load_tensors

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
