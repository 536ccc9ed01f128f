"""What rolls out, whichever make it is: started as a worker, or found at an address; behind one interface either way."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from evergrad.inference import EngineClient, EngineConfig, InferenceClient, ReplicaClient
from evergrad.inference.backends import BackendConfig
from evergrad.loop.placement import LocalPlacement, Worker, WorkerDied

if TYPE_CHECKING:
    from evergrad.inference.backends import SglangClient, VllmClient

KEY_VARIABLE = "EVERGRAD_ENGINE_KEY"
"""Environment variable with the key of a server that is given by its address, where that wants one."""

_BACKENDS = "evergrad.inference.backends"


class SoloClient(InferenceClient, ReplicaClient, Protocol):
    """An engine that serves alone, or as one of a router's replicas."""


@dataclass(frozen=True)
class EngineMaker:
    """Makes one engine after another, all alike.

    Args:
        model: Folder of the model whose weights are the base of what is published.
        threads: Cores of each.
        lora_rank: Of the adapters that are published; None where whole weights are.
        scratch: Folder for versions that travel as files.
    """

    placement: LocalPlacement
    settings: BackendConfig
    model: Path
    threads: int
    seed: int
    lora_rank: int | None
    scratch: Path

    async def __call__(
        self, name: str, on_death: Callable[[WorkerDied], None] | None = None
    ) -> tuple[SoloClient, Worker | None]:
        """An engine that can be asked, and its process where it is ours.

        Raises:
            EvergradError: it did not start, cannot be reached, or cannot do what the run asks of it.
        """
        if self.settings.backend == "evergrad":
            config = EngineConfig(
                model=str(self.model), threads=self.threads, seed=self.seed, quantization=self.settings.quantization
            )
            worker = await self.placement.start(name, "evergrad.inference", config, on_death=on_death)
            return EngineClient(worker.base_url, worker.token), worker
        started = await self._start_vllm(name, on_death) if self.settings.starts_server else None
        client = self._client(started)
        try:
            await client.open()
        except BaseException:
            await client.close()
            if started is not None:
                await started.stop()
            raise
        return client, started

    async def _start_vllm(self, name: str, on_death: Callable[[WorkerDied], None] | None) -> Worker:
        from evergrad.inference.backends import VllmServerConfig

        config = VllmServerConfig(
            model=str(self.model),
            command=self.settings.command,
            arguments=self.settings.arguments,
            threads=self.threads,
            seed=self.seed,
            lora_rank=self.lora_rank,
        )
        return await self.placement.start(name, f"{_BACKENDS}.vllm_server", config, on_death=on_death)

    def _client(self, worker: Worker | None) -> VllmClient | SglangClient:
        from evergrad.inference.backends import SglangClient, VllmClient  # torch, which whoever reads results does without

        route: Literal["adapter", "reload", "slots"] = "adapter" if self.lora_rank else "reload" if worker is None else "slots"
        if worker is not None:
            url, token = worker.base_url, worker.token
        else:
            assert self.settings.url is not None, "checked by the configuration"
            url, token = self.settings.url, os.environ.get(KEY_VARIABLE, "")
        if self.settings.backend == "sglang":
            return SglangClient(url, self.model, route=route, scratch=self.scratch, token=token or None)
        return VllmClient(url, self.model, route=route, scratch=self.scratch, token=token or None, lora_rank=self.lora_rank)
