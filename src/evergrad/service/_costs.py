"""``evergrad cost``: where a run's money went, and what it bought."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from evergrad.ledger import CostSummary, Ledger
from evergrad.loop.report import count, percent, read_report, usd
from evergrad.service._runs import LEDGER
from evergrad.service._screen import cell, console, print_json, table
from evergrad.types import EvergradError, InputError


def show_costs(run: Path, *, as_json: bool = False) -> None:
    """Prints the ledger's sums by phase and by cycle, and the report's unit costs once there is a report.

    Raises:
        EvergradError: the run has no ledger, or it does not add up to what was reserved.
    """
    path = run / LEDGER
    if not path.is_file():
        raise InputError("the run has no ledger yet", where=str(path), hint="wait until it has started")
    with Ledger.for_reading(path) as ledger:
        summary, uncharged = ledger.summary(), ledger.uncharged()
        ledger.check_conservation()
    units = _unit_costs(run)
    if as_json:
        print_json({"cost": summary, "uncharged": uncharged, **units})
    else:
        _print(run, summary, uncharged, units)


def _unit_costs(run: Path) -> dict[str, Any]:
    """What the served version costs, from the report: the ledger alone knows no tokens and no successes."""
    try:
        report = read_report(run)
    except EvergradError:
        report = {}
    return {name: report.get(name) for name in ("usd_per_million_tokens", "usd_per_success", "intelligence_per_dollar")}


def _print(run: Path, summary: CostSummary, uncharged: Mapping[str, Decimal], units: dict[str, Any]) -> None:
    screen = console()
    phases = _rows(summary.by_phase, summary.usd_known)
    phases.append(("total", cell(_money(summary.usd), "bold"), ""))
    screen.print(table(("phase", "cost", "share"), phases, right=("cost", "share"), title=str(run)))
    if len(summary.by_subject) > 1:
        subjects = _rows(summary.by_subject, summary.usd_known)
        screen.print()
        screen.print(table(("spent on", "cost", "share"), subjects, right=("cost", "share")))
    screen.print()
    if summary.unpriced:
        known = f"{percent(summary.coverage)} of the entries are priced, {_money(summary.usd_known)} in sum; "
        screen.print(cell(f"{known}no price for: {', '.join(summary.unpriced)}", "yellow"))
    screen.print(cell(f"{summary.entries} entries: {_quantities(summary.by_resource)}", "dim"))
    if uncharged:
        screen.print(cell(f"not yet charged: {_quantities(uncharged)}; the run does it when it goes on", "dim"))
    per_dollar = units["intelligence_per_dollar"] or {}
    interval = per_dollar.get("ci95")
    lines = {
        "per million tokens": _money(units["usd_per_million_tokens"]),
        "per success": _money(units["usd_per_success"]),
        "successes per dollar": count(per_dollar.get("value"))
        + (f"  (95%: {count(interval[0])} to {count(interval[1])})" if interval else ""),
    }
    screen.print(table(("", ""), lines.items()))


def _quantities(amounts: Mapping[str, Decimal]) -> str:
    return ", ".join(f"{float(amount):,.1f} {resource}" for resource, amount in amounts.items())


def _rows(amounts: Any, known: Decimal) -> list[tuple[Any, ...]]:
    ordered = sorted(amounts.items(), key=lambda item: -(item[1] or 0))
    return [
        (name, _money(amount), percent(float(amount / known)) if amount is not None and known else "–")
        for name, amount in ordered
    ]


def _money(amount: Decimal | float | None) -> str:
    return usd(None if amount is None else float(amount))
