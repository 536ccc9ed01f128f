"""``evergrad plan``: what a budget buys, before it is spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from evergrad.ledger import Estimate
from evergrad.loop.planning import Option, SpendingPlan, plan_budget
from evergrad.loop.report import count, percent, usd
from evergrad.service._screen import cell, console, print_json, table


def show_plan(
    run: Path, budget_usd: float, *, anew: bool = False, overrides: Sequence[str] = (), as_json: bool = False
) -> None:
    """Prints what one more cycle like the run's last one buys for ``budget_usd``, and for less and more.

    Raises:
        EvergradError: nothing in the run to forecast from, or its files are broken.
    """
    plan = plan_budget(run, budget_usd, anew=anew, overrides=overrides)
    if as_json:
        print_json(plan)
        return
    screen = console()
    begin = "anew, as at the begin of that phase" if plan.anew else "on from where that phase ended"
    screen.print(cell(f"{plan.run}: forecast from {plan.basis}; it goes {begin}", "dim"))
    screen.print(
        cell(f"a step costs {usd(plan.usd_per_step)}; a cycle costs {usd(plan.overhead_usd)} besides its steps", "dim")
    )
    screen.print(cell(f"reward now {_shares(plan.now)}, at most {_shares(plan.ceiling)}; all intervals are 90%", "dim"))
    screen.print()
    numbers = ("budget", "steps", "reward", "gain", "pays when a score of 1 is worth", "break-even attempts", "return")
    screen.print(table(numbers, [_row(option) for option in plan.options], right=numbers))
    screen.print()
    screen.print(cell(_advice(plan), "bold"))
    choice = plan.next_arm
    if any(each.tries for each in choice.values):
        screen.print()
        rows = [
            (each.arm, str(each.tries), percent(each.gain_bound, signed=True), usd(each.usd_bound)) for each in choice.values
        ]
        heads = ("arm", "tries", "gain at most", "cost at least")
        screen.print(table(heads, rows, right=heads[1:], title=f"the next cycle would try: {choice.arm}"))


def _row(option: Option) -> tuple[str, ...]:
    return (
        usd(option.usd),
        str(option.steps),
        _shares(option.reward),
        _shares(option.gain, signed=True),
        "never" if math.isinf(option.must_bring_usd.value) else _span(option.must_bring_usd, usd),
        "–" if option.break_even_attempts is None else _span(option.break_even_attempts, count),
        "–" if option.roi is None else _shares(option.roi, signed=True),
    )


def _advice(plan: SpendingPlan) -> str:
    if plan.recommended_usd is None:
        return (
            "Say what a success is worth, and the plan says how much of the budget pays: "
            "--set worth.usd_per_success=0.10 --set worth.attempts=100000"
        )
    if plan.recommended_usd <= 0:
        return f"Do not spend it: even {usd(plan.budget_usd)} is not sure to come back. Unspent: {usd(plan.unspent_usd)}."
    return f"Spend {usd(plan.recommended_usd)} of {usd(plan.budget_usd)}. Unspent: {usd(plan.unspent_usd)}."


def _shares(estimate: Estimate, *, signed: bool = False) -> str:
    return (
        f"{percent(estimate.value, signed=signed)} "
        f"[{percent(estimate.low, signed=signed)}, {percent(estimate.high, signed=signed)}]"
    )


def _span(estimate: Estimate, show: Callable[[float], str]) -> str:
    low, high = (("never" if math.isinf(end) else show(end)) for end in (estimate.low, estimate.high))
    return f"{'never' if math.isinf(estimate.value) else show(estimate.value)} [{low}, {high}]"
