"""Money ahead: what more steps of reinforcement learning would bring, and when the next dollar no longer pays."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from evergrad.ledger import Forecast, fit_forecast, next_dollar
from evergrad.loop._figures import usd as money
from evergrad.loop._session import Session
from evergrad.loop.config import RunConfig

_FEWEST_STEPS = 8
"""Steps from which on a phase may be stopped: the first few say more of chance than of the curve."""


def rl_steps(steps: Sequence[Mapping[str, Any]], cycle: int) -> list[Mapping[str, Any]]:
    """The records of one cycle's reinforcement learning."""
    return [step for step in steps if step["kind"] == "rl" and step["cycle"] == cycle]


def phase_dollars(steps: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """Dollars after each of these consecutive steps, counted from the begin of the first; ``None`` when one is unpriced.

    A record has the dollars since the run began. The first step's own are not among them, and count as much as the median.

    >>> phase_dollars([{"usd": 5.0}, {"usd": 6.0}, {"usd": 8.0}])
    [1.5, 2.5, 4.5]
    """
    found = [step["usd"] for step in steps]
    if None in found or len(found) < 2:
        return None
    begin = found[0] - statistics.median(after - before for before, after in pairwise(found))
    return [amount - begin for amount in found]


def forecast_of(steps: Sequence[Mapping[str, Any]], seed: int = 0) -> Forecast | None:
    """The sigmoid through one phase's steps; ``None`` when they are too few or unpriced."""
    usd = phase_dollars(steps)
    if usd is None or usd != sorted(set(usd)) or usd[0] <= 0:
        return None
    return fit_forecast(usd, [float(step["reward"]) for step in steps], seed=seed)


def budget_left(config: RunConfig, spent: float | None) -> float | None:
    """Dollars of the budget that are not spent; ``None`` without a budget in dollars, or when something is unpriced."""
    limit = config.budget.usd
    return None if limit is None or spent is None else max(0.0, limit - spent)


def unspent(config: RunConfig, spent: float | None) -> str:
    """What is left of a budget in dollars, as the end of a sentence; empty without one."""
    left = budget_left(config, spent)
    return f"; {money(left)} of the budget of {money(config.budget.usd)} is unspent" if left else ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why learning ends before its steps are done, with the numbers of that decision."""

    why: str
    evidence: Mapping[str, Any]


async def no_longer_pays(session: Session) -> Stop | None:
    """Whether no further step of this phase is worth its price."""
    state, config = session.state, session.config
    worth, steps = config.worth, rl_steps(state.steps, state.cycle)
    if worth is None or len(steps) < _FEWEST_STEPS:
        return None
    with session.clock.phase("plan"):
        forecast = await asyncio.to_thread(forecast_of, steps, config.seed)
    if forecast is None:
        return None
    ahead = [budget_left(config, session.spent_usd()), _rest_of_phase(session, forecast)]
    reach = forecast.spent_usd + min(amount for amount in ahead if amount is not None)
    found = next_dollar(forecast, worth.usd_per_score, hurdle=config.budget.hurdle, until_usd=reach)
    if found.pays:
        return None
    brings = found.brings
    why = (
        f"the next dollar brings in {money(brings.value)} (90% interval {money(brings.low)} to {money(brings.high)}), "
        f"and its lower bound must exceed {money(1 + found.hurdle)}"
    )
    evidence = {
        "phase_usd": forecast.spent_usd,
        "next_dollar_brings": dataclasses.asdict(brings),
        "hurdle": found.hurdle,
        "usd_per_score": worth.usd_per_score,
        "reward": dataclasses.asdict(forecast.reward(forecast.spent_usd)),
        "ceiling": dataclasses.asdict(forecast.ceiling),
        "curve": dataclasses.asdict(forecast.curve),
        "steps_left": session.recipe.rl.steps - state.step,
    }
    return Stop(why, evidence)


def _rest_of_phase(session: Session, forecast: Forecast) -> float:
    """Dollars that the steps to come of this phase would cost."""
    done = max(1, session.state.step)
    return forecast.spent_usd / done * max(1, session.recipe.rl.steps - done)
