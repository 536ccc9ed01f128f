"""What a budget buys: steps, the gain that they are expected to bring, and when that has paid for itself.

A plan goes by what a run has recorded: the curve of its last phase of reinforcement learning, and what its last cycle cost
besides (warm start, evaluation, ruling, traffic). It reads a run's folder and changes nothing in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.config import load_config
from evergrad.envs import Taskset
from evergrad.ledger import FEWEST_STEPS, Choice, Estimate, Forecast, worthwhile_until
from evergrad.loop._choosing import choose, open_arms
from evergrad.loop._folder import LoopState, read_state
from evergrad.loop._spending import forecast_of, phase_dollars, rl_steps
from evergrad.loop.config import RunConfig, WorthConfig
from evergrad.registry import Registry
from evergrad.types import InputError

_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Of the budget that was asked for: what less or more of it would buy."""


@dataclass(frozen=True, slots=True)
class Option:
    """One budget for one more cycle, and what it buys."""

    usd: float
    steps: int
    """Of reinforcement learning, after what else a cycle costs; 0 when nothing is left for it."""
    reward: Estimate
    """Mean reward of rollouts after the last step."""
    gain: Estimate
    """By how much that is more than now."""
    must_bring_usd: Estimate
    """What a score higher by 1 must be worth, over the life of a version, to pay the budget back; ``inf`` for no gain."""
    break_even_attempts: Estimate | None
    """Attempts after which the budget is paid back; ``None`` without a ``[worth]``."""
    roi: Estimate | None
    """(V·N·gain − T) / T over the attempts of the ``[worth]``; ``None`` without one."""


@dataclass(frozen=True, slots=True)
class SpendingPlan:
    """What is known of the next cycle's money before it is spent."""

    run: str
    basis: str
    """Which steps the forecast was fitted to."""
    anew: bool
    """Whether the curve begins anew, or goes on from where the last phase ended."""
    usd_per_step: float
    overhead_usd: float
    """What a cycle costs besides reinforcement learning."""
    now: Estimate
    ceiling: Estimate
    options: tuple[Option, ...]
    """The budget that was asked for, and less and more of it."""
    budget_usd: float
    recommended_usd: float | None
    """As much of the budget as pays: up to there, even the lower bound of what the next dollar brings exceeds ``1 + hurdle``
    dollars. ``None`` without a ``[worth]``."""
    unspent_usd: float | None
    """The rest of it."""
    next_arm: Choice
    """Which way of getting better the next cycle would try, by what its tries have gained so far, or ``nothing``."""


def plan_budget(run: Path, budget_usd: float, *, anew: bool = False, overrides: Sequence[str] = ()) -> SpendingPlan:
    """Plans one more cycle like the last one in ``run``.

    Args:
        run: A run's folder.
        budget_usd: Dollars for the whole cycle.
        anew: For tasks of the same kind that the version has not learned yet; otherwise the curve goes on where it ended.
        overrides: Of the run's configuration, such as ``worth.attempts=1000``.

    Raises:
        InputError: nothing in the run to forecast from.
        EvergradError: the run's configuration or state is broken.
    """
    config, state = load_config(RunConfig, run / "config.toml", overrides), read_state(run / "state.json")
    cycle, steps, forecast = _basis(run, state, config.seed)
    used = forecast.spent_usd
    usd_per_step, overhead = used / len(steps), _overhead(state, cycle, used)
    begin = 0.0 if anew else used
    budgets = [share * budget_usd for share in _SHARES]
    options = [_option(amount, overhead, usd_per_step, begin, forecast, config.worth) for amount in budgets]
    suite = Taskset(config.environment.name, state.deployed).suite
    with Registry(run / "registry.sqlite") as registry:
        choice = choose(config, state, suite, None, list(open_arms(config, state, registry, suite, run)))
    recommended = _recommended(budget_usd, overhead, begin, forecast, config)
    return SpendingPlan(
        run=str(run),
        basis=f"cycle {cycle}: {len(steps)} steps, {steps[-1]['usd'] - steps[0]['usd'] + usd_per_step:.4g} dollars",
        anew=anew,
        usd_per_step=usd_per_step,
        overhead_usd=overhead,
        now=forecast.reward(begin),
        ceiling=forecast.ceiling,
        options=tuple(options),
        budget_usd=budget_usd,
        recommended_usd=recommended,
        unspent_usd=None if recommended is None else budget_usd - recommended,
        next_arm=choice,
    )


def _basis(run: Path, state: LoopState, seed: int) -> tuple[int, Sequence[Mapping[str, Any]], Forecast]:
    """The last cycle whose reinforcement learning can be forecast from."""
    for cycle in range(state.cycle, 0, -1):
        steps = rl_steps(state.steps, cycle)
        forecast = forecast_of(steps, seed)
        if forecast is not None:
            return cycle, steps, forecast
    priced = phase_dollars([step for step in state.steps if step["kind"] == "rl"])
    unpriced = priced is None and len(state.steps) > 1
    raise InputError(
        "no cycle of the run can be forecast from: "
        + ("its steps have no price" if unpriced else f"none has {FEWEST_STEPS} steps of reinforcement learning"),
        where=str(run),
        hint="price what it uses in the price book"
        if unpriced
        else "let it learn a little first: 'evergrad run' with a small budget",
    )


def _overhead(state: LoopState, cycle: int, rl_usd: float) -> float:
    """What the cycle cost besides reinforcement learning; of one under way, what it has cost until its first step."""
    ended = [row for row in state.cycles if row["cycle"] == cycle and row["usd"] is not None]
    if ended:
        return max(0.0, float(ended[-1]["usd"]) - rl_usd)
    before = state.cycle_started.get("usd") or 0.0
    last = rl_steps(state.steps, cycle)[-1]["usd"]
    return max(0.0, float(last) - before - rl_usd)


def _option(
    usd: float, overhead: float, usd_per_step: float, begin: float, forecast: Forecast, worth: WorthConfig | None
) -> Option:
    steps = max(0, math.floor((usd - overhead) / usd_per_step + 1e-9))
    end = begin + steps * usd_per_step
    gain = forecast.gain(begin, end)
    over = Estimate(_per(usd, gain.value), _per(usd, gain.high), _per(usd, gain.low))
    attempts = roi = None
    if worth is not None:
        attempts = Estimate(*(_per(bring, worth.usd_per_success) for bring in (over.value, over.low, over.high)))
        value = gain.times(worth.usd_per_score / usd)
        roi = Estimate(value.value - 1, value.low - 1, value.high - 1)
    return Option(usd, steps, forecast.reward(end), gain, over, attempts, roi)


def _recommended(budget: float, overhead: float, begin: float, forecast: Forecast, config: RunConfig) -> float | None:
    """Overhead and as much learning as pays; nothing at all when the whole does not bring back what it costs."""
    if config.worth is None:
        return None
    worth, end = config.worth.usd_per_score, begin + max(0.0, budget - overhead)
    reached = worthwhile_until(forecast, worth, from_usd=begin, until_usd=end, hurdle=config.budget.hurdle)
    spend = overhead + reached - begin
    brings = forecast.gain(begin, reached).low * worth
    return spend if reached > begin and brings > (1 + config.budget.hurdle) * spend else 0.0


def _per(amount: float, rate: float) -> float:
    return amount / rate if rate > 0 else math.inf
