"""Greedy tries at held-out tasks, outside of training and of the gate: live traffic, and a first look at the base model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from evergrad.inference import Completes
from evergrad.loop._session import Session
from evergrad.rollouts import derive_seed, greedy_rollout
from evergrad.types import Rollout


async def play(
    session: Session, settings: Mapping[str, Any], count: int, client: Completes, *, name: str, source: str
) -> list[Rollout]:
    """Runs ``count`` held-out tasks on an engine, and keeps the rollouts under ``name``, which also draws the tasks."""
    taskset = session.taskset(settings)
    tasks = taskset.tasks("heldout", count, seed=derive_seed(session.config.seed, source, name))
    with session.console.stage(f"{source} tries on {session.suite(settings)}", len(tasks)):

        async def one(index: int) -> Rollout:
            rollout = await greedy_rollout(
                tasks[index],
                taskset,
                client,
                session.renderer,
                rollout_id=f"{name}-{index}",
                group_id=name,
                source=source,
            )
            session.console.advance()
            return rollout

        rollouts = list(await asyncio.gather(*(one(index) for index in range(len(tasks)))))
    session.record_rollouts(name, rollouts)
    return rollouts
