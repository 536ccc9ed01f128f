"""A producer for a buffer, where tasks are all there is to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from evergrad.rollouts._buffer import Buffer, BufferStopped, Ticket
from evergrad.types import RolloutGroup, Task


async def keep_filled(buffer: Buffer, tasks: Iterator[Task], run: Callable[[Task, Ticket], Awaitable[RolloutGroup]]) -> None:
    """Produces groups for ``buffer`` until it stops or ``tasks`` end. Whatever goes wrong reaches the buffer's consumer.

    Args:
        run: runs one group; its exceptions end the production, faults of rollouts are not exceptions.
    """

    async def one(task: Task, ticket: Ticket) -> None:
        try:
            await buffer.put(ticket, await run(task, ticket))
        finally:
            await buffer.release(ticket)

    try:
        async with asyncio.TaskGroup() as running:
            for task in tasks:
                ticket = await buffer.acquire()
                if ticket is None:
                    break
                running.create_task(one(task, ticket))
        await buffer.finish()
    except* BufferStopped:
        pass  # the consumer hears of it from the buffer itself
    except* Exception as failed:
        await buffer.fail(_first(failed))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
