"""Serving: an engine of its own that follows the alias ``production``, and a second one for a candidate where both must answer:
during a release, and where one on another base model is compared by its cost.

Consumes the alias; waits for a promotion to load; every load ends in a proof, or in the version that served before. An engine
is on one base model, so a version on another one takes an engine of its own, which takes over once it has proved itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from evergrad.inference import EngineClient, EngineConfig
from evergrad.loop._probe import require_probe
from evergrad.loop.placement import LocalPlacement, Worker, WorkerDied
from evergrad.registry import Registry, base_model
from evergrad.types import EvergradError, ModelVersion

PRODUCTION = "production"
DEATH_TAKES_S = 2.0
"""At most, from the first request that a dying engine refuses to the end of its process."""


@dataclass
class Standby:
    """A candidate in an engine of its own, beside the one that serves its predecessor."""

    version: ModelVersion
    worker: Worker
    client: EngineClient
    death: str | None = None
    """Why its engine ended by itself; what it was to answer, the predecessor answers."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with ``death``."""

    async def require_alive(self) -> None:
        """For when requests have failed, as ``_playing.require_alive`` is for the engines without which the run cannot go on.

        Raises:
            WorkerDied: its engine ended by itself.
        """
        with suppress(EvergradError):
            if (await self.client.health())["status"] != "failing":
                return
        with suppress(TimeoutError):
            await asyncio.wait_for(self.dead.wait(), DEATH_TAKES_S)
        if self.death is not None:
            raise WorkerDied(self.death, where=str(self.worker.log_path))

    @property
    def base_url(self) -> str:
        """Where its engine answers."""
        return self.worker.base_url


class Serving:
    """One engine that serves what ``production`` points at, by alias and by version id.

    Args:
        config: Of each engine, whose ``model`` is that of the version.
        root: The run folder.
        note: Tells the user where an engine that begins to serve answers.
    """

    def __init__(
        self,
        placement: LocalPlacement,
        config: EngineConfig,
        registry: Registry,
        root: Path,
        note: Callable[[str], None],
    ) -> None:
        self._placement, self._config, self._registry, self._root, self._note = placement, config, registry, root, note
        self._client: EngineClient | None = None
        self._worker: Worker | None = None
        self.version: ModelVersion | None = None
        self.standby: Standby | None = None

    @property
    def client(self) -> EngineClient:
        assert self._client is not None, "nothing is promoted yet"
        return self._client

    async def follow(self) -> ModelVersion | None:
        """Loads what the alias points at, if that is new; starts the engine at the first promotion."""
        version_id = self._registry.resolve(PRODUCTION)
        return None if version_id is None else await self.load(self._registry.get(version_id))

    async def load(self, version: ModelVersion) -> ModelVersion:
        """Serves ``version`` from now on; the engine proves that it holds the weights that the trainer made.

        Raises:
            EvergradError: it does not, or cannot read them; what served before serves on.
        """
        if self.version is not None and self.version.version_id == version.version_id:
            return self.version
        if self.version is not None and self.version.base_model != version.base_model:
            await self._take_over(version)
            return version
        if self._client is None:
            self._worker = await self._start("serving", version)
            self._client = EngineClient(self._worker.base_url, self._worker.token)
            self._tell_address()
        await self._load(version)
        try:
            await require_probe(version.metadata.get("probe"), self._client, f"serving {version.version_id}")
        except EvergradError:
            if self.version is not None:
                await self._load(self.version)
            raise
        self.version = version
        return version

    async def _take_over(self, version: ModelVersion) -> None:
        """An engine on the version's own base model answers from now on, and the one that did so far ends."""
        standby = self.standby
        if standby is None or standby.version != version or standby.death:
            await self.end_standby()
            standby = await self.stand_by(version)
        await self._load(version, standby.client)
        before, worker = self._client, self._worker
        self._client, self._worker, self.version, self.standby = standby.client, standby.worker, version, None
        self._tell_address()
        if before is not None and worker is not None:
            await before.close()
            await worker.stop()

    async def stand_by(self, version: ModelVersion) -> Standby:
        """Holds ``version`` in a second engine, which proves that it does; the serving engine is not touched.

        Raises:
            EvergradError: it does not, or cannot read the weights; the second engine is ended by then.
        """

        def died(death: WorkerDied) -> None:
            standby.death = str(death)
            standby.dead.set()
            if self._worker is standby.worker:  # it serves by now
                self._placement.report(death)

        worker = await self._start("candidate", version, on_death=died)
        self.standby = standby = Standby(version, worker, EngineClient(worker.base_url, worker.token))
        try:
            uri = str(self._root / version.weights_uri)
            await standby.client.load_weights(uri, version.policy_version, [version.version_id], version.system_prompt)
            await require_probe(version.metadata.get("probe"), standby.client, f"candidate {version.version_id}")
        except EvergradError:
            await self.end_standby()
            raise
        return standby

    async def _start(self, name: str, version: ModelVersion, on_death: Callable[[WorkerDied], None] | None = None) -> Worker:
        model = await asyncio.to_thread(base_model, version.base_model)
        config = self._config.model_copy(update={"model": str(model), "awaits_weights": name == "candidate"})
        return await self._placement.start(name, "evergrad.inference", config, on_death=on_death)

    def _tell_address(self) -> None:
        self._note(f"  what serves answers at {self.client.base_url}/v1 while this run goes on")

    async def end_standby(self) -> None:
        """Ends the second engine, if there is one."""
        standby, self.standby = self.standby, None
        if standby is not None:
            await standby.client.close()
            await standby.worker.stop()

    async def _load(self, version: ModelVersion, client: EngineClient | None = None) -> None:
        uri, names = str(self._root / version.weights_uri), [PRODUCTION, version.version_id]
        await (client or self.client).load_weights(uri, version.policy_version, names, version.system_prompt)

    async def __aenter__(self) -> Serving:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.standby is not None:
            await self.standby.client.close()
        if self._client is not None:
            await self._client.close()
