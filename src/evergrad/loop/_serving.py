"""Serving: an engine of its own that follows the alias ``production``, and during a release a second one for the candidate.

Consumes the alias; waits for a promotion to load; every load ends in a proof, or in the version that served before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evergrad.inference import EngineClient, EngineConfig
from evergrad.loop._probe import require_probe
from evergrad.loop.placement import LocalPlacement, Worker, WorkerDied
from evergrad.registry import Registry
from evergrad.types import EvergradError, ModelVersion

PRODUCTION = "production"


@dataclass
class Standby:
    """A candidate in an engine of its own, beside the one that serves its predecessor."""

    version: ModelVersion
    worker: Worker
    client: EngineClient
    death: str | None = None
    """Why its engine ended by itself; what it was to answer, the predecessor answers."""

    @property
    def base_url(self) -> str:
        """Where its engine answers."""
        return self.worker.base_url


class Serving:
    """One engine that serves what ``production`` points at, by alias and by version id."""

    def __init__(self, placement: LocalPlacement, config: EngineConfig, registry: Registry, root: Path) -> None:
        self._placement, self._config, self._registry, self._root = placement, config, registry, root
        self._client: EngineClient | None = None
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
        if self._client is None:
            worker = await self._placement.start("serving", "evergrad.inference", self._config)
            self._client = EngineClient(worker.base_url, worker.token)
        await self._load(version)
        try:
            await require_probe(version.metadata.get("probe"), self._client, f"serving {version.version_id}")
        except EvergradError:
            if self.version is not None:
                await self._load(self.version)
            raise
        self.version = version
        return version

    async def stand_by(self, version: ModelVersion) -> Standby:
        """Holds ``version`` in a second engine, which proves that it does; the serving engine is not touched.

        Raises:
            EvergradError: it does not, or cannot read the weights; the second engine is ended by then.
        """

        def died(death: WorkerDied) -> None:
            standby.death = str(death)

        config = self._config.model_copy(update={"awaits_weights": True})
        worker = await self._placement.start("candidate", "evergrad.inference", config, on_death=died)
        self.standby = standby = Standby(version, worker, EngineClient(worker.base_url, worker.token))
        try:
            uri = str(self._root / version.weights_uri)
            await standby.client.load_weights(uri, version.policy_version, [version.version_id], version.system_prompt)
            await require_probe(version.metadata.get("probe"), standby.client, f"candidate {version.version_id}")
        except EvergradError:
            await self.end_standby()
            raise
        return standby

    async def end_standby(self) -> None:
        """Ends the second engine, if there is one."""
        standby, self.standby = self.standby, None
        if standby is not None:
            await standby.client.close()
            await standby.worker.stop()

    async def _load(self, version: ModelVersion) -> None:
        uri, names = str(self._root / version.weights_uri), [PRODUCTION, version.version_id]
        await self.client.load_weights(uri, version.policy_version, names, version.system_prompt)

    async def __aenter__(self) -> Serving:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.standby is not None:
            await self.standby.client.close()
        if self._client is not None:
            await self._client.close()
