"""What sets a cycle off: the world as live traffic shows it, or the clock.

=============  ========================================================================================================
``contract``   the tools' schema or descriptions are none that the served version was made for (by their hash)
``fall``       the confidence sequence of live success lies below what the gate measured
``drift``      requests are other ones than those that the environment makes (maximum mean discrepancy)
``failures``   so many verified failures since the cycle began
``schedule``   so many checks passed without any of these
=============  ========================================================================================================

Any one is enough. Whether a cycle that one of them sets off trains is DECIDE's to say, and the budget's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from evergrad.config import Config
from evergrad.evals import drift_level, drift_p, success_upper_bound
from evergrad.types import Rollout


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
    check: int = 1
    """Checks in this cycle, this one included."""


def fired(live: Live, config: WatchConfig) -> dict[str, str]:
    """The triggers that traffic sets off, by name, in words; empty while all is well.

    >>> fired(Live(3, 24, expected=0.95, n_gate=96), WatchConfig())
    {'fall': 'live success fell to 3/24 (promoted at 0.95; with 99% confidence it is at most 0.44)'}
    """
    found = {}
    if live.contract_changed:
        found["contract"] = "the tool contract changed"
    bound = success_upper_bound(live.successes, live.requests - live.successes, config.alpha)
    if live.expected is not None and bound < promised(live.expected, live.n_gate):
        found["fall"] = (
            f"live success fell to {live.successes}/{live.requests} (promoted at {live.expected:.2f}; with "
            f"{1 - config.alpha:.0%} confidence it is at most {bound:.2f})"
        )
    if live.drift is not None and config.drift_alpha is not None and live.drift <= drift_level(config.drift_alpha, live.check):
        found["drift"] = f"requests are other ones than the environment makes (p = {live.drift:.2g})"
    if config.failures is not None and live.new_failures >= config.failures:
        found["failures"] = f"{live.new_failures} verified failures in live traffic"
    return found


def promised(expected: float, n_gate: int) -> float:
    """What live success is held against: a perfect score on n tasks does not mean that failure is impossible.

    >>> promised(1.0, 96), promised(0.8, 96)
    (0.96875, 0.8)
    """
    return min(expected, 1 - 3 / max(n_gate, 4))


def drift_of(rollouts: Sequence[Rollout], reference: Sequence[str], seed: int) -> float:
    """The drift of the requests in ``rollouts`` from the texts in ``reference``, as a p-value."""
    return drift_p([request_of(each) for each in rollouts if each.turns], reference, seed=seed)


def request_of(rollout: Rollout) -> str:
    """What the user said first."""
    return next((message.content for message in rollout.turns[0].messages if message.role == "user"), "")
