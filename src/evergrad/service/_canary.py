"""Customers in a canary: which of them the candidate answers, and where it does.

::

    registry ── the release, its share, the address of the candidate's engine ──▶ Canary.follow, once a second
                                                                                      │
    request ──▶ Canary.deal ─┬─ incumbent ─▶ our engine                               ▼ what requests read: memory alone
                             └─ candidate ─▶ the candidate's engine, a worker of the run
                                               ├─ fails or refuses what ours does not ─▶ ours, to the session's end: harm
                                               └─ is not there ────────────────────────▶ ours, until it is there again

A session is dealt when it begins, by the hash that the run itself deals by. What was under way before the release, or before
this gateway knew of it, stays with the incumbent; so does what begins while the candidate cannot be asked. For these no coin
was tossed, and they are no evidence.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import httpx

from evergrad.inference import place
from evergrad.loop.traffic import TrafficStore
from evergrad.registry import Registry
from evergrad.types import Release, ReleaseState, Side

_REMEMBERED = 100_000
"""Sessions whose side is known without a look at the store."""
_PROVED_WITHIN_S = 5.0
_GONE = {404, 405, 503}
"""What an engine answers that serves no such version, for another process has the port; or one that ends or still loads."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """A session of a release, and who answers it.

    >>> Dealt(1, "8a5c", Side.INCUMBENT, share=0.0).tossed
    False
    """

    release_id: int
    session: str
    """A digest."""
    side: Side
    share: float
    """With what chance it could have come to the candidate; 0 where there was none, whichever side it is on."""
    failed: bool = False
    """The candidate could not answer it; the incumbent goes on with it."""

    @property
    def tossed(self) -> bool:
        """Whether what comes of it is evidence."""
        return self.share > 0


class Canary:
    """What a gateway knows of the release that is under way on an alias.

    Args:
        alias: Whose sessions are dealt.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        self._release: Release | None = None
        self._url = ""
        """Where the candidate answers; empty while it cannot be asked."""
        self._sessions: OrderedDict[str, Dealt] = OrderedDict()
        self._looked = self._late = False
        """Whether the registry was looked at by now; whether the release was under way at the first look."""
        self._entered: Release | None = None
        self._sending = 0
        self._answers: weakref.WeakSet[httpx.Response] = weakref.WeakSet()

    # -- requests --------------------------------------------------------------------------------------------------------

    @property
    def candidate_id(self) -> str:
        """The version that is in the canary; empty while there is none."""
        return self._release.candidate_id if self._release is not None else ""

    def deals(self, model: object) -> bool:
        """Whether sessions that ask for ``model`` are dealt now."""
        return model == self.alias and self._release is not None and self._release.state is ReleaseState.CANARY

    def deal(self, session: str, *, goes_on: bool) -> Dealt | None:
        """The side of a session; ``None`` while nothing is dealt.

        Args:
            session: A digest that all its requests have.
            goes_on: Whether something was answered in it before this request.
        """
        release = self._release
        if release is None or not self.deals(self.alias):
            return None
        dealt = self._sessions.get(session)
        if dealt is None:
            dealt = self._sessions[session] = self._dealt_anew(release, session, goes_on)
            if len(self._sessions) > _REMEMBERED:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session)
        return dealt

    def _dealt_anew(self, release: Release, session: str, goes_on: bool) -> Dealt:
        side = Side.CANDIDATE if place(release.salt, session) < release.share else Side.INCUMBENT
        if goes_on:
            # It began before this release, or before this gateway was started anew in the middle of it.
            return Dealt(release.release_id, session, side if self._late else Side.INCUMBENT, share=0.0)
        if not self._url:
            return Dealt(release.release_id, session, Side.INCUMBENT, share=0.0)
        return Dealt(release.release_id, session, side, release.share)

    def asks(self, dealt: Dealt | None) -> bool:
        """Whether the candidate is to answer this session now."""
        return dealt is not None and dealt.side is Side.CANDIDATE and not dealt.failed and bool(self._url)

    async def ask(self, send: Callable[[str], Awaitable[httpx.Response]]) -> httpx.Response | None:
        """The answer of the candidate's engine, whatever it is; ``None`` where the engine is not there, or is about to go.

        Args:
            send: Asks an engine, given its address.
        """
        url = self._url
        self._sending += 1
        try:
            answer = await send(url)
            if answer.status_code not in _GONE:
                self._answers.add(answer)
                return answer
            await answer.aclose()
        except httpx.HTTPError:
            pass
        finally:
            self._sending -= 1
        self._url = "" if self._url == url else self._url  # until a look finds it
        return None

    def fail(self, dealt: Dealt) -> Dealt:
        """The candidate did not answer what the incumbent did answer."""
        failed = replace(dealt, failed=True)
        if dealt.session in self._sessions:
            self._sessions[dealt.session] = failed
        return failed

    def stop(self) -> None:
        """Has the candidate asked no more until a look finds it."""
        self._url = ""

    # -- the release -----------------------------------------------------------------------------------------------------

    async def follow(self, registry: Registry, store: TrafficStore, serves: str) -> str:
        """One look at where the release stands; call it about once a second.

        Args:
            registry: Where releases are.
            store: Where sessions are that an earlier gateway dealt.
            serves: Id of the version that our engine answers with: the release is none of ours unless that is its incumbent.

        Returns:
            What has changed for customers, in a sentence; empty where nothing has.
        """
        release, url = await asyncio.to_thread(self._look, registry, serves)
        before, had = self._release, self._url
        if not self._looked or _id(release) != _id(before):
            self._late, self._url = not self._looked, ""
            await asyncio.to_thread(store.canary.end_but, _id(release))
            sessions = await asyncio.to_thread(store.canary.of_release, release.release_id) if release is not None else ()
            self._sessions = OrderedDict(
                (each.session, Dealt(each.release_id, each.session, each.side, each.share, each.failed)) for each in sessions
            )
        self._looked, self._release = True, release
        if release is None or not url:
            self._url = ""
        elif url != self._url and await self._is_there(url, release.candidate_id):
            await asyncio.to_thread(registry.releases.enter, release, os.getpid())
            self._entered, self._url = release, url
        await self._leave_when_done(registry)
        return self._told(before, bool(had))

    def _look(self, registry: Registry, serves: str) -> tuple[Release | None, str]:
        release = registry.releases.last(self.alias)
        if release is None or not release.state.is_open or release.incumbent_id != serves:
            return None, ""
        return release, registry.releases.offered(release)

    async def _is_there(self, url: str, candidate_id: str) -> bool:
        """Whether the candidate answers there: after a kill of the run another process may have its port."""
        try:
            answer = await self.http.get(f"{url}/v1/models", timeout=_PROVED_WITHIN_S)
            return any(each["id"] == candidate_id for each in answer.json()["data"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False

    async def _leave_when_done(self, registry: Registry) -> None:
        """Says that nothing is under way at the candidate's engine, which the run waits for before it ends that engine."""
        under_way = self._sending or any(not each.is_closed for each in self._answers)
        if self._entered is not None and not self._url and not under_way:
            await asyncio.to_thread(registry.releases.leave, self._entered, os.getpid())
            self._entered = None

    def _told(self, before: Release | None, asked: bool) -> str:
        release = self._release
        if release is not None and self._url:
            wider = not asked or before is None or before.share != release.share
            return f"{release.candidate_id} answers {release.share:.4g} of the sessions" if wider else ""
        return f"the engine of {before.candidate_id} is asked no more" if before is not None and asked else ""


def _id(release: Release | None) -> int | None:
    return None if release is None else release.release_id
