"""Whether the next dollar pays, and where on the curve it ceases to: the stop rule of a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from evergrad.ledger.forecast import Estimate, Forecast

_SCAN = 200


@dataclass(frozen=True, slots=True)
class NextDollar:
    """What the next dollar of training is expected to bring in.

    >>> NextDollar(Estimate(1.9, 1.1, 2.7), hurdle=0.2).pays
    False
    """

    brings: Estimate
    """Dollars: V · N_life · dR/dC, with its 90% interval."""
    hurdle: float
    """The return above itself that a dollar must promise."""

    @property
    def pays(self) -> bool:
        """Even the lower bound brings the dollar back and the hurdle with it."""
        return self.brings.low > 1 + self.hurdle


def next_dollar(
    forecast: Forecast, worth_usd: float, *, hurdle: float = 0.0, at_usd: float | None = None, until_usd: float | None = None
) -> NextDollar:
    """
    Args:
        forecast: Of the reward.
        worth_usd: What a reward higher by 1 is worth: dollars a success times the attempts that a version serves.
        hurdle: See :class:`NextDollar`.
        at_usd: Where on the curve; after what is spent by default.
        until_usd: The last point of the curve that the budget reaches.
    """
    return NextDollar(forecast.marginal(at_usd, until_usd).times(worth_usd), hurdle)


def worthwhile_until(forecast: Forecast, worth_usd: float, *, from_usd: float, until_usd: float, hurdle: float = 0.0) -> float:
    """Dollars since reinforcement learning began, up to which each next one pays; ``from_usd`` when not even the first does.

    Args:
        forecast: Of the reward.
        worth_usd: See :func:`next_dollar`.
        from_usd: Where spending would go on.
        until_usd: Where the budget ends.
        hurdle: See :class:`NextDollar`.
    """
    begin = max(from_usd, 1e-3 * until_usd)
    if until_usd <= begin:
        return from_usd
    ratio = until_usd / begin

    def pays(usd: float) -> bool:
        return next_dollar(forecast, worth_usd, hurdle=hurdle, at_usd=usd, until_usd=until_usd).pays

    reached = from_usd
    for index in range(_SCAN):
        usd = begin * math.pow(ratio, index / _SCAN)
        if not pays(usd):
            return _bisected(pays, reached, usd) if reached > 0 and index else reached
        reached = usd
    return until_usd


def _bisected(pays: Callable[[float], bool], paid: float, unpaid: float) -> float:
    """The last amount between the two at which a dollar still pays."""
    for _ in range(20):
        middle = (paid + unpaid) / 2
        paid, unpaid = (middle, unpaid) if pays(middle) else (paid, middle)
    return paid
