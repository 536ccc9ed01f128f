"""Which replica a request goes to: costs in blocks of the key-value cache, and when a session leaves its replica.

The cost is NVIDIA Dynamo's (default selector of its KV router): what a replica has still to prefill, the blocks that requests
hold there, and what of the new prompt it would have to compute::

    cost = pending_prefill + held + max(0, prompt - cached)

Two things are added for agents. Blocks of the prompt that running requests hold, or are computing, are no load to it: the first
sibling of a group brings the prompt, the others ride along. And a first turn begins a session that stays, so it is placed by
what a replica is expected to hold and not by what it happens to hold: sessions that wait for a tool come back.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

IMBALANCE_RATIO = 2.0
"""A session stays where its tokens are until that replica has so many times the load that the others have on average, and
leaving, the prompt's prefill paid, still gains as much as the prompt has blocks …"""
IMBALANCE_REQUESTS = 16
"""… and never for fewer requests more than the one it would go to: a batch that is not full costs little to join."""


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
    resident: int = 0
    """Blocks of all sessions that were there not long ago, those that wait for a tool included."""

    @property
    def load(self) -> int:
        return self.pending_prefill + self.held

    def missing(self, prompt: int) -> int:
        """Blocks of a prompt of so many that the replica would have to compute."""
        return max(0, prompt - self.cached)


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
    return_share: float = 0.0
    """Share of all turns so far that another one followed: how likely a session that waits for a tool is to come back."""


class RoutingRule(Protocol):
    """Chooses a replica."""

    def choose(self, route: Route, options: Sequence[Option]) -> str:
        """The name of one of ``options``, of which there is at least one."""
        ...


class CostRule:
    """First turns by expected cost, at equal cost where the group is; later turns where the session is, until that replica has
    far more to do than the others.

    >>> idle = [Option("a", 0, 0, 0, 0), Option("b", 0, 0, 8, 0)]
    >>> CostRule().choose(Route(10, "g/0", "g", None, later_turn=False), idle)
    'b'
    >>> busy = [Option("a", 20, 80, 8, 29), Option("b", 0, 4, 0, 1)]
    >>> CostRule().choose(Route(10, "g/0", "g", "a", later_turn=True), busy)
    'b'
    """

    def choose(self, route: Route, options: Sequence[Option]) -> str:
        home = next((each for each in options if each.name == route.home), None)
        if not route.later_turn or home is None:
            return self._cheapest(route, options, _expected(route, options))
        others = [each.load for each in options if each is not home]
        if not others or home.load <= IMBALANCE_RATIO * sum(others) / len(others):
            return home.name
        costs = {each.name: each.load + each.missing(route.prompt) for each in options}
        cheapest = self._cheapest(route, options, costs)
        fewer = home.requests - next(each.requests for each in options if each.name == cheapest)
        gains = costs[home.name] - costs[cheapest] > route.prompt
        return cheapest if gains and fewer >= IMBALANCE_REQUESTS else home.name

    def _cheapest(self, route: Route, options: Sequence[Option], costs: Mapping[str, float]) -> str:
        lowest = min(costs.values())
        cheapest = min(
            (each for each in options if costs[each.name] == lowest),
            # Equal replicas are told apart by a hash of the group, so that groups spread and a run repeats.
            key=lambda each: (each.name != route.home, each.requests, spread(route.group or "", each.name)),
        )
        return cheapest.name


def _expected(route: Route, options: Sequence[Option]) -> dict[str, float]:
    """Cost of a session's first turn: held is what resident sessions are expected to hold, all replicas' mean share of it."""
    resident = sum(each.resident for each in options)
    share = route.return_share * min(1.0, sum(each.held for each in options) / resident) if resident else 0.0
    now = 1.0 - route.return_share
    return {
        each.name: each.pending_prefill + now * each.held + share * each.resident + each.missing(route.prompt)
        for each in options
    }


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
