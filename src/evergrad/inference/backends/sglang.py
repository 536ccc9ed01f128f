"""An SGLang server, spoken to in its own words, as its documentation and source of 0.5.23 give them.

========================  =============================================================================================
generation                ``POST /generate`` with ``input_ids``; ``extra_key`` keeps versions apart in its prefix cache
log-probabilities         of what was drawn from, unless the server was told otherwise: asked at the start
weights, from a folder    ``POST /update_weights_from_disk``
weights, as an adapter    ``POST /load_lora_adapter`` under a new name, ``/unload_lora_adapter`` when nobody uses the old one
pause                     ``POST /pause_generation`` with ``in_place``, ``/continue_generation``
========================  =============================================================================================

No SGLang runs where this was written: its requests and answers are tested against those formats, not against a server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evergrad.inference._http import UNREADABLE
from evergrad.inference.backends._foreign import ForeignClient
from evergrad.inference.config import EngineError
from evergrad.types import Completion, FinishReason, PolicySpan, Sampling, Usage

_UNTOUCHED = ("default", "0")
_HEALTH_S = 5.0
_ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class SglangClient(ForeignClient):
    """One SGLang server.

    >>> base = Path("models/qwen")
    >>> engine = SglangClient("http://gpu1:30000", base, route="reload", scratch=Path("/shared"))  # doctest: +SKIP
    >>> await engine.open()  # doctest: +SKIP
    """

    _processed_hint = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"

    _kv_cache_tokens = 0

    # ---- generation

    async def _complete(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        if sampling.top_p != 1.0 or sampling.top_k > 0 or sampling.min_p > 0:
            raise EngineError(
                "SGLang's log-probabilities leave top_p, top_k and min_p out, so they are not of what was drawn from",
                hint="sample from the whole distribution: top_p = 1, top_k = 0, min_p = 0",
            )
        started = time.perf_counter()
        params = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # what ends a completion is what was asked for, and nothing else
            **({} if sampling.seed is None else {"sampling_seed": sampling.seed % 2**31}),
        }
        with self._asks() as adapter:
            version = None if adapter is None else self.policy_version
            answer = await self._ask(adapter, {"input_ids": list(prompt), "sampling_params": params})
        seconds = time.perf_counter() - started
        try:
            return _completion(answer, version, seconds)
        except UNREADABLE as error:
            raise EngineError(f"SGLang's answer cannot be read: {error!r}", where=f"{self.base_url}/generate") from error

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        params = {"max_new_tokens": 1, "temperature": 1.0}
        with self._asks() as adapter:
            body = {"input_ids": list(token_ids), "sampling_params": params, "logprob_start_len": 0}
            answer = await self._ask(adapter, body)
        try:
            told = answer["meta_info"]["input_token_logprobs"]
            if [entry[1] for entry in told] != list(token_ids):
                raise ValueError("log-probabilities of other tokens")
            return [float(entry[0]) for entry in told[1:]]
        except UNREADABLE as error:
            raise EngineError(f"SGLang's answer cannot be read: {error!r}", where=f"{self.base_url}/generate") from error

    async def _ask(self, adapter: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
        named = {} if adapter is None else {"lora_path": adapter}
        common = {"return_logprob": True, "extra_key": self.cache_salt, "stream": False}
        return await self._http.post("/generate", {**body, **named, **common})

    # ---- weights

    async def _reload(self, folder: Path, policy_version: int) -> None:
        # Not flushed: rows that stand still keep what they have computed, and new ones are kept apart by extra_key.
        body = {"model_path": str(folder), "weight_version": str(policy_version), "flush_cache": False}
        await self._do("/update_weights_from_disk", body)

    async def _add_adapter(self, name: str, folder: Path) -> None:
        await self._do("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def _remove_adapter(self, name: str) -> None:
        await self._do("/unload_lora_adapter", {"lora_name": name})

    async def _do(self, path: str, body: Mapping[str, Any]) -> None:
        """SGLang says in the answer whether it did what it was told.

        Raises:
            EngineError: it did not.
        """
        answer = await self._http.post(path, body)
        if not answer.get("success"):
            told = answer.get("message") or answer.get("error_message") or answer
            raise EngineError(f"refused: {told}", where=f"{self.base_url}{path}")

    async def _pause(self) -> None:
        await self._http.tell("POST", "/pause_generation", {"mode": "in_place"})

    async def _resume(self) -> None:
        await self._http.tell("POST", "/continue_generation", {})

    # ---- the server

    async def open(self) -> None:
        model = await self._http.send("GET", "/get_model_info", None, timeout_s=_HEALTH_S)
        if Path(str(model.get("model_path"))).name != self.model.name and model.get("weight_version", "default") in _UNTOUCHED:
            raise EngineError(
                f"the server has read '{model.get('model_path')}', and the run's model is '{self.model}'",
                where=self.base_url,
                hint=f"start it on {self.model}",
            )
        info = await self._http.send("GET", "/get_server_info", None, timeout_s=_HEALTH_S)
        self._check_config(info)
        self._kv_cache_tokens = int(info.get("max_total_num_tokens") or 0)
        if model.get("weight_version", "default") not in _UNTOUCHED:
            await self._while_paused(0, lambda: self._reload(self.model, 0))
        else:
            await self._http.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        await self.require_own_distribution([1, 2, 3, 4])

    def _check_config(self, info: Mapping[str, Any]) -> None:
        if info.get("dtype") != "float32":
            raise EngineError(
                f"the server computes in {info.get('dtype')}, and after each update a run proves to 0.001 nats that it scores "
                "as the trainer does",
                where=self.base_url,
                hint="start it with --dtype float32",
            )
        if self.route == "adapter" and not info.get("enable_lora"):
            raise EngineError(
                "the server takes no adapters",
                where=self.base_url,
                hint="start it with --enable-lora --lora-target-modules …, or set transfer.adapter_only = false",
            )

    async def health(self) -> dict[str, Any]:
        self._require_whole()
        await self._http.tell("GET", "/health", timeout_s=_HEALTH_S)
        version = self.policy_version
        if self._adapter is None:
            name = (await self._http.send("GET", "/get_model_info", None, timeout_s=_HEALTH_S)).get("weight_version", "default")
            version = 0 if name in _UNTOUCHED else int(name)
        # SGLang tells its load to Prometheus alone, and only where it was started to; what is under way here is known anyway.
        load = {
            "running": sum(self._asking.values()),
            "waiting": 0,
            "preemptions": 0,
            "kv_usage": 0.0,
            "kv_cache_tokens": self._kv_cache_tokens,
        }
        return {"status": "ok", "reason": None, "policy_version": version, "load": load}


def _completion(answer: Mapping[str, Any], adapter_version: int | None, seconds: float) -> Completion:
    """An answer of ``/generate``; all of it drawn by one version where an adapter was asked for."""
    meta = answer["meta_info"]
    drawn = meta["output_token_logprobs"]
    token_ids = tuple(int(entry[1]) for entry in drawn)
    if "output_ids" in answer and tuple(answer["output_ids"]) != token_ids:
        raise ValueError("token ids and logprobs do not belong together")
    spans: tuple[PolicySpan, ...]
    if adapter_version is not None:
        spans = (PolicySpan(adapter_version, 0, len(token_ids)),)
    else:
        spans = tuple(PolicySpan(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"])
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(float(entry[0]) for entry in drawn),
        finish_reason=_ENDS[meta["finish_reason"]["type"]],
        policy_spans=spans,
        usage=Usage(meta["prompt_tokens"], meta.get("cached_tokens", 0), meta["completion_tokens"], seconds),
    )
