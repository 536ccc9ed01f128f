"""Between the event loop and the engine's thread: a request goes there, its events come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from evergrad.inference._generated import Answer
from evergrad.inference._loop import StepLoop
from evergrad.inference._metrics import Metrics
from evergrad.inference._web import HttpError
from evergrad.inference.engine import Engine, Event, Request

Bursts = AsyncGenerator[list[Event], None]
"""Events of one request, all that waited at a time."""


class Exchange:
    """Requests in the event loop, answered by the thread that steps the engine.

    Args:
        on_death: Called once in the event loop, should the engine die, after every waiting request was told.
    """

    def __init__(self, engine: Engine, metrics: Metrics, on_death: Callable[[Exception], None]) -> None:
        self.steps = StepLoop(engine, self._deliver, self._bury)
        self._metrics, self._on_death = metrics, on_death
        self._queues: dict[str, asyncio.Queue[Event | Exception]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Called in the event loop."""
        self._event_loop = asyncio.get_running_loop()
        self.steps.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self.steps.stop)

    async def bursts(self, asked: Request) -> Bursts:
        """Events of one request until its last completion ends. Left early, it aborts the request.

        Raises:
            HttpError: the engine died, or the model gave no usable distribution.
            RequestError: the request can never be served.
        """
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._queues[asked.request_id] = queue
        left, began, started = asked.n, False, time.perf_counter()
        try:
            await asyncio.wrap_future(self.steps.submit(asked))
            while left:
                waiting = [await queue.get()]
                while not queue.empty():
                    waiting.append(queue.get_nowait())
                events, failure = _until_failure(waiting)
                seconds = time.perf_counter() - started
                if events and not began:
                    began = True
                    self._metrics.began(asked, seconds)
                self._metrics.ended(events, seconds)
                left -= sum(event.finish_reason is not None for event in events)
                if events:
                    yield events
                if failure is not None:
                    raise failure
        finally:
            del self._queues[asked.request_id]
            if left:
                # Not waited for: this may run while the task is being cancelled.
                self.steps.abort(asked.request_id)

    async def opened(self, asked: Request) -> Bursts:
        """:meth:`bursts`, once the first has come: it tells whether the request is good at all, and after it a status can no
        longer be sent."""
        bursts = self.bursts(asked)
        try:
            first = await anext(bursts)
        except BaseException:
            await bursts.aclose()
            raise
        return _chain(first, bursts)

    async def complete(self, asked: Request) -> list[Answer]:
        """All completions of one request."""
        answers = [Answer() for _ in range(asked.n)]
        async with aclosing(self.bursts(asked)) as bursts:
            async for burst in bursts:
                for event in burst:
                    answers[event.index].add(event)
        return answers

    def _deliver(self, events: list[Event]) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def _bury(self, error: Exception) -> None:
        def tell() -> None:
            for queue in self._queues.values():
                queue.put_nowait(error)
            self._on_death(error)

        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(tell)


async def events_of(bursts: Bursts) -> AsyncGenerator[Event, None]:
    """One by one."""
    async with aclosing(bursts):
        async for burst in bursts:
            for event in burst:
                yield event


async def _chain(first: list[Event], rest: Bursts) -> Bursts:
    async with aclosing(rest):
        yield first
        async for each in rest:
            yield each


def _until_failure(waiting: Iterable[Event | Exception]) -> tuple[list[Event], HttpError | None]:
    """What was drawn before the engine died or the model failed, and the error if either did."""
    events: list[Event] = []
    for each in waiting:
        if isinstance(each, Exception):
            return events, HttpError(503, f"the engine stopped: {each}", code="engine_dead")
        if each.error is not None:
            return events, HttpError(503, each.error, code="model_failed")
        events.append(each)
    return events, None
