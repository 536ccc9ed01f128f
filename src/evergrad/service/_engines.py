"""Starts an engine on one version of a run, for as long as a command needs it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from evergrad.inference import EngineClient, EngineConfig
from evergrad.loop.placement import LocalPlacement
from evergrad.registry import base_model
from evergrad.types import ModelVersion


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine process, the client with the right to change its weights, and the placement that sees it die."""

    base_url: str
    client: EngineClient
    placement: LocalPlacement

    async def load(self, run: Path, version: ModelVersion, names: Sequence[str]) -> None:
        """Replaces the weights between two tokens; when that fails the ones before go on serving.

        Raises:
            EngineError: the folder is missing or does not fit the model.
        """
        uri = str((run / version.weights_uri).resolve())
        await self.client.load_weights(uri, version.policy_version, list(names), version.system_prompt)


@asynccontextmanager
async def engine_on(run: Path, version: ModelVersion, names: Sequence[str], *, port: int = 0) -> AsyncIterator[RunningEngine]:
    """An engine that serves ``version`` under ``names``; it ends with the block, and dies with this process.

    Raises:
        EvergradError: the base model is not there, the port is taken, or the engine did not start.
    """
    config = EngineConfig(model=str(base_model(version.base_model)), awaits_weights=True)
    async with LocalPlacement(run / "logs") as placement:
        worker = await placement.start(
            "serve", "evergrad.inference", config, ("--port", str(port)), log=f"serve-{os.getpid()}.log"
        )
        async with EngineClient(worker.base_url, worker.token) as client:
            engine = RunningEngine(worker.base_url, client, placement)
            await engine.load(run, version, names)
            yield engine
