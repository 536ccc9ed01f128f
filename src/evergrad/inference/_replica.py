"""One replica as the router sees it: what it was given and has not finished, who waits for it, and how it is."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from evergrad.inference._concurrency import ConcurrencyLimit
from evergrad.inference._prefixes import BlockHash, Prediction
from evergrad.inference._routing import Option
from evergrad.inference._spans import joined
from evergrad.inference.client import EngineControls, Piece
from evergrad.inference.config import EngineError
from evergrad.types import Completion, FinishReason, PolicySpan, Sampling, Usage

RESIDENT_S = 60.0
"""How long after its last turn a session is expected to take another."""


class ReplicaClient(EngineControls, Protocol):
    """What a router needs of a replica; :class:`~evergrad.inference.client.EngineClient` is one."""

    def stream(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None, drawn: int = 0
    ) -> AsyncIterator[Piece]: ...


class State(StrEnum):
    """Whether a replica gets requests."""

    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has, and is then removed."""
    DOWN = "down"
    """Does not answer, or does not have the version that is served; watched until it is as it should be."""


@dataclass(eq=False)
class Request:
    """One completion in the making, whichever replicas it has been at."""

    prompt: tuple[int, ...]
    sampling: Sampling
    session: str | None
    group: str | None
    later_turn: bool
    """Whether the session has had a completion before."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    chains: dict[tuple[int, int], list[BlockHash]] = field(default_factory=dict)
    """(tokens, version) to the chain of prompt and tokens drawn, once it was needed."""
    errors: list[EngineError] = field(default_factory=list)
    """What each replica that gave it up said."""
    admitted: asyncio.Future[Replica] | None = None
    """Resolved when a replica has room for it."""

    def take(self, piece: Piece, tokens_before: int) -> None:
        """Adds what a replica drew; ``tokens_before`` is how many there were when that replica got the request."""
        spans = [
            PolicySpan(span.policy_version, span.start + tokens_before, span.end + tokens_before) for span in piece.policy_spans
        ]
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.spans[:] = joined([*self.spans, *spans])
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.cached_tokens = min(piece.cached_tokens, len(self.prompt))

    def sampling_left(self) -> Sampling:
        """How to draw what is still missing."""
        return replace(self.sampling, max_tokens=self.sampling.max_tokens - len(self.token_ids))

    def completion(self, seconds: float) -> Completion:
        assert self.finish_reason is not None, "not finished"
        usage = Usage(len(self.prompt), self.cached_tokens, len(self.token_ids), seconds)
        return Completion(tuple(self.token_ids), tuple(self.logprobs), self.finish_reason, tuple(self.spans), usage)


@dataclass(eq=False)
class Charge:
    """What a request costs the replica that it was given to."""

    chain: list[BlockHash]
    pending: list[BlockHash]
    """Blocks that the replica must compute before the first token."""
    prediction: Prediction
    version: int
    """Of the weights under which the chain was made."""
    writing: int = 1
    """Blocks that the completion fills so far."""
    sent: bool = False
    """Running at the replica; until then in its queue here."""


@dataclass(eq=False)
class Replica:
    """A replica's client and the router's books about it."""

    name: str
    client: ReplicaClient
    state: State = State.DOWN
    reason: str = "not asked yet"
    """Why it is down."""
    policy_version: int = 0
    limit: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)
    charges: dict[Request, Charge] = field(default_factory=dict)
    later_turns: deque[Request] = field(default_factory=deque)
    """Who waits for room, first come first served; sessions that are under way go before new ones, so that their prefixes are
    used while they are still cached."""
    first_turns: deque[Request] = field(default_factory=deque)
    leaving: asyncio.Event | None = None
    """There when the replica is to be removed; set once it has finished what it is at."""
    lost: bool = False
    """Silent for so long that nothing is expected of it any more."""
    attempts: set[asyncio.Future[Any]] = field(default_factory=set)
    """What is awaited from it; cancelled when it is lost."""
    pinned: set[str] = field(default_factory=set)
    """Lockstep sessions that are open there."""
    num_sent: int = 0
    """Requests that run there now."""
    resident_blocks: int = 0
    """Of all sessions that were here not long ago, running or waiting for a tool."""
    _resident: OrderedDict[str, tuple[float, int]] = field(default_factory=OrderedDict)
    """Session to its last turn and its blocks, the oldest turn first."""
    _held: Counter[BlockHash] = field(default_factory=Counter)
    _pending: Counter[BlockHash] = field(default_factory=Counter)
    _writing: int = 0

    @property
    def has_room(self) -> bool:
        return self.state is not State.DOWN and self.num_sent < self.limit.value

    @property
    def num_queued(self) -> int:
        return len(self.charges) - self.num_sent

    def option(self, chain: Sequence[BlockHash], cached: int) -> Option:
        """This replica in the eyes of a request whose first ``cached`` blocks it has, of a chain under its version."""
        shared = cached
        if cached and chain[cached - 1] not in self._held:
            # Whoever holds a block holds all before it, so where the shared ones end is found by halving.
            shared = bisect_left(range(cached), True, key=lambda depth: chain[depth] not in self._held)
        pending = shared
        while self._pending and pending and chain[pending - 1] in self._pending:
            pending -= 1
        return Option(
            self.name,
            len(self._pending) - (shared - pending),
            len(self._held) + self._writing - shared,
            cached,
            len(self.charges),
            self.resident_blocks,
        )

    def charge(self, request: Request, charge: Charge) -> None:
        self.charges[request] = charge
        self._held.update(charge.chain)
        self._pending.update(charge.pending)
        self._writing += charge.writing

    def reside(self, session: str, blocks: int, now: float) -> None:
        """The session has so many blocks now, and is expected back; who has not come for long is not any more."""
        self.leave(session)
        self._resident[session] = (now, blocks)
        self.resident_blocks += blocks
        while now - next(iter(self._resident.values()))[0] > RESIDENT_S:
            _, (_, gone) = self._resident.popitem(last=False)
            self.resident_blocks -= gone

    def leave(self, session: str) -> None:
        """The session has gone elsewhere, or its end is known."""
        _, blocks = self._resident.pop(session, (0.0, 0))
        self.resident_blocks -= blocks

    def prefilled(self, charge: Charge) -> None:
        """The first token of a request has come."""
        _subtract(self._pending, charge.pending)
        charge.pending = []

    def wrote(self, charge: Charge, blocks: int) -> None:
        """The completion of a request fills so many blocks by now."""
        self._writing += blocks - charge.writing
        charge.writing = blocks

    def discharge(self, request: Request) -> Charge:
        """Takes a request off the books."""
        charge = self.charges.pop(request)
        _subtract(self._held, charge.chain)
        _subtract(self._pending, charge.pending)
        self._writing -= charge.writing
        self.num_sent -= charge.sent
        return charge

    def note_idle(self) -> None:
        """Tells who waits for the replica to be done, when it is."""
        if self.leaving is not None and not self.num_sent and not self.pinned:
            self.leaving.set()

    def enqueue(self, request: Request) -> None:
        (self.later_turns if request.later_turn else self.first_turns).append(request)

    def next_waiting(self) -> Request | None:
        """Takes the next request out of the queue; one that was given up meanwhile is passed over."""
        for queue in (self.later_turns, self.first_turns):
            while queue:
                request = queue.popleft()
                if self._still_waits(request):
                    return request
        return None

    def last_new(self) -> Request | None:
        """Takes the new session out of the queue that would be served last."""
        while self.first_turns:
            request = self.first_turns.pop()
            if self._still_waits(request):
                return request
        return None

    def empty_queue(self) -> list[Request]:
        """Takes all who wait, in order."""
        found = []
        while (request := self.next_waiting()) is not None:
            found.append(request)
        return found

    def _still_waits(self, request: Request) -> bool:
        charge = self.charges.get(request)
        return charge is not None and not charge.sent and request.admitted is not None and not request.admitted.done()

    def report(self) -> dict[str, Any]:
        """For people: JSON values."""
        return {
            "state": str(self.state),
            "reason": self.reason if self.state is State.DOWN else "",
            "policy_version": self.policy_version,
            "running": self.num_sent,
            "queued": self.num_queued,
            "limit": self.limit.value,
        }


def _subtract(counts: Counter[BlockHash], blocks: Sequence[BlockHash]) -> None:
    for block in blocks:
        left = counts[block] - 1
        if left:
            counts[block] = left
        else:
            del counts[block]
