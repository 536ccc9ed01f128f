"""Time limits on code that others wrote: tools, verifiers, set-up.

``asyncio.timeout`` ends what waits; it cannot end what spins, such as a regular expression that backtracks for ever. So
each stretch between two awaits also runs under an interval timer, whose signal interrupts pure Python and ``re`` alike. The
timer exists on the main thread of a Unix process only; elsewhere, waits alone are bounded.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """A bounded piece of code ran out of its seconds."""


class StrayExitError(Exception):
    """Bounded code raised what ends a task or a process, though nobody asked it to."""


class _Interrupted(BaseException):
    """Raised by the timer inside the code that spins; a ``BaseException`` so that its ``except Exception`` lets it pass."""


class _Alarm:
    """The process's one interval timer; armed only while bounded code is on the stack."""

    armed = False

    @classmethod
    def available(cls) -> bool:
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            return False
        handler = signal.getsignal(signal.SIGALRM)
        if handler is cls.ring:
            return True
        if handler is not signal.SIG_DFL:  # someone else's timer: leave it alone
            return False
        signal.signal(signal.SIGALRM, cls.ring)
        return True

    @staticmethod
    def ring(signum: int, frame: Any) -> None:
        if _Alarm.armed:
            raise _Interrupted

    @classmethod
    def arm(cls, seconds: float) -> None:
        cls.armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    @classmethod
    def disarm(cls) -> None:
        cls.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Watched(Generic[T]):
    """Awaits a coroutine with the alarm armed for each of its stretches."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> None:
        self.coroutine, self.seconds = coroutine, seconds

    def __await__(self) -> Generator[Any, Any, T]:
        watched = _Alarm.available()
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            if watched:
                _Alarm.arm(self.seconds)
            try:
                waited = self.coroutine.throw(thrown) if thrown is not None else self.coroutine.send(sent)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            except (Exception, KeyboardInterrupt, SystemExit, asyncio.CancelledError, _Interrupted):
                raise
            except BaseException as error:  # a GeneratorExit, for one; the code's own, since it does not come from the yield
                raise StrayExitError(_raised(error)) from error
            finally:
                if watched:
                    _Alarm.disarm()
            thrown = None
            try:
                sent = yield waited
            except GeneratorExit:
                self.coroutine.close()
                raise
            except BaseException as error:
                thrown = error


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}".rstrip(": ")


def bounded_call(call: Callable[[], T], seconds: float) -> T:
    """What ``call`` returns, within ``seconds`` where there is a timer.

    Raises:
        TimeLimitError: the seconds ran out; its cause leads to where.
    """
    if _Alarm.armed or not _Alarm.available():
        return call()
    _Alarm.arm(seconds)
    try:
        return call()
    except _Interrupted as error:
        raise TimeLimitError(f"took more than {seconds:g} s") from error
    finally:
        _Alarm.disarm()


async def bounded(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """Awaits ``coroutine`` for at most ``seconds``, spinning included.

    Raises:
        TimeLimitError: the seconds ran out, also when the code swallowed the interruption.
        StrayExitError: the code cancelled itself, or raised what is neither an error nor an exit.
    """
    task = asyncio.current_task()
    cancelled_before = task.cancelling() if task is not None else 0
    try:
        async with asyncio.timeout(seconds) as scope:
            result = await _Watched(coroutine, seconds)
    except _Interrupted:
        raise TimeLimitError(f"blocked for more than {seconds:g} s") from None
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling() > cancelled_before:
            raise
        raise StrayExitError("raised CancelledError, and nothing had cancelled it") from error
    except TimeoutError:
        if scope.expired():
            raise TimeLimitError(f"took more than {seconds:g} s") from None
        raise
    if scope.expired():
        raise TimeLimitError(f"took more than {seconds:g} s")
    return result
