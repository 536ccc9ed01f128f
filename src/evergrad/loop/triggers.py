"""What sets a cycle off: the world as live traffic shows it, or the clock.

=============  ========================================================================================================
``contract``   the tools' schema or descriptions are none that the served version was made for (by their hash)
``fall``       the confidence sequence of live success lies below what the gate measured
``drift``      requests are other ones than those that the environment makes, or customers ask for other things than they
               did (maximum mean discrepancy)
``failures``   so many verified failures since the cycle began
``schedule``   so many checks passed without any of these
=============  ========================================================================================================

Live traffic is what the run itself asks of what it serves, and, where ``evergrad serve --record`` keeps any, what customers
ask. The two are judged side by side, never pooled: customers have requests, and reasons to answer, of their own. Each has half
of the level then, so that both together alarm as seldom as one would.

Any one trigger is enough. Whether a cycle that one of them sets off trains is DECIDE's to say, and the budget's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from evergrad.config import Config
from evergrad.evals import drift_level, drift_p, success_upper_bound
from evergrad.types import Rollout

if TYPE_CHECKING:
    from evergrad.loop.traffic import CustomerOutcomes

URGENT = frozenset({"contract", "fall"})
"""By these the world says that the version in service fails, whatever it scored before."""

_OTHER_REQUESTS = "requests are other ones than the environment makes"


class WatchConfig(Config):
    """How the served version is watched, and what sets off the next cycle."""

    requests: int = Field(24, ge=0)
    """Live requests per check; 0 turns watching off."""
    alpha: float = Field(0.01, gt=0, lt=1)
    """Chance of an alarm while nothing has fallen, over all checks of a version together.

    Live success is compared with that on the gate's n tasks, taken as at most 1 − 3/n: that no task failed does not mean that
    none can.
    """
    drift_alpha: float | None = Field(None, gt=0, lt=1)
    """Chance of an alarm while requests have not changed, over all checks of a cycle together; nobody looks when absent."""
    failures: int | None = Field(None, ge=1)
    """Verified failures of live traffic that set off a cycle, counted anew in each; they are not counted when absent."""
    every: int = Field(1, ge=1)
    """Checks without any other trigger after which a cycle begins all the same."""


@dataclass(frozen=True, slots=True)
class Live:
    """What live traffic has shown of the served version on the deployed suite by now."""

    successes: int
    requests: int
    """Those that were judged: faults of tools or verifier say nothing of the policy."""
    expected: float | None
    """Success rate on the gate's tasks; ``None`` for a version that was never measured."""
    n_gate: int = 0
    new_failures: int = 0
    """Verified failures since the cycle began."""
    contract_changed: bool = False
    drift: float | None = None
    """Of the last check: chance of requests as different as these; ``None`` where nobody looked."""
    drifted: str = _OTHER_REQUESTS
    """What differs from what, if it does."""
    check: int = 1
    """Checks in this cycle, this one included."""
    customers: CustomerOutcomes | None = None
    """How stored conversations with the served version ended; ``None`` where none are stored."""


def fired(live: Live, config: WatchConfig) -> dict[str, str]:
    """The triggers that traffic sets off, by name, in words; empty while all is well.

    >>> fired(Live(3, 24, expected=0.95, n_gate=96), WatchConfig())
    {'fall': 'live success fell to 3/24 (promoted at 0.95; with 99% confidence it is at most 0.44)'}
    """
    found = {}
    if live.contract_changed:
        found["contract"] = "the tool contract changed"
    falls = [_fall(live, *stream) for stream in _streams(live, config.alpha)]
    if any(falls):
        found["fall"] = "; ".join(filter(None, falls))
    if live.drift is not None and config.drift_alpha is not None and live.drift <= drift_level(config.drift_alpha, live.check):
        found["drift"] = f"{live.drifted} (p = {live.drift:.2g})"
    if config.failures is not None and live.new_failures >= config.failures:
        found["failures"] = f"{live.new_failures} verified failures in live traffic"
    return found


def _streams(live: Live, alpha: float) -> list[tuple[str, int, int, float]]:
    """Name, successes, judged and level of each kind of traffic that there is."""
    own = ("live success", live.successes, live.requests)
    if live.customers is None:
        return [(*own, alpha)]
    theirs = ("success of customers' conversations", live.customers.successes, len(live.customers.scores))
    return [(*own, alpha / 2), (*theirs, alpha / 2)]


def _fall(live: Live, what: str, successes: int, judged: int, level: float) -> str:
    """That this traffic has fallen below what the gate measured, in words; empty where that is not shown."""
    bound = success_upper_bound(successes, judged - successes, level)
    if live.expected is None or bound >= promised(live.expected, live.n_gate):
        return ""
    return (
        f"{what} fell to {successes}/{judged} (promoted at {live.expected:.2f}; with {_percent(1 - level)} confidence it is at "
        f"most {bound:.2f})"
    )


def _percent(share: float) -> str:
    """
    >>> _percent(0.99), _percent(0.995)
    ('99%', '99.5%')
    """
    return f"{100 * share:.6g}%"


def promised(expected: float, n_gate: int) -> float:
    """What live success is held against: a perfect score on n tasks does not mean that failure is impossible.

    >>> promised(1.0, 96), promised(0.8, 96)
    (0.96875, 0.8)
    """
    return min(expected, 1 - 3 / max(n_gate, 4))


def drift_of(
    rollouts: Sequence[Rollout],
    reference: Sequence[str],
    seed: int,
    customers: tuple[Sequence[str], Sequence[str]] | None = None,
) -> tuple[float, str]:
    """The drift of requests as a p-value, and what it would be the drift of.

    Args:
        rollouts: What the run asked itself.
        reference: What the environment has its customers ask.
        seed: Of the shuffles.
        customers: What stored conversations asked before, and of late. Both were redacted alike, which texts of the environment
            were not: hence customers are compared with customers.
    """
    found = [(drift_p([request_of(each) for each in rollouts if each.turns], reference, seed=seed), _OTHER_REQUESTS)]
    if customers is not None:
        before, late = customers
        found.append((drift_p(late, before, seed=seed), "customers ask for other things than they did"))
    p_value, what = min(found)
    return min(1.0, len(found) * p_value), what


def request_of(rollout: Rollout) -> str:
    """What the user said first."""
    return next((message.content for message in rollout.turns[0].messages if message.role == "user"), "")
