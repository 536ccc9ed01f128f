"""What stored conversations say of the version that serves: how often it was right, and what it is asked of late.

A conversation is judged by its customer's last ``score``; without one, by the environment's verifier, which plays the replies
again, once the outcome (or what the tools answered) says what would have been right. One that nobody can judge yet is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evergrad.envs import EnvError, EnvironmentFault, Taskset, VerifierFault, content_hash, play
from evergrad.loop.traffic.converting import beginnings, conversation_key, usable_prompts
from evergrad.loop.traffic.store import StoredTrace, TrafficStore


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


class ServedTraffic:
    """Reads a store of traffic as evidence; what the verifier said of a conversation is remembered until something is added."""

    def __init__(self, store: TrafficStore) -> None:
        self._store = store
        self._verified: dict[str, float | None] = {}

    async def outcomes(self, taskset: Taskset, version_id: str) -> CustomerOutcomes:
        """Of whole conversations in which ``version_id`` answered last, under tools that the deployed contract breaks nothing
        of."""
        usable, scores, failed, by_customers, pending = usable_prompts(taskset), list[float](), list[str](), 0, 0
        for stored in self._whole():
            if stored.trace.version_id != version_id or stored.system_hash not in usable:
                continue
            score = stored.trace.score
            by_customers += score is not None
            if score is None:
                score = await self._verify(taskset, stored)
            if score is None:
                pending += 1
                continue
            scores.append(score)
            if score < 1.0:
                failed.append(stored.trace.trace_id)
        return CustomerOutcomes(tuple(scores), by_customers, pending, tuple(failed))

    def requests(self, after: int, most: int) -> tuple[list[str], list[str], int]:
        """What customers asked first in the last conversations.

        Args:
            after: Number of the last conversation that was looked at before.
            most: Of the older ones.

        Returns:
            Up to ``most`` requests until then, those since, and the number of the last of these.
        """
        traces = self._whole()
        older = [each.trace.request for each in traces if each.number <= after]
        newer = [each for each in traces if each.number > after]
        return older[-most:], [each.trace.request for each in newer], max((each.number for each in newer), default=after)

    def _whole(self) -> Sequence[StoredTrace]:
        """All conversations but those that go on in another one. What its customer judged stands for itself: two who say the
        same at first may be two people."""
        traces = self._store.traces()
        continued = beginnings(traces)
        return [
            each
            for each in traces
            if each.trace.score is not None or conversation_key(each, len(each.trace.messages)) not in continued
        ]

    async def _verify(self, taskset: Taskset, stored: StoredTrace) -> float | None:
        if not taskset.learns_from_traffic:
            return None
        trace = stored.trace
        told = [[each.as_dict() for each in trace.messages], dict(trace.outcome), dict(trace.metadata)]
        key = content_hash([taskset.fingerprint, trace.trace_id, told])
        if key not in self._verified:
            self._verified[key] = await _played_again(taskset, stored)
        return self._verified[key]


async def _played_again(taskset: Taskset, stored: StoredTrace) -> float | None:
    try:
        row = taskset.from_trace(stored.trace)
        return None if row is None else (await play(taskset, taskset.task(row), stored.trace.replies)).reward
    except (EnvError, EnvironmentFault, VerifierFault):
        return None  # the environment's own trouble, with one customer's words or with all: says nothing of the version
