"""Which tasks teach most per token: groups whose rewards differ, from slices where success is neither certain nor out of reach.

A group of G rollouts that all succeed, or all fail, has no gradient; with success rate p it has one with probability
``1 − p^G − (1 − p)^G``. The variance of a policy gradient goes with p(1 − p) (VIP, arXiv 2602.01601), so for a fixed number
of tokens the estimate is best when a slice, at c tokens a rollout, gets a share proportional to ``w·√(p(1 − p) / c)``, w being
its share of the tasks (Neyman's allocation with costs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

DISCOUNT = 0.8
"""What a step's successes and failures are worth one step later: the policy moves on."""
FLOOR = 0.1
"""Share of the groups that comes evenly from all tasks, so that no slice is forgotten."""


@dataclass(slots=True)
class SliceRecord:
    """What recent rollouts of a slice showed, discounted."""

    successes: float = 0.0
    failures: float = 0.0
    tokens: float = 0.0
    """Computed for them: prompt tokens that no cache had, and sampled ones."""

    def add(self, successes: float, failures: float, tokens: float) -> None:
        self.successes += successes
        self.failures += failures
        self.tokens += tokens

    def fade(self) -> None:
        """One step passes."""
        self.successes *= DISCOUNT
        self.failures *= DISCOUNT
        self.tokens *= DISCOUNT


def informative_group_probability(success_rate: float, group_size: int) -> float:
    """Chance that the rewards of a group differ.

    >>> [round(informative_group_probability(p, 8), 3) for p in (0.02, 0.1, 0.5)]
    [0.149, 0.57, 0.992]
    """
    return 1 - success_rate**group_size - (1 - success_rate) ** group_size


def neyman_shares(
    shares: Mapping[str, float], success_rates: Mapping[str, float], tokens: Mapping[str, float]
) -> dict[str, float]:
    """Share of the groups for each slice; they add up to 1. As the tasks have them, where no slice has any variance.

    >>> found = neyman_shares({"easy": 0.5, "hard": 0.5}, {"easy": 0.9, "hard": 0.5}, {"easy": 100, "hard": 100})
    >>> {name: round(share, 3) for name, share in found.items()}
    {'easy': 0.375, 'hard': 0.625}
    """
    weights = {
        name: share * math.sqrt(success_rates[name] * (1 - success_rates[name]) / tokens[name])
        for name, share in shares.items()
    }
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()} if total > 0 else dict(shares)


def draw_slice(shares: Mapping[str, float], records: Mapping[str, SliceRecord], random: Random) -> str:
    """A slice for the next group: by :func:`neyman_shares` at success rates drawn from their posteriors (Thompson sampling).

    Args:
        shares: Slice to its share of the tasks.
        records: What is known of them; a slice without a record may have any success rate.
        random: Decides; the same state gives the same slice.
    """
    known = [record.tokens / (record.successes + record.failures) for record in records.values() if record.tokens > 0]
    usual = math.fsum(known) / len(known) if known else 1.0
    rates, tokens = {}, {}
    for name in shares:
        record = records.get(name, SliceRecord())
        rates[name] = random.betavariate(1 + record.successes, 1 + record.failures)
        tried = record.successes + record.failures
        tokens[name] = record.tokens / tried if record.tokens > 0 else usual
    best = neyman_shares(shares, rates, tokens)
    weights = [(1 - FLOOR) * best[name] + FLOOR * share for name, share in shares.items()]
    return random.choices(list(shares), weights)[0]
