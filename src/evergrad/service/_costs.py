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
    """What the served version costs, from the report: the ledger alone knows no tokens and no successes.

    Raises:
        EvergradError: the report is broken.
    """
    path = run / "report.json"
    report = read_report(run) if path.exists() else {}
    units = {name: report.get(name) for name in ("usd_per_million_tokens", "usd_per_success", "intelligence_per_dollar")}
    if not _sound(**units):
        hint = "remove it and run 'evergrad run' with the configuration of this run, which writes it anew"
        raise EvergradError("the report's figures are no numbers", where=str(path), hint=hint)
    return units


def _sound(usd_per_million_tokens: Any, usd_per_success: Any, intelligence_per_dollar: Any) -> bool:
    """Whether the figures are numbers where they are known."""
    worth = {} if intelligence_per_dollar is None else intelligence_per_dollar
    if not isinstance(worth, Mapping):
        return False
    interval = [None, None] if worth.get("ci95") is None else worth["ci95"]
    if not isinstance(interval, list) or len(interval) != 2:
        return False
    numbers = [usd_per_million_tokens, usd_per_success, worth.get("value"), *interval]
    return all(number is None or isinstance(number, (int, float)) for number in numbers)


def _print(run: Path, summary: CostSummary, uncharged: Mapping[str, Decimal], units: dict[str, Any]) -> None:
    screen = console()
    phases = _rows(summary.by_phase, summary.usd_known)
    phases.append(("total", cell(_money(summary.usd), "bold"), ""))
    screen.print(table(("phase", "cost", "share"), phases, right=("cost", "share"), title=str(run)))
    if len(summary.by_subject) > 1:
        subjects = [
            (name if name.startswith("cycle-") else "outside cycles", *rest)
            for name, *rest in _rows(summary.by_subject, summary.usd_known)
        ]
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
