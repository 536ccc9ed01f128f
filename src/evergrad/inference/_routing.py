"""Which replica a request goes to: costs in blocks of the key-value cache, and when a session leaves its replica.

The cost is NVIDIA Dynamo's (``KvScheduler``, default selector): what a replica has still to prefill, and the blocks that its
running requests hold, plus what of the new prompt it would have to compute::

    cost = pending_prefill + held + max(0, prompt - cached)

Blocks of the prompt that running requests hold, or are computing, already are no load to it: the first sibling of a group
brings the prompt, the others ride along. This keeps a group together until its replica's load exceeds another's by more than
the prompt is worth.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

IMBALANCE_RATIO = 1.5
"""A session stays where its tokens are until that replica has so many times the load of the one that is cheapest …"""
IMBALANCE_BLOCKS = 16
"""… and so many blocks more."""


@dataclass(frozen=True, slots=True)
class Option:
    """One replica as a request sees it; all counts are blocks."""

    name: str
    pending_prefill: int
    """Of requests whose first token has not come, without what this prompt shares with them."""
    held: int
    """Distinct blocks of running and queued requests, and those they write, without what this prompt shares."""
    cached: int
    """Leading blocks of the prompt that the replica has."""
    requests: int
    """Running and queued."""

    @property
    def load(self) -> int:
        return self.pending_prefill + self.held

    def cost(self, prompt: int) -> int:
        """Of a prompt of so many blocks."""
        return self.load + max(0, prompt - self.cached)


@dataclass(frozen=True, slots=True)
class Route:
    """What of a request matters for its way."""

    prompt: int
    """Blocks."""
    session: str | None
    group: str | None
    home: str | None
    """Where the session was before, else where the group's other sessions began; None for the first of a group."""
    later_turn: bool


class RoutingRule(Protocol):
    """Chooses a replica."""

    def choose(self, route: Route, options: Sequence[Option]) -> str:
        """The name of one of ``options``, of which there is at least one."""
        ...


class CostRule:
    """First turns by cost, at equal cost where the group is; later turns where the session is, until that is out of balance.

    >>> idle = [Option("a", 0, 0, 0, 0), Option("b", 0, 0, 8, 0)]
    >>> CostRule().choose(Route(10, "g/0", "g", None, later_turn=False), idle)
    'b'
    >>> busy = [Option("a", 20, 80, 8, 9), Option("b", 0, 4, 0, 1)]
    >>> CostRule().choose(Route(10, "g/0", "g", "a", later_turn=True), busy)
    'b'
    """

    def choose(self, route: Route, options: Sequence[Option]) -> str:
        key = route.group or ""
        # Equal replicas are told apart by a hash of the group, so that groups spread and a run repeats.
        cheapest = min(
            options,
            key=lambda each: (each.cost(route.prompt), each.name != route.home, each.requests, spread(key, each.name)),
        )
        if not route.later_turn:
            return cheapest.name
        home = next((each for each in options if each.name == route.home), None)
        if home is None:
            return cheapest.name
        excess = home.cost(route.prompt) - cheapest.cost(route.prompt)
        out_of_balance = excess > IMBALANCE_BLOCKS and home.load > IMBALANCE_RATIO * cheapest.load
        return cheapest.name if out_of_balance else home.name


def group_of(session_id: str | None) -> str | None:
    """The group of a session: ``group/index``, with ``~attempt`` after it for a repetition.

    >>> group_of("c1-g7/3~1"), group_of("alone"), group_of(None)
    ('c1-g7', 'alone', None)
    """
    return None if session_id is None else session_id.rpartition("/")[0] or session_id


def assign_groups(groups: Sequence[str], sessions: Mapping[str, int]) -> dict[str, str]:
    """Deals ``groups`` out over replicas, each to the one that has the fewest sessions by then.

    Depends on the arguments alone, so that lockstep sessions meet the same siblings in every repetition of a run.

    Args:
        groups: The group of each new session, in order.
        sessions: Sessions that each replica has already.
    """
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    counts, placed = dict(sessions), dict[str, str]()
    for group, size in sizes.items():
        name = min(sorted(counts), key=lambda each: counts[each])
        placed[group] = name
        counts[name] += size
    return placed


def spread(key: str, name: str) -> int:
    """A number that tells equal replicas apart, the same in every process."""
    return zlib.crc32(f"{key}\n{name}".encode())
