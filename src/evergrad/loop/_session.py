"""Everything that is alive in one process lifetime of a run: workers, clients, stores, tasks, clock.

Opening a session brings the workers to the saved state, whether that state is new, finished or what a crash left.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evergrad.envs import Taskset
from evergrad.inference import EngineClient, EngineConfig
from evergrad.ledger import Ledger, PhaseClock, PriceBook
from evergrad.loop._console import LoopConsole
from evergrad.loop._folder import LoopState, RunFolder, Stage
from evergrad.loop._serving import PRODUCTION, Serving
from evergrad.loop.config import RecipeConfig, RunConfig
from evergrad.loop.placement import LocalPlacement
from evergrad.registry import Registry, base_model
from evergrad.rollouts import Renderer
from evergrad.training import TrainerClient, TrainerConfig
from evergrad.types import EvergradError, ModelVersion, TrainingBatch

PROBE_TOKENS = 24
PROBE_TOLERANCE = 1e-3
"""Largest difference, in nats, between the engine's and the trainer's log-probabilities after an update."""
KEEP_CHECKPOINTS = 2


class Session:
    """Use as an async context manager; leaving it stops all workers."""

    def __init__(self, config: RunConfig, folder: RunFolder, console: LoopConsole) -> None:
        self.config, self.folder, self.console = config, folder, console
        first = dict(config.environment.settings)
        self.state = folder.load_state(LoopState(deployed=first))
        self.placement = LocalPlacement(folder.path / "logs")
        self.registry = Registry(folder.path / "registry.sqlite")
        self.ledger = Ledger(folder.path / "ledger.sqlite", PriceBook.load(Path(config.price_book) if config.price_book else None))
        self.cores = config.placement.threads or os.cpu_count() or 1
        self._started = time.monotonic()
        self._tasksets: dict[str, Taskset] = {}
        self.trainer: TrainerClient
        self.engine: EngineClient
        self.renderer: Renderer
        self.serving: Serving

    async def __aenter__(self) -> Session:
        self._exit = contextlib.AsyncExitStack()
        try:
            self.clock = self._exit.enter_context(PhaseClock(self.ledger, cores=self.cores, subject=self.config.name))
            with self.clock.phase("setup"):
                await self._exit.enter_async_context(self.placement)
                await self._start_workers()
                await self._restore()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.state.wall_s = self.wall_s()
        self._started = time.monotonic()
        await self._exit.aclose()

    # -- what the stages use -------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> RecipeConfig:
        return self.config.recipe(self.state.cycle)

    @property
    def subject(self) -> str:
        return f"cycle-{self.state.cycle}"

    def taskset(self, settings: Mapping[str, Any]) -> Taskset:
        """The environment under these settings; made once."""
        key = repr(sorted(settings.items()))
        if key not in self._tasksets:
            self._tasksets[key] = Taskset(self.config.environment.name, settings)
        return self._tasksets[key]

    def suite(self, settings: Mapping[str, Any]) -> str:
        """How reports name the environment under these settings, such as ``support_desk@v1``."""
        return f"{self.taskset(settings).name}@{settings.get('contract', 'v1')}"

    def wall_s(self) -> float:
        """Seconds of the whole run, resumed parts included."""
        return self.state.wall_s + time.monotonic() - self._started

    def spent_usd(self) -> float | None:
        total = self.clock.spent_usd()
        return None if total is None else float(total)

    def out_of_budget(self) -> str | None:
        """Which budget is spent, or ``None``."""
        budget, usd = self.config.budget, self.spent_usd()
        if budget.usd is not None and usd is not None and usd >= budget.usd:
            return f"the budget of ${budget.usd:g} is spent"
        if budget.minutes is not None and self.wall_s() >= 60 * budget.minutes:
            return f"the budget of {budget.minutes:g} minutes is spent"
        return None

    def event(self, text: str) -> None:
        """A milestone on the timeline and on the screen."""
        at_s, usd = self.wall_s(), self.spent_usd()
        self.state.timeline.append({"at_s": round(at_s, 1), "usd": usd, "event": text})
        self.console.event(at_s, usd, text)

    def enter(self, stage: Stage) -> None:
        """Moves to a stage and saves; the stage before is then never entered again in this cycle."""
        self.state.stage, self.state.step = stage, 0
        self.save_state()

    def save_state(self) -> None:
        saved, self.state.wall_s = self.state.wall_s, self.wall_s()
        self.folder.save_state(self.state)
        self.state.wall_s = saved

    async def train(self, batch: TrainingBatch, loss: Any, lr: float) -> dict[str, float]:
        with self.clock.phase("train", tokens=sum(len(sample.token_ids) for sample in batch.samples)):
            return await self.trainer.step(batch, loss, lr)

    async def publish(self) -> dict[str, Any]:
        """Moves the trainer's weights into the rollout engine as the next policy version, and has the engine prove it."""
        with self.clock.phase("weight_sync"):
            version = self.state.policy_version + 1
            manifest = await self.trainer.publish(version)
            receipt = await self.engine.update_weights(manifest)
            self.state.policy_version = version
            await self._prove()
        return dict(receipt)

    async def checkpoint(self) -> None:
        """Saves trainer and state together: the folder first, then the state that names it, then old folders go."""
        with self.clock.phase("store"):
            state = self.state
            name = f"c{state.cycle:03d}-{state.stage}-{state.step:05d}"
            await self.trainer.save(str(self.folder.checkpoints / name))
            state.checkpoint = name
            self.save_state()
            kept = sorted(self.folder.checkpoints.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in kept[:-KEEP_CHECKPOINTS]:
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)

    async def register(self, note: str, contracts: Mapping[str, str]) -> ModelVersion:
        """Exports the trainer's weights as a version; entering it again after a crash gives the same one."""
        version_id = f"{self.config.name}-c{self.state.cycle}-{note}"
        uri = f"versions/{version_id}"
        folder = self.folder.path / uri
        if not folder.exists():
            await self.trainer.export(str(folder))
        version = ModelVersion(
            version_id=version_id,
            parent_id=self.registry.resolve(PRODUCTION),
            policy_version=self.state.policy_version,
            weights_uri=uri,
            base_model=self.config.model,
            recipe_hash=self.recipe_hash(),
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            metadata={"contracts": dict(contracts), "cycle": self.state.cycle, "trigger": self.state.trigger},
        )
        return self.registry.register(version)

    def recipe_hash(self) -> str:
        import hashlib

        return hashlib.sha256(self.recipe.model_dump_json().encode()).hexdigest()[:16]
