"""What to try next: ways of getting better compete for the money, and so does leaving everything as it is.

Each try of an arm (more reinforcement learning, supervised fine-tuning, another recipe) has gained so much score for so many
dollars. The next try goes to the arm with the largest optimistic gain per careful dollar: a budgeted upper confidence bound
over the last tries (Ding and others, "Multi-armed bandit with budget constraint and variable costs", AAAI 2013)::

    value(arm) = V·N · UCB(gain) / LCB(dollars),      bounds: mean ± s · √(2·ln t / n)  after n of t tries

``nothing`` gains nothing for nothing, so it takes no part in the ratio: it wins when no arm is worth its price, that is when
the value of the best is below ``1 + hurdle``; without a worth, when none may gain at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evergrad.ledger.prices import LedgerError

NOTHING = "nothing"
WINDOW = 20
"""Tries of an arm that are remembered: what paid long ago says little of a version that has grown since."""
_GAIN_SD, _COST_SHARE = 0.05, 0.25
"""How uneven gains (in score) and costs (as a share of their mean) are taken to be before they are seen; counts as one try."""


@dataclass(frozen=True, slots=True)
class Try:
    """One try of an arm, whether it was promoted or not."""

    arm: str
    gain: float
    """In mean score on the suite that decides; what was refused has gained nothing for the service, whatever it scored."""
    usd: float


@dataclass(frozen=True, slots=True)
class ArmValue:
    """What an arm promises."""

    arm: str
    tries: int
    gain_bound: float
    """Upper bound of its gain in score; ``inf`` for one that was never tried."""
    usd_bound: float
    """Lower bound of its cost."""
    value: float
    """Score per dollar, or with a worth dollars per dollar; ``inf`` for one that was never tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An arm, and the figures by which it was chosen."""

    arm: str
    values: tuple[ArmValue, ...]
    """Of all arms but ``nothing``, the best first."""
    needs: float
    """What the best had to exceed to win over ``nothing``."""


def choose_arm(
    arms: Sequence[str],
    tries: Sequence[Try],
    *,
    usd_per_score: float | None = None,
    hurdle: float = 0.0,
    budget_left: float | None = None,
) -> Choice:
    """Chooses among ``arms`` and ``nothing``.

    Args:
        arms: Names; those that come first win ties.
        tries: Of these arms, oldest first.
        usd_per_score: What a score higher by 1 is worth; without it, only arms that cannot gain lose to ``nothing``.
        hurdle: The return above its price that an arm must promise.
        budget_left: Dollars; an arm that costs more, by its lower bound, takes no part.

    Raises:
        LedgerError: no arm, ``nothing`` among them, or a try that is not finite.
    """
    if not arms or NOTHING in arms or len(set(arms)) < len(arms):
        raise LedgerError(f"cannot choose among {list(arms)}", hint=f"name each arm once; '{NOTHING}' is always one")
    if not all(math.isfinite(each.gain) and math.isfinite(each.usd) and each.usd >= 0 for each in tries):
        raise LedgerError("a try has no finite gain and cost", hint="leave tries without a price out")
    total = sum(each.arm in arms for each in tries)
    values = [_value(arm, [each for each in tries if each.arm == arm][-WINDOW:], total, usd_per_score) for arm in arms]
    affordable = [each for each in values if budget_left is None or each.usd_bound <= budget_left]
    ordered = sorted(affordable, key=lambda each: -each.value)
    needs = 1 + hurdle if usd_per_score is not None else 0.0
    chosen = ordered[0].arm if ordered and ordered[0].value > needs else NOTHING
    return Choice(chosen, tuple(sorted(values, key=lambda each: -each.value)), needs)


def _value(arm: str, own: Sequence[Try], total: int, usd_per_score: float | None) -> ArmValue:
    if not own:
        return ArmValue(arm, 0, math.inf, 0.0, math.inf)
    width = math.sqrt(2 * math.log(max(2, total)) / len(own))
    mean_gain, mean_usd = (
        math.fsum(column) / len(own) for column in zip(*((each.gain, each.usd) for each in own), strict=True)
    )
    gain = mean_gain + width * _spread([each.gain - mean_gain for each in own], _GAIN_SD)
    usd = max(0.1 * mean_usd, mean_usd - width * _spread([each.usd - mean_usd for each in own], _COST_SHARE * mean_usd))
    scale = 1.0 if usd_per_score is None else usd_per_score
    value = gain * scale / usd if usd > 0 else math.copysign(math.inf, gain)
    return ArmValue(arm, len(own), gain, usd, value)


def _spread(deviations: Sequence[float], before: float) -> float:
    """Standard deviation, with the one that was taken before anything was seen as one more deviation."""
    return math.sqrt((math.fsum(each * each for each in deviations) + before * before) / (len(deviations) + 1))
