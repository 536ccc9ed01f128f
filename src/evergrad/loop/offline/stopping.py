"""Ctrl-C and SIGTERM while steps are made: the first waits for the end of the step, a second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody asked for an end; ``tell`` hears of it at once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals inside the block. A signal that was ignored stays so, and only the main thread may take any.

        Raises:
            KeyboardInterrupt: inside the block, at the second signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in _SIGNALS}
        taken = [each for each, handler in before.items() if handler is not signal.SIG_IGN]
        for each in taken:
            signal.signal(each, self._hear)
        try:
            yield
        finally:
            for each in taken:
                signal.signal(each, before[each])

    def _hear(self, signum: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._tell("stopping after this step; once more to stop at once")
