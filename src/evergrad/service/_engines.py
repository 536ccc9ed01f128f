"""Starts an engine on one version of a run, for as long as a command needs it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from evergrad.inference import EngineClient, EngineConfig
from evergrad.loop.placement import LocalPlacement, Worker
from evergrad.registry import base_model
from evergrad.service._relay import Relay
from evergrad.types import EvergradError, ModelVersion

DRAIN_S = 60
"""How long an engine whose place another one took may go on with what it was asked."""


class RunningEngine:
    """An engine process on the base model of a version, and behind a relay one after another on several.

    Args:
        placement: Starts them, and sees them die.
        log: File name of what they say.
        port: Of the first one, where there is no relay.
        relay: What stands before them.
    """

    def __init__(self, placement: LocalPlacement, log: str, port: int, relay: Relay | None) -> None:
        self.placement, self._log, self._port, self._relay = placement, log, port, relay
        self._ending = set[asyncio.Task[None]]()
        self._base = ""
        self._worker: Worker
        self.client: EngineClient
        """With the right to change its weights."""

    @property
    def base_url(self) -> str:
        """Where it answers, whichever engine that is."""
        return self._worker.base_url if self._relay is None else f"http://127.0.0.1:{self._relay.port}"

    async def load(self, run: Path, version: ModelVersion, names: Sequence[str]) -> None:
        """Replaces the weights between two tokens, or the engine where the version is on another base model; when that fails
        what was there before goes on serving.

        Raises:
            EvergradError: the folder is missing or does not fit the model, or an engine on its base model cannot be had.
        """
        if version.base_model == self._base:
            await _load(self.client, run, version, names)
            return
        if self._base and self._relay is None:
            raise EvergradError(
                f"{version.version_id} is on {version.base_model}, and the engine on {self._base}",
                hint="start 'evergrad serve' again",
            )
        worker = await self._start(version)
        client = EngineClient(worker.base_url, worker.token)
        try:
            await _load(client, run, version, names)
        except BaseException:
            await client.close()
            await worker.stop()
            raise
        if self._relay is not None:
            self._relay.target = _port_of(worker)
        if self._base:
            task = asyncio.create_task(_end(self.client, self._worker), name=f"end the engine on {self._base}")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._worker, self.client, self._base = worker, client, version.base_model

    async def _start(self, version: ModelVersion) -> Worker:
        model = await asyncio.to_thread(base_model, version.base_model)
        config = EngineConfig(model=str(model), awaits_weights=True, drain_s=2 if self._relay is None else DRAIN_S)
        port = self._port if self._relay is None else 0
        return await self.placement.start("serve", "evergrad.inference", config, ("--port", str(port)), log=self._log)

    async def close(self) -> None:
        """Leaves the processes to the placement."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.client.close()


async def _load(client: EngineClient, run: Path, version: ModelVersion, names: Sequence[str]) -> None:
    uri = str((run / version.weights_uri).resolve())
    await client.load_weights(uri, version.policy_version, list(names), version.system_prompt)


async def _end(client: EngineClient, worker: Worker) -> None:
    await client.close()
    await worker.stop(DRAIN_S + 5.0)


def _port_of(worker: Worker) -> int:
    port = urlsplit(worker.base_url).port
    assert port is not None
    return port


@asynccontextmanager
async def engine_on(
    run: Path, version: ModelVersion, names: Sequence[str], *, port: int = 0, several_bases: bool = False
) -> AsyncIterator[RunningEngine]:
    """An engine that serves ``version`` under ``names``; it ends with the block, and dies with this process.

    Args:
        several_bases: Whether versions on other base models may have to be loaded; the port is a relay's then.

    Raises:
        EvergradError: the base model is not there, the port is taken, or the engine did not start.
    """
    async with AsyncExitStack() as stack:
        placement = await stack.enter_async_context(LocalPlacement(run / "logs"))
        relay = await stack.enter_async_context(Relay(port, 0)) if several_bases else None
        engine = RunningEngine(placement, f"serve-{os.getpid()}.log", port, relay)
        await engine.load(run, version, names)
        stack.push_async_callback(engine.close)
        yield engine
