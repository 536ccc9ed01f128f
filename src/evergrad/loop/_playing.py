"""Greedy tries at held-out tasks, outside of training and of the gate: live traffic, and a first look at the base model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from evergrad.inference import Completes
from evergrad.loop._serving import DEATH_TAKES_S
from evergrad.loop._session import Session
from evergrad.rollouts import derive_seed, greedy_rollout
from evergrad.types import EvergradError, Outcome, Rollout, Task


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

    Raises:
        WorkerDied: an engine ended meanwhile; nothing is kept then.
    """
    taskset, tasks = session.taskset(settings), drawn_tasks(session, settings, count, name=name, source=source)
    served = session.serving.version
    renderer = session.renderer if client is session.engine or served is None else session.renderer_for(served)
    with session.console.stage(f"{source} tries on {session.suite(settings)}", len(tasks)):

        async def one(index: int) -> Rollout:
            rollout_id = f"{name}-{index}"
            rollout = await greedy_rollout(
                tasks[index].with_system_prompt(system_prompt(rollout_id)),
                taskset,
                client,
                renderer,
                rollout_id=rollout_id,
                group_id=name,
                source=source,
            )
            session.console.advance()
            return rollout

        rollouts = list(await asyncio.gather(*(one(index) for index in range(len(tasks)))))
    if any(rollout.outcome is Outcome.ENVIRONMENT_FAULT for rollout in rollouts):
        await require_alive(session)
    session.record_rollouts(name, rollouts)
    return rollouts


async def require_alive(session: Session) -> None:
    """For when requests have failed, and before anything follows from that: an engine that is killed refuses them a moment
    before its process is gone. What it left unanswered is no finding, and is asked again when it is back.

    Raises:
        WorkerDied: it was an engine without which the run cannot go on.
    """
    engines = [session.engine, *([session.serving.client] if session.serving.version is not None else [])]
    for engine in engines:
        with suppress(EvergradError):
            if (await engine.health())["status"] != "failing":
                continue
        with suppress(TimeoutError):
            await asyncio.wait_for(session.placement.watch(), DEATH_TAKES_S)


def drawn_tasks(session: Session, settings: Mapping[str, Any], count: int, *, name: str, source: str) -> tuple[Task, ...]:
    """The tasks that :func:`play` runs under these arguments."""
    return session.taskset(settings).tasks("heldout", count, seed=derive_seed(session.config.seed, source, name))
