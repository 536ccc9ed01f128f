"""The thread that owns the engine: it takes steps while there is work, and does everything else between two steps.

Consumes: calls from other threads, in order. Waits for: a call, or an open session that must ask first. Unblocked by:
:meth:`StepLoop.call`, the end of a session's holding time, :meth:`StepLoop.stop`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from evergrad.inference._lockstep import Lockstep
from evergrad.inference.config import EngineError
from evergrad.inference.engine import Engine, Event, Request

T = TypeVar("T")


class StepLoop:
    """Runs an engine in a thread of its own.

    Args:
        deliver: Called in that thread with the events of each step; must not block.
        on_death: Called in that thread when it ends by an error, after which nothing is delivered any more.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Event]], None], on_death: Callable[[Exception], None]) -> None:
        self.engine = engine
        self.lockstep = Lockstep(engine.config.session_hold_s)
        self._deliver, self._on_death = deliver, on_death
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._running: dict[str, tuple[str | None, int]] = {}
        self._paused = False
        self._drains: list[Future[None]] = []
        self._busy_since: float | None = None
        self._longest_step_s = 0.0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs ``function`` between two steps; its result or error comes by the future."""
        future: Future[T] = Future()
        with self._wake:
            if self.error is not None or self._stopping:
                future.set_exception(self._dead())
                return future
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def submit(self, request: Request) -> Future[None]:
        def run() -> None:
            self.engine.submit(request)
            self._running[request.request_id] = (request.session_id, request.n)
            self.lockstep.asked(request.session_id)

        return self.call(run)

    def abort(self, request_id: str) -> Future[None]:
        return self.call(lambda: self._after(self.engine.abort(request_id)))

    def end_all(self) -> None:
        """Ends every request where it is. Only for functions that :meth:`call` runs."""
        self._after(self.engine.abort_all())

    def drain(self) -> Future[None]:
        """Lets nothing begin any more; the future is done once all that had begun has ended. Undone by :meth:`resume`."""
        drained: Future[None] = Future()

        def run() -> None:
            self.engine.hold()
            self._drains.append(drained)

        self.call(run).add_done_callback(lambda done: _pass_failure(done, drained))
        return drained

    def admit(self) -> Future[None]:
        """Ends what :meth:`drain` began."""
        return self.call(self.engine.admit)

    def pause(self, *, ending_all: bool = False) -> Future[None]:
        """Takes no step any more; everything that waits or runs stays as it is, or ends where it is."""

        def run() -> None:
            self._paused = True
            if ending_all:
                self.end_all()

        return self.call(run)

    def resume(self) -> Future[None]:
        """Ends what :meth:`pause` and :meth:`drain` began."""

        def run() -> None:
            self._paused = False
            self.engine.admit()

        return self.call(run)

    @property
    def paused(self) -> bool:
        return self._paused

    def open_sessions(self, session_ids: Iterable[str]) -> Future[None]:
        ids = list(session_ids)

        def run() -> None:
            for session_id in ids:
                self.engine.open_session(session_id)
            self.lockstep.open(ids, time.monotonic())

        return self.call(run)

    def close_sessions(self, session_ids: Iterable[str]) -> Future[None]:
        ids = list(session_ids)

        def run() -> None:
            for session_id in ids:
                self.engine.close_session(session_id)
            self.lockstep.close(ids)

        return self.call(run)

    def trouble(self) -> str | None:
        """Why the loop cannot be relied on, or None: it died, or what it is at takes far longer than any step before."""
        if self.error is not None:
            return f"the engine stopped: {self.error}"
        if not self._thread.is_alive():
            return "the engine is not running"
        since = self._busy_since
        limit = max(self.engine.config.stuck_after_s, 5 * self._longest_step_s)
        if since is not None and time.monotonic() - since > limit:
            return f"the engine has been at one thing for more than {limit:.1f} s"
        return None

    def _run(self) -> None:
        if self.engine.config.threads is not None:
            # The number of threads is a property of the calling thread, too.
            torch.set_num_threads(self.engine.config.threads)
        try:
            while not self._stopping:
                self._run_calls()
                self._end_drains()
                if not self._may_step():
                    continue
                self._busy_since = time.monotonic()
                events = self.engine.step()
                self._longest_step_s = max(self._longest_step_s, time.monotonic() - self._busy_since)
                self._busy_since = None
                self._after(events)
        except Exception as error:
            self.error = error
            self._busy_since = None
            self._on_death(error)
        finally:
            self._refuse_calls()

    def _run_calls(self) -> None:
        was_idle = not self.engine.has_work
        self._run_waiting_calls()
        delay = self.engine.config.admission_delay_s
        if was_idle and self.engine.has_work and delay and not len(self.lockstep):
            # Siblings of the first request are on their way; together they cost one row.
            time.sleep(delay)
            self._run_waiting_calls()

    def _run_waiting_calls(self) -> None:
        while True:
            with self._wake:
                if not self._calls:
                    return
                function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._busy_since = time.monotonic()
            try:
                future.set_result(function())
            except Exception as error:
                # The caller's to handle: a refused request or update says nothing about the loop.
                future.set_exception(error)
            self._busy_since = None

    def _end_drains(self) -> None:
        if self._drains and self.engine.drained:
            drains, self._drains = self._drains, []
            for drained in drains:
                if drained.set_running_or_notify_cancel():
                    drained.set_result(None)

    def _may_step(self) -> bool:
        with self._wake:
            if self._calls or self._stopping:
                return False
            may = self.engine.has_work and not self._paused
            wait_s = self.lockstep.wait_s(time.monotonic()) if may else None
            if wait_s is None or wait_s > 0:
                self._wake.wait(wait_s)
                return False
        return True

    def _after(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            if event.finish_reason is None:
                continue
            session_id, left = self._running[event.request_id]
            if left > 1:
                self._running[event.request_id] = (session_id, left - 1)
            else:
                del self._running[event.request_id]
                self.lockstep.answered(session_id, now)
        if events:
            self._deliver(events)

    def _refuse_calls(self) -> None:
        with self._wake:
            self._stopping = True
            calls, self._calls = self._calls, deque()
            drains, self._drains = self._drains, []
        for future in [future for _, future in calls] + drains:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._dead())

    def _dead(self) -> EngineError:
        return EngineError(f"the engine stopped: {self.error or 'shutting down'}", hint="start it again")


def _pass_failure(done: Future[Any], waiting: Future[Any]) -> None:
    """A call that could not even be made is never answered otherwise."""
    error = done.exception()
    if error is not None and not waiting.done():
        waiting.set_exception(error)
