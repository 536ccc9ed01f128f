"""Two versions behind one door: who answers a session, and copies of requests that nobody sees the answers of.

::

    session ─▶ Split.side ─┬─ incumbent ─▶ its engine ───────────────────────────────▶ answer
                           └─ candidate ─▶ its engine ── answers ────────────────────▶ answer
                                                      └─ fails ─▶ incumbent's engine ─▶ answer, and the session is noted

A hash of the session's id deals it to its side, so any process that knows the salt and the share deals alike, and nothing is
kept for it. Growing shares take sessions from the incumbent alone, and of those only such as have not begun.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from evergrad.inference.client import Completes
from evergrad.inference.config import EngineError
from evergrad.types import Completion, Sampling, Side

REMEMBERED = 100_000
"""Sessions of the incumbent that a growing share leaves where they are."""


def place(salt: str, session_id: str) -> float:
    """Where a session lies in [0, 1), evenly and by the two texts alone: the candidate's are those below its share.

    >>> round(place("production/v2/1", "customer-7"), 3)
    0.498
    """
    digest = hashlib.blake2b(f"{salt}\n{session_id}".encode(errors="surrogatepass"), digest_size=7).digest()
    return float(int.from_bytes(digest, "big") / 2**56)


class Split:
    """Deals sessions to the two versions of a release; a session that has begun never changes sides.

    Args:
        salt: The release's own, so that each release begins with other sessions.
        share: Of the sessions, in [0, 1], that the candidate answers.
    """

    def __init__(self, salt: str, share: float = 0.0) -> None:
        self._salt, self.share = salt, share
        self._begun: OrderedDict[str, None] = OrderedDict()
        """Sessions that the incumbent answered; those of the candidate stay there by themselves as the share grows."""

    def side(self, session_id: str | None) -> Side:
        """Who answers a session; one without an id cannot be known again, and is the incumbent's."""
        if session_id is None:
            return Side.INCUMBENT
        if session_id not in self._begun and place(self._salt, session_id) < self.share:
            return Side.CANDIDATE
        self._begun[session_id] = None
        self._begun.move_to_end(session_id)
        if len(self._begun) > REMEMBERED:
            self._begun.popitem(last=False)
        return Side.INCUMBENT

    def widen(self, share: float) -> None:
        """Gives the candidate ``share`` of the sessions that begin from here on.

        Raises:
            EngineError: the share would shrink, and sessions would change sides.
        """
        if share < self.share:
            raise EngineError(
                f"a share of {share:g} after {self.share:g} would take sessions from the candidate",
                hint="shares only grow; to end a canary, roll it back",
            )
        self.share = share


class Front:
    """Answers each session with the version that it was dealt to. Customers never meet an engine that fails: where the
    candidate's does, the incumbent answers, from there to the session's end, and the failure is noted.

    Args:
        split: Who gets which session; widen it to go on.
    """

    def __init__(self, incumbent: Completes, candidate: Completes, split: Split) -> None:
        self._incumbent, self._candidate, self.split = incumbent, candidate, split
        self.failed: dict[str, str] = {}
        """Sessions of the candidate that the incumbent had to go on with, and why."""
        self.rolled_back = False

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """One completion.

        Raises:
            EngineError: the incumbent's engine refuses or fails.
        """
        if session_id is None or self.rolled_back or session_id in self.failed or self.side(session_id) is Side.INCUMBENT:
            return await self._incumbent(prompt_token_ids, sampling, session_id=session_id)
        try:
            return await self._candidate(prompt_token_ids, sampling, session_id=session_id)
        except EngineError as error:
            # What the incumbent refuses too, such as a prompt that is too long, is no fault of the candidate.
            completion = await self._incumbent(prompt_token_ids, sampling, session_id=session_id)
            self.failed.setdefault(session_id, str(error))
            return completion

    def side(self, session_id: str | None) -> Side:
        """Whom a session was dealt to, whoever had to answer it in the end."""
        return self.split.side(session_id)

    def roll_back(self) -> None:
        """Every request from here on is the incumbent's; those that are under way end where they are, and none is lost."""
        self.rolled_back = True


class Shadow:
    """Answers with one version, and has another answer copies of the requests: those answers are compared and thrown away.

    A copy is made after the answer was given, holds nobody up, and executes no tool; where ``concurrency`` of them are under
    way, the next one is left out.
    """

    def __init__(self, live: Completes, candidate: Completes, *, concurrency: int = 16) -> None:
        self._live, self._candidate, self._concurrency = live, candidate, concurrency
        self._copies: set[asyncio.Task[None]] = set()
        self.answered = self.equal = self.left_out = 0
        """Copies that were answered, those that have the very tokens of the live answer, and requests without a copy."""
        self.failures: list[str] = []
        """Why copies were not answered."""

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """The live version's completion."""
        completion = await self._live(prompt_token_ids, sampling, session_id=session_id)
        if len(self._copies) < self._concurrency:
            copy = asyncio.create_task(self._copy(tuple(prompt_token_ids), sampling, completion), name="shadow")
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)
        else:
            self.left_out += 1
        return completion

    async def settle(self) -> None:
        """Waits for the copies that are under way."""
        while self._copies:
            await asyncio.wait(self._copies)

    async def close(self) -> None:
        """Gives them up."""
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    async def _copy(self, prompt: tuple[int, ...], sampling: Sampling, live: Completion) -> None:
        try:
            found = await self._candidate(prompt, sampling)
        except EngineError as error:
            self.failures.append(str(error))
            return
        self.answered += 1
        self.equal += found.token_ids == live.token_ids
