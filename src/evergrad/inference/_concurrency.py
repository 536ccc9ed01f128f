"""How many requests a replica gets at once.

Too few leave its batches empty; too many make it preempt rows, or keep requests waiting that another replica, or a later
moment, would serve better. The engine's own figures tell which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

START = 64
FLOOR = 4
GROW_BELOW = 0.85
"""Share of the key-value cache held by rows up to which one may add more."""
CUT = 0.8
"""What is left of the limit after preemptions, or when requests queue inside the engine."""


@dataclass(slots=True)
class ConcurrencyLimit:
    """The limit of one replica: grows while requests wait outside and the cache has room, is cut when the engine is too full.

    >>> limit = ConcurrencyLimit()
    >>> limit.observe({"preemptions": 2, "waiting": 0, "kv_usage": 0.99}); limit.value
    51
    """

    value: int = START
    _turned_over: int = 0
    """Requests that finished, since the last change, while others waited for the limit."""
    _was_cut: bool = False
    _kv_usage: float = 0.0
    _preemptions: int = 0
    _looks_queued: int = 0

    def finished(self, was_binding: bool) -> None:
        """A request left; ``was_binding`` says whether another one had to wait for that.

        When as many as the limit have done so, the engine has shown that it carries them. It gets twice as many until the first
        time that this was too much, and from then on an eighth more.
        """
        if not was_binding or self._kv_usage >= GROW_BELOW:
            return
        self._turned_over += 1
        if self._turned_over >= self.value:
            self.value += max(1, self.value // 8) if self._was_cut else self.value
            self._turned_over = 0

    def observe(self, load: Mapping[str, Any]) -> None:
        """Takes the engine's figures: ``preemptions`` so far, rows ``waiting``, and ``kv_usage``."""
        self._kv_usage = float(load["kv_usage"])
        preempted = int(load["preemptions"]) > self._preemptions
        self._preemptions = int(load["preemptions"])
        # One that has just arrived waits for the next step; only who still waits at the second look is in a queue.
        self._looks_queued = self._looks_queued + 1 if load["waiting"] else 0
        if preempted or self._looks_queued > 1:
            self.value = max(FLOOR, int(self.value * CUT))
            self._turned_over = self._looks_queued = 0
            self._was_cut = True
