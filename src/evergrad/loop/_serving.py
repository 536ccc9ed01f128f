"""Serving and watching: an engine of its own follows the alias ``production``; live rollouts come back as data.

Consumes the alias and live requests; waits for a promotion to load; what it sees unblocks the next cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scipy.stats import binomtest

from evergrad.inference import EngineClient, EngineConfig
from evergrad.loop.placement import LocalPlacement
from evergrad.registry import Registry
from evergrad.types import ModelVersion, Rollout

PRODUCTION = "production"


class Serving:
    """One engine that serves what ``production`` points at, by alias and by version id."""

    def __init__(self, placement: LocalPlacement, config: EngineConfig, registry: Registry, root: Path) -> None:
        self._placement, self._config, self._registry, self._root = placement, config, registry, root
        self._client: EngineClient | None = None
        self.version: ModelVersion | None = None

    @property
    def client(self) -> EngineClient:
        assert self._client is not None, "nothing is promoted yet"
        return self._client

    async def follow(self) -> ModelVersion | None:
        """Loads what the alias points at, if that is new; starts the engine at the first promotion."""
        version_id = self._registry.resolve(PRODUCTION)
        if version_id is None or (self.version and self.version.version_id == version_id):
            return self.version
        version = self._registry.get(version_id)
        if self._client is None:
            worker = await self._placement.start("serving", "evergrad.inference", self._config)
            self._client = EngineClient(worker.base_url, worker.token)
        await self._client.load_weights(
            str(self._root / version.weights_uri), version.policy_version, served_names=[PRODUCTION, version.version_id]
        )
        self.version = version
        return version

    async def __aenter__(self) -> Serving:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._client is not None:
            await self._client.close()


@dataclass(frozen=True)
class WatchReport:
    """One look at live traffic."""

    requests: int
    successes: int
    expected: float
    """Success rate on the gate split at promotion."""
    p_value: float
    """Chance of so few successes at the expected rate (exact, one-sided)."""
    contract_changed: bool

    def trigger(self, alpha: float) -> str | None:
        """Why the next cycle should start, or ``None``."""
        reasons = []
        if self.contract_changed:
            reasons.append("the tool contract changed")
        if self.p_value < alpha:
            promoted = f"promoted at {self.expected:.2f}, p = {self.p_value:.1e}"
            reasons.append(f"live success fell to {self.successes}/{self.requests} ({promoted})")
        return "; ".join(reasons) or None


def judge_traffic(rollouts: list[Rollout], expected: float, contract_changed: bool) -> WatchReport:
    """Compares live outcomes with the promoted score; faults of tools or verifier say nothing of the policy: left out."""
    judged = [rollout for rollout in rollouts if rollout.outcome.trainable]
    successes = sum(rollout.success for rollout in judged)
    # A perfect score on n tasks does not mean that failure is impossible: the rule of three bounds it.
    rate = min(expected, 1 - 3 / max(len(judged), 4))
    p_value = float(binomtest(successes, len(judged), rate, alternative="less").pvalue) if judged else 1.0
    return WatchReport(len(judged), successes, expected, p_value, contract_changed)
