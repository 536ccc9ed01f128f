"""What stored conversations say: how often the version that serves was right, what it is asked of late, how a canary goes.

A conversation is judged by its customer's last ``score``; without one, by the environment's verifier, which plays the replies
again, once the outcome (or what the tools answered) says what would have been right. One that nobody can judge yet is left out.

The store may be large, and a look at it comes with every check of live traffic: each reads what has changed since the one
before, in a thread of its own, and has the verifier judge so many conversations at most; the next look goes on from there.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from evergrad.envs import EnvError, EnvironmentFault, Score, Taskset, VerifierFault, play
from evergrad.loop.traffic.converting import beginnings, conversation_key, usable_prompts
from evergrad.loop.traffic.store import StoredTrace, TrafficStore
from evergrad.types import SessionOutcome

VERIFIED_AT_ONCE = 256
"""Conversations that the verifier judges in one look."""
QUIET_S = 600.0
"""After so long without a turn, a conversation that came to no final answer will come to none."""


@dataclass(frozen=True, slots=True)
class CustomerOutcomes:
    """How the conversations ended that one version had under one contract."""

    scores: tuple[float, ...] = ()
    """Of those that were judged, in the order in which they began; 1 and more is a success."""
    by_customers: int = 0
    """Of the judged: by an explicit score."""
    pending: int = 0
    """Nobody can judge them yet."""
    failed: tuple[str, ...] = ()
    """Ids of the judged that did not succeed."""

    @property
    def successes(self) -> int:
        return sum(score >= 1.0 for score in self.scores)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of a stored conversation, what is needed to tell what it counts for; its texts stay in the store."""

    trace_id: str
    number: int
    changed: int
    version_id: str
    system_hash: str
    session: int | None
    score: float | None
    request: str
    at: str
    """UTC, ISO 8601: of the last turn."""
    key: str
    """Names the whole of it."""
    beginnings: frozenset[str]
    """Names what it was before each of its later replies."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """The verifier's word on a conversation as it stood."""

    changed: int
    score: float | None
    answered: bool
    """Whether it came to a final answer; else it may go on."""


class ServedTraffic:
    """Reads a store of traffic as evidence; what the verifier said of a conversation is remembered until something is added."""

    def __init__(self, store: TrafficStore) -> None:
        self._store = store
        self._seen: dict[str, _Seen] = {}
        self._beginnings: Counter[str] = Counter()
        self._changed = -1
        self._verified: dict[tuple[str, str], _Verified] = {}
        """By verifier and conversation."""
        self._verifications = 0
        """In this look."""

    async def outcomes(self, taskset: Taskset, version_id: str) -> CustomerOutcomes:
        """Of whole conversations in which ``version_id`` answered last, under tools that the deployed contract breaks nothing
        of."""
        usable, scores, failed, by_customers, pending = usable_prompts(taskset), list[float](), list[str](), 0, 0
        for each in await self._whole():
            if each.version_id != version_id or each.system_hash not in usable:
                continue
            by_customers += each.score is not None
            score = (await self._judge(taskset, each)).score
            if score is None:
                pending += 1
                continue
            scores.append(score)
            if score < 1.0:
                failed.append(each.trace_id)
        return CustomerOutcomes(tuple(scores), by_customers, pending, tuple(failed))

    async def of_canary(self, taskset: Taskset, release_id: int, known: Collection[str]) -> list[SessionOutcome]:
        """Customers' sessions in a release of which something is known by now, each by its first judged conversation.

        A session counts for the side that it was dealt to, whoever answered it in the end, and by the first word on it, which
        later ones do not change: so the verifier's is taken only when a conversation has come to its end.

        Args:
            taskset: The environment as it is deployed.
            release_id: The registry's number.
            known: Ids of sessions that are on record.
        """
        by_session: dict[int, list[_Seen]] = {}
        for each in await self._whole():
            if each.session is not None:
                by_session.setdefault(each.session, []).append(each)
        usable, found = usable_prompts(taskset), list[SessionOutcome]()
        for dealt in await asyncio.to_thread(self._store.canary.of_release, release_id):
            session_id, score = f"customer-{dealt.number}", None
            if session_id in known:
                continue
            for each in () if dealt.failed else by_session.get(dealt.number, ()):
                if score is None and each.system_hash in usable:
                    said = await self._judge(taskset, each)
                    score = said.score if said.answered or _is_quiet(each) else None
            if dealt.failed or score is not None:
                bounded = None if score is None else min(1.0, max(0.0, score))
                found.append(SessionOutcome(session_id, dealt.side, bounded, dealt.share, by_customer=True))
        return found

    async def requests(self, after: int, most: int) -> tuple[list[str], list[str], int]:
        """What customers asked first in the last conversations.

        Args:
            after: Number of the last conversation that was looked at before.
            most: Of the older ones.

        Returns:
            Up to ``most`` requests until then, those since, and the number of the last of these.
        """
        whole = await self._whole()
        older = [each.request for each in whole if each.number <= after]
        newer = [each for each in whole if each.number > after]
        return older[-most:], [each.request for each in newer], max((each.number for each in newer), default=after)

    async def _whole(self) -> list[_Seen]:
        """All conversations but those that go on in another one. What its customer judged stands for itself: two who say the
        same at first may be two people."""
        self._verifications = 0
        await asyncio.to_thread(self._catch_up)
        seen = sorted(self._seen.values(), key=lambda each: each.number)
        return [each for each in seen if each.score is not None or not self._beginnings[each.key]]

    def _catch_up(self) -> None:
        """Reads what has changed since the last look."""
        self._take(self._store.traces(after=self._changed))
        if self._store.size() != len(self._seen):  # some were forgotten
            self._seen.clear()
            self._beginnings.clear()
            self._take(self._store.traces())

    def _take(self, traces: list[StoredTrace]) -> None:
        for stored in traces:
            trace = stored.trace
            before = self._seen.get(trace.trace_id)
            if before is not None:
                self._beginnings.subtract(before.beginnings)
            seen = self._seen[trace.trace_id] = _Seen(
                trace.trace_id,
                stored.number,
                stored.changed,
                trace.version_id,
                stored.system_hash,
                stored.session,
                trace.score,
                trace.request,
                stored.at,
                conversation_key(stored, len(trace.messages)),
                frozenset(beginnings([stored])),
            )
            self._beginnings.update(seen.beginnings)
            self._changed = max(self._changed, stored.changed)

    async def _judge(self, taskset: Taskset, seen: _Seen) -> _Verified:
        if seen.score is not None or not taskset.learns_from_traffic:
            return _Verified(seen.changed, seen.score, answered=True)
        key = (taskset.fingerprint, seen.trace_id)
        known = self._verified.get(key)
        if known is not None and known.changed == seen.changed:
            return known
        if self._verifications >= VERIFIED_AT_ONCE:
            return _Verified(seen.changed, None, answered=False)  # in the next look
        self._verifications += 1
        found = await asyncio.to_thread(lambda: self._store.traces(trace_id=seen.trace_id))
        said = await _played_again(taskset, found[0]) if found else None
        self._verified[key] = _Verified(seen.changed, said.reward if said else None, answered=bool(said and said.parts))
        return self._verified[key]


def _is_quiet(seen: _Seen) -> bool:
    since = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(seen.at)
    return since.total_seconds() > QUIET_S


async def _played_again(taskset: Taskset, stored: StoredTrace) -> Score | None:
    """What the replies earn; a score without parts for those that came to no final answer."""
    try:
        row = taskset.from_trace(stored.trace)
        if row is None:
            return None
        task = taskset.task(row)
        async with asyncio.timeout(task.limits.rollout_timeout_s):
            return await play(taskset, task, stored.trace.replies)
    except (EnvError, EnvironmentFault, VerifierFault, TimeoutError):
        return None  # the environment's own trouble, with one customer's words or with all: says nothing of the version
