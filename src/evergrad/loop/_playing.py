"""Greedy tries at held-out tasks, outside of training and of the gate: live traffic, and a first look at the base model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from evergrad.inference import Completes
from evergrad.loop._session import Session
from evergrad.rollouts import derive_seed, greedy_rollout
from evergrad.types import Rollout, Task


async def play(
    session: Session,
    settings: Mapping[str, Any],
    count: int,
    client: Completes,
    *,
    name: str,
    source: str,
    system_prompt: Callable[[str], str] = lambda session_id: "",
) -> list[Rollout]:
    """Runs ``count`` held-out tasks on an engine, and keeps the rollouts under ``name``, which also draws the tasks.

    Args:
        system_prompt: Of the version that answers a session, by the session's id.
    """
    taskset, tasks = session.taskset(settings), drawn_tasks(session, settings, count, name=name, source=source)
    with session.console.stage(f"{source} tries on {session.suite(settings)}", len(tasks)):

        async def one(index: int) -> Rollout:
            rollout_id = f"{name}-{index}"
            rollout = await greedy_rollout(
                tasks[index].with_system_prompt(system_prompt(rollout_id)),
                taskset,
                client,
                session.renderer,
                rollout_id=rollout_id,
                group_id=name,
                source=source,
            )
            session.console.advance()
            return rollout

        rollouts = list(await asyncio.gather(*(one(index) for index in range(len(tasks)))))
    session.record_rollouts(name, rollouts)
    return rollouts


def drawn_tasks(session: Session, settings: Mapping[str, Any], count: int, *, name: str, source: str) -> tuple[Task, ...]:
    """The tasks that :func:`play` runs under these arguments."""
    return session.taskset(settings).tasks("heldout", count, seed=derive_seed(session.config.seed, source, name))
