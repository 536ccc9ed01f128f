"""Lockstep sessions: the engine waits for all of them, so that what it computes depends on what they ask and not on when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class _Session:
    num_running: int
    idle_since: float
    lapsed: bool = False
    """Let the engine wait in vain; not waited for until it asks again."""


class Lockstep:
    """Which open sessions have nothing to do, and how long the engine waits for them.

    Times are seconds of any one monotonic clock.

    >>> lockstep = Lockstep(hold_s=5.0)
    >>> lockstep.open(["a", "b"], now=0.0)
    >>> lockstep.asked("a")
    >>> lockstep.wait_s(now=1.0)
    4.0
    >>> lockstep.asked("b")
    >>> lockstep.wait_s(now=1.0)
    0.0
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._sessions: dict[str, _Session] = {}
        self.num_misses = 0
        """Times that the engine went on without a session that was open."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_ids: Iterable[str], now: float) -> None:
        for session_id in session_ids:
            self._sessions.setdefault(session_id, _Session(0, now))

    def close(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            self._sessions.pop(session_id, None)

    def asked(self, session_id: str | None) -> None:
        """A request of the session is waiting or running from now on."""
        session = self._sessions.get(session_id or "")
        if session is not None:
            session.num_running += 1
            session.lapsed = False

    def answered(self, session_id: str | None, now: float) -> None:
        """A request of the session has ended."""
        session = self._sessions.get(session_id or "")
        if session is not None and session.num_running:
            session.num_running -= 1
            session.idle_since = now

    def wait_s(self, now: float) -> float:
        """Seconds that the next step must still wait; 0 when it may be taken. Sessions past their time are let go."""
        longest = 0.0
        for session in self._sessions.values():
            if session.num_running or session.lapsed:
                continue
            left = session.idle_since + self._hold_s - now
            if left <= 0:
                session.lapsed = True
                self.num_misses += 1
            longest = max(longest, left)
        return longest
