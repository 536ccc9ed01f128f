"""The workers of one base model: a trainer, the engines that roll out, and the teachers; with the renderer of its chats.

A run has one such set at a time. Where a cycle tries another base model, the set ends, and one of the other base takes its
place; the engine that serves is no part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from evergrad.loop._engines import EngineMaker
from evergrad.loop._replicas import Restarts, RolloutEngines
from evergrad.loop._teaching import Teachers
from evergrad.loop.config import RunConfig
from evergrad.loop.placement import LocalPlacement
from evergrad.registry import Registry, base_model
from evergrad.rollouts import Renderer
from evergrad.training import TrainerClient, TrainerConfig


class Workers:
    """Use as an async context manager: entered, all of them answer; left, all have ended.

    Args:
        base: Name or folder of the base model.
        config: The run's.
        threads: Cores of trainer and rollout engines, each.
        registry: Knows the versions that may teach.
        root: The run folder.
        tell_death: Told when one of them dies.
        replaceable: Whether the run may go on without a rollout engine that died.
        note: Tells the user.
    """

    trainer: TrainerClient
    engines: RolloutEngines
    renderer: Renderer
    teachers: Teachers

    def __init__(
        self,
        base: str,
        config: RunConfig,
        threads: int,
        registry: Registry,
        root: Path,
        restarts: Restarts,
        *,
        tell_death: Callable[[Exception], None],
        replaceable: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        self.base = base
        self._config, self._threads, self._registry, self._root = config, threads, registry, root
        self._restarts, self._replaceable, self._note = restarts, replaceable, note
        self._placement = LocalPlacement(root / "logs", config.placement.stuck_after_s, tell_death)
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Workers:
        try:
            await self._exit.enter_async_context(self._placement)
            await self._start(await asyncio.to_thread(base_model, self.base))
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exit.aclose()

    async def _start(self, model: Path) -> None:
        config, replicas = self._config, self._config.placement.replicas
        trainer_config = TrainerConfig(
            model=str(model),
            threads=self._threads,
            seed=config.seed,
            critic=config.critic,
            transfer=config.transfer,
            **config.trainer.model_dump(),
        )
        make = EngineMaker(
            self._placement,
            config.engine,
            model,
            max(1, self._threads // replicas),
            config.seed,
            config.trainer.lora.rank if config.transfer.adapter_only else None,
            self._root / "scratch",
        )
        self.engines = await self._exit.enter_async_context(
            RolloutEngines(make, replicas, self._restarts, self._replaceable, self._note)
        )
        self._note(f"starting {'engine' if replicas == 1 else f'{replicas} engines'} and trainer on {self.base}")
        if config.engine.backend != "evergrad":
            self._note(f"  {config.engine.backend} does not step in lockstep: this run will not repeat bit for bit")
        trainer, _ = await asyncio.gather(
            self._placement.start("trainer", "evergrad.training", trainer_config), self.engines.start()
        )
        self.trainer = await self._exit.enter_async_context(TrainerClient(trainer.base_url, trainer.token))
        await self.engines.client.attach(await self.trainer.descriptor())
        self.renderer = renderer_on(model)
        self.teachers = await self._exit.enter_async_context(
            Teachers(self._placement, trainer_config, self.trainer, self._registry, self._root)
        )


def renderer_on(model: Path) -> Renderer:
    """Of the chat template in a model's folder."""
    from transformers import AutoTokenizer

    return Renderer(AutoTokenizer.from_pretrained(model))
