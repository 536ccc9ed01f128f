"""A vLLM server, spoken to in its own words (the routes of 0.32).

===========================  ==========================================================================================
generation                   ``POST /inference/v1/generate`` (``--enable-scale-out``), salted with the version
log-probabilities            of what was drawn from (``--logprobs-mode processed_logprobs``)
weights, from shared memory  ``/init_weight_transfer_engine``, ``/start_weight_update``, ``/update_weights``,
                             ``/finish_weight_update``; the other end is :mod:`~evergrad.inference.backends.evergrad_vllm_slots`
weights, from a folder       ``POST /collective_rpc`` ``reload_weights``, then ``/update_weight_version``
weights, as an adapter       ``POST /v1/load_lora_adapter`` under a new name, ``/v1/unload_lora_adapter`` of unused ones
pause                        ``POST /pause?mode=keep&clear_cache=false``, ``/resume``
===========================  ==========================================================================================

All but the first and the adapter's routes are there only with ``VLLM_SERVER_DEV_MODE=1``, the adapter's only with
``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.inference._folders import local_folder
from evergrad.inference._http import UNREADABLE
from evergrad.inference.backends._arrivals import Arrived, read_folder
from evergrad.inference.backends._foreign import ForeignClient
from evergrad.inference.client import read_completion
from evergrad.inference.config import EngineError
from evergrad.transfer import SlotPublisher, load_tensors, merged_tensors
from evergrad.types import Completion, Sampling

if TYPE_CHECKING:
    import torch

_LEAST_VERSION = (0, 32)
_UNTOUCHED = ("default", "0")
"""Names of weights that nobody has put in the place of the base."""
_NO_LOGPROB = -9999.0
"""What vLLM writes where it has no finite number."""
_HEALTH_S = 5.0
_GENERATE = "/inference/v1/generate"
_LOAD = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    "kv_usage": "vllm:kv_cache_usage_perc",
}


class VllmClient(ForeignClient):
    """One vLLM server.

    >>> base = Path("models/qwen")
    >>> engine = VllmClient("http://127.0.0.1:8000", base, route="reload", scratch=Path("/shared"))  # doctest: +SKIP
    >>> await engine.open()  # doctest: +SKIP
    """

    _processed_hint = "start it with --logprobs-mode processed_logprobs"

    def __init__(self, *args: Any, lora_rank: int | None = None, **options: Any) -> None:
        """
        Args:
            lora_rank: Of the adapters that will be published; None where whole weights are.
        """
        super().__init__(*args, **options)
        self._lora_rank = lora_rank
        self._kv_cache_tokens = 0
        self._takes_seeds = True
        """On a CPU vLLM 0.32 dies of a seeded request whose prompt it computes in pieces: that generator cannot step back."""

    # ---- generation

    async def _complete(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        started = time.perf_counter()
        params = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed if self._takes_seeds else None,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # what ends a completion is what was asked for, and nothing else
            "logprobs": 0,
            "detokenize": False,
        }
        with self._asks() as adapter:
            version = self.policy_version
            body = {"model": adapter, "token_ids": list(prompt), "sampling_params": params, "cache_salt": self.cache_salt}
            answer = await self._http.post(_GENERATE, body)
        try:
            choice = answer["choices"][0]
            if any(entry["logprob"] <= _NO_LOGPROB for entry in choice["logprobs"]["content"]):
                raise EngineError(
                    "a token that was drawn has no log-probability: the model gives no numbers", where=self.base_url
                )
            if adapter is not None:
                choice["weight_versions"] = [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
            return read_completion(answer, time.perf_counter() - started)
        except UNREADABLE as error:
            raise EngineError(f"vLLM's answer cannot be read: {error!r}", where=f"{self.base_url}{_GENERATE}") from error

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        with self._asks() as adapter:
            body = {"model": adapter, "token_ids": list(token_ids), "sampling_params": params, "cache_salt": self.cache_salt}
            answer = await self._http.post(_GENERATE, body)
        try:
            places = answer["prompt_logprobs"][1:]
            return [float(place[str(token)]["logprob"]) for place, token in zip(places, token_ids[1:], strict=True)]
        except UNREADABLE as error:
            raise EngineError(f"vLLM's answer cannot be read: {error!r}", where=f"{self.base_url}{_GENERATE}") from error

    # ---- weights

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        if self.route != "slots":
            return await super().load_weights(weights_uri, policy_version, served_names)
        # The way that is proved for every model; who was attached before attaches again.
        tensors = await asyncio.to_thread(self._read, weights_uri)
        with SlotPublisher({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}) as publisher:
            await self.attach(publisher.descriptor)
            report = await self.update_weights(publisher.stage(tensors.items(), policy_version).as_dict())
        return {key: report[key] for key in ("policy_version", "pause_s", "seconds")}

    def _read(self, weights_uri: str) -> dict[str, torch.Tensor]:
        """What a folder changes of the base, adapters merged."""
        adapter, tensors = read_folder(local_folder(weights_uri), self.model)
        return (
            tensors if adapter is None else dict(merged_tensors(load_tensors(self.model), (adapter, tensors), str(self.model)))
        )

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        found = await super().attach(descriptor)
        if self.route == "slots":
            info = {"tensors": self._arrivals.layout, "base": str(self.model)}
            await self._http.post("/init_weight_transfer_engine", {"init_info": info})
        return found

    async def _bring(self, arrived: Arrived) -> float:
        if self.route != "slots":
            return await super()._bring(arrived)

        async def change() -> None:
            await self._http.post("/start_weight_update", {})
            await self._http.post("/update_weights", {"update_info": dict(arrived.slot)})
            await self._http.post("/finish_weight_update", {"weight_version": str(arrived.policy_version)})

        return await self._while_paused(arrived.policy_version, change)

    async def _reload(self, folder: Path, policy_version: int) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._http.tell("POST", "/collective_rpc", call)
        await self._http.post("/update_weight_version", {"new_version": str(policy_version)})

    async def _add_adapter(self, name: str, folder: Path) -> None:
        await self._http.tell("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def _remove_adapter(self, name: str) -> None:
        await self._http.tell("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def _pause(self) -> None:
        # Cleared, requests under way would be computed again, under weights that did not draw their tokens.
        await self._http.post("/pause?mode=keep&clear_cache=false", {})

    async def _resume(self) -> None:
        await self._http.post("/resume", {})

    # ---- the server

    async def open(self) -> None:
        await self._check_version()
        config = await self._server_config()
        self._check_config(config)
        await self._check_model()
        self._takes_seeds = not _on_cpu(config)
        reload = (await self._weights_name()) not in _UNTOUCHED
        if reload or self.route == "reload":
            self._check_reload(config)
        if reload:
            await self._while_paused(0, lambda: self._reload(self.model, 0))
        await self._http.post("/update_weight_version", {"new_version": "0"})
        self._kv_cache_tokens = _cache_tokens(await self._http.tell("GET", "/metrics", timeout_s=_HEALTH_S))
        await self.require_own_distribution([1, 2, 3, 4])

    async def _check_version(self) -> None:
        said = str((await self._http.send("GET", "/version", None, timeout_s=_HEALTH_S)).get("version", ""))
        numbers = tuple(int(part) for part in re.findall(r"\d+", said)[:2])
        if numbers < _LEAST_VERSION:
            raise EngineError(
                f"vLLM {said or 'of an unknown version'} does not say which weights drew which tokens",
                where=self.base_url,
                hint=f"use vLLM {'.'.join(map(str, _LEAST_VERSION))} or newer",
            )

    async def _server_config(self) -> Mapping[str, Any]:
        status, content = await self._http.exchange("GET", "/server_info?config_format=json", None)
        if status == 404:
            raise EngineError(
                "the server takes no weights",
                where=self.base_url,
                hint="start it with VLLM_SERVER_DEV_MODE=1 in its environment, where nobody but you can reach it",
            )
        found = self._http.read(status, content, "/server_info")["vllm_config"]
        assert isinstance(found, Mapping)
        return found

    def _check_config(self, config: Mapping[str, Any]) -> None:
        model = config["model_config"]
        if model.get("logprobs_mode") != "processed_logprobs":
            raise EngineError(
                f"the server gives {model.get('logprobs_mode')}, which are not those that tokens are drawn with",
                where=self.base_url,
                hint=self._processed_hint,
            )
        if "float32" not in str(model.get("dtype")):
            raise EngineError(
                f"the server computes in {model.get('dtype')}, and after each update a run proves to 0.001 nats that it scores "
                "as the trainer does",
                where=self.base_url,
                hint="start it with --dtype float32",
            )
        if self._lora_rank is not None:
            lora = config.get("lora_config") or {}
            if int(lora.get("max_lora_rank") or 0) < self._lora_rank:
                raise EngineError(
                    f"the server takes no adapters of rank {self._lora_rank}",
                    where=self.base_url,
                    hint=f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-lora --max-loras 2 "
                    f"--max-lora-rank {self._lora_rank} or the next that it knows, or set transfer.adapter_only = false",
                )

    def _check_reload(self, config: Mapping[str, Any]) -> None:
        if _on_cpu(config) and json.loads((self.model / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"):
            raise EngineError(
                "vLLM on a CPU goes on with the old output embedding when it reads a model whose embeddings are tied",
                where=self.base_url,
                hint="leave engine.url out, so that the run starts vLLM with a remedy; or set transfer.adapter_only = true",
            )

    async def _check_model(self) -> None:
        served = (await self._http.send("GET", "/v1/models", None, timeout_s=_HEALTH_S))["data"]
        root = str(served[0].get("root"))
        if Path(root).name != self.model.name:
            raise EngineError(
                f"the server has read '{root}', and the run's model is '{self.model}'",
                where=self.base_url,
                hint=f"start it on {self.model}",
            )

    async def _weights_name(self) -> str:
        return str((await self._http.send("GET", "/weight_info", None, timeout_s=_HEALTH_S))["weight_version"])

    async def health(self) -> dict[str, Any]:
        self._require_whole()
        await self._http.tell("GET", "/health", timeout_s=_HEALTH_S)
        metrics = await self._http.tell("GET", "/metrics", timeout_s=_HEALTH_S)
        version = self.policy_version
        if self._adapter is None:
            name = await self._weights_name()
            version = 0 if name in _UNTOUCHED else int(name)
        load = {key: _metric(metrics, name) for key, name in _LOAD.items()}
        return {
            "status": "ok",
            "reason": None,
            "policy_version": version,
            "load": {
                "running": int(load["running"]),
                "waiting": int(load["waiting"]),
                "preemptions": int(load["preemptions"]),
                "kv_usage": load["kv_usage"],
                "kv_cache_tokens": self._kv_cache_tokens,
            },
        }


def _on_cpu(config: Mapping[str, Any]) -> bool:
    return "cpu" in str(config.get("device_config"))


def _metric(text: str, name: str) -> float:
    """The sum over a metric's series, 0 where it has none; Prometheus' text format.

    >>> _metric('# TYPE a gauge\\na{model="x"} 2.0\\na{model="y"} 3\\nab 7', "a")
    5.0
    """
    series = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", text, re.MULTILINE)
    return float(sum(float(value) for value in series))


def _cache_tokens(metrics: str) -> int:
    """Tokens that the key-value cache holds, by what ``vllm:cache_config_info`` says.

    >>> _cache_tokens('vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0')
    1600
    """
    labels = dict(re.findall(r'(\w+)="([^"]*)"', "".join(re.findall(r"^vllm:cache_config_info\{.*$", metrics, re.MULTILINE))))
    size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    return int(size) * int(blocks) if size.isdigit() and blocks.isdigit() else 0
