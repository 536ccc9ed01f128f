"""``evergrad cost``: where the money of a run, or of a training on data, went, and what it bought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from evergrad.config import nearest
from evergrad.ledger import (
    CostSummary,
    Ledger,
    OtherModels,
    Point,
    PriceBook,
    Reconciliation,
    View,
    cost_summary,
    focus_csv,
    in_view,
    pareto_front,
    reconcile,
    reprice,
)
from evergrad.loop.report import count, percent, read_report, usd
from evergrad.service._runs import LEDGER, REGISTRY
from evergrad.service._screen import cell, console, print_json, table
from evergrad.types import CostEntry, EvergradError, InputError

_ANEW = "remove it and run 'evergrad run' with the configuration of this run, which writes it anew"
_UNIT_COSTS = ("usd_per_million_tokens", "usd_per_success", "intelligence_per_dollar")
_MORE = ("usd_per_success_at_least", "all_in", "index", "unspent_usd")
"""Of the report as well, but not of one that an earlier version wrote."""


def show_costs(
    run: Path,
    *,
    focus: Path | None = None,
    price_book: Path | None = None,
    view: View = "billed",
    invoice: str | None = None,
    others: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints the ledger's sums by phase and by cycle, and the report's unit costs once there is a report.

    Args:
        run: The folder of a run, or of a training on data, which serves nothing and so has no unit costs.
        focus: Where to write the entries as a FOCUS table (CSV); what is there is replaced.
        price_book: Prices to use instead of those of the time; the ledger keeps its own.
        view: Which of a book's prices: what is billed, the list's, or what more would cost.
        invoice: Dollars that were invoiced for all this, to be put beside the ledger.
        others: Other models (TOML), to be placed among the run's versions.
        as_json: JSON instead of tables.

    Raises:
        EvergradError: the run has no ledger, it does not add up to what was reserved, or a file cannot be read or written.
    """
    path = run / LEDGER
    if not path.is_file():
        raise InputError("the run has no ledger yet", where=str(path), hint="wait until it has started")
    with Ledger.for_reading(path) as ledger:
        entries, uncharged, books = ledger.entries(), ledger.uncharged(), ledger.price_books()
        ledger.check_conservation()
    if price_book is not None:
        book = PriceBook.load(price_book)
        books = {book.hash: book}
        entries = reprice(entries, book)
    if focus is not None:
        _write_focus(focus, entries, run.resolve().name, books)
    if view != "billed":
        entries = in_view(entries, books, view)
    summary = cost_summary(entries)
    reconciled = None if invoice is None else reconcile(entries, _dollars(invoice))
    # Unit costs are those of the prices that the run was made with.
    as_made = price_book is None and view == "billed"
    units = _unit_costs(run) if as_made else dict.fromkeys((*_UNIT_COSTS, *_MORE))
    frontier = _frontier(run) if as_made else []
    if others is not None:
        frontier = _among_others(frontier, OtherModels.load(others), _last_book(entries, books))
    if as_json:
        print_json({"cost": summary, "uncharged": uncharged, "invoice": reconciled, **units, "frontier": frontier})
        return
    _print(run, summary, uncharged, units)
    if reconciled is not None:
        _print_invoice(reconciled)
    _print_frontier(frontier)


def _dollars(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise InputError(f"--invoice {text}: not a sum of dollars", hint="such as --invoice 12.34") from None


def _print_invoice(found: Reconciliation) -> None:
    screen = console()
    rows = [(name, f"${getattr(found, name):,.4f}") for name in ("allocated", "idle", "unattributed", "invoiced")]
    screen.print()
    screen.print(table(("the invoice", ""), rows, right=("",)))
    if found.residual < 0:
        screen.print(cell(f"the ledger has {_money(-found.residual)} more than the invoice: its prices are too high", "yellow"))
    elif found.unpriced:
        screen.print(cell(f"unattributed includes what has no price: {', '.join(found.unpriced)}", "yellow"))


def _write_focus(path: Path, entries: Sequence[CostEntry], account: str, books: Mapping[str, PriceBook]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.partial")
        beside.write_text(focus_csv(entries, account, books), encoding="utf-8", newline="")
        beside.replace(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write the table: {error}", where=str(path), hint="give --focus a path of a file") from error


def _frontier(run: Path) -> list[dict[str, Any]]:
    """The report's frontier; empty while there is none.

    Raises:
        EvergradError: the report is broken.
    """
    path = run / "report.json"
    found = read_report(run).get("frontier", []) if path.exists() else []
    if not isinstance(found, list) or not all(_is_place(each) for each in found):
        raise EvergradError("the report's frontier is none", where=str(path), hint=_ANEW)
    return found


def _last_book(entries: Sequence[CostEntry], books: Mapping[str, PriceBook]) -> PriceBook:
    known = [books[entry.price_book] for entry in entries if entry.price_book in books]
    return known[-1] if known else PriceBook.load()


def _among_others(frontier: Sequence[Mapping[str, Any]], others: OtherModels, book: PriceBook) -> list[dict[str, Any]]:
    """The run's versions and the models that were measured on the same suite, placed anew.

    Raises:
        EvergradError: nothing to compare: the run has no version on record there, or none of the models is of its suite.
    """
    if not frontier:
        raise InputError("no version of the run has a score and a price yet", hint="leave out --others until there is a report")
    suite = frontier[0].get("suite")
    points = [model.point(book) for model in others.models if model.suite == suite]
    if not points:
        named = nearest(str(suite), [model.suite for model in others.models])
        raise InputError(f"none of the models was measured on {suite}: {named}", hint="name the suite as the report does")
    own = [Point(each["version_id"], each["score"], each["usd_per_success"]) for each in frontier]
    return [
        {
            "version_id": each.point.name,
            "suite": suite,
            "score": each.point.score,
            "usd_per_success": each.point.usd_per_success,
            "on_front": each.on_front,
            "dominated_by": list(each.dominated_by),
        }
        for each in pareto_front([*own, *points])
    ]


def _is_place(each: Any) -> bool:
    if not isinstance(each, dict) or not isinstance(each.get("dominated_by"), list):
        return False
    numbers = isinstance(each.get("score"), (int, float)) and isinstance(each.get("usd_per_success"), (int, float, type(None)))
    return numbers and all(isinstance(name, str) for name in [each.get("version_id"), *each["dominated_by"]])


def _print_frontier(frontier: Sequence[Mapping[str, Any]]) -> None:
    """Who is worth having: what scores less for more is named with what beats it."""
    if len(frontier) < 2:
        return
    rows = [
        (
            cell(each["version_id"], "bold" if each.get("on_front") else "dim"),
            percent(each["score"]),
            _money(each.get("usd_per_success")),
            f"dominated by {', '.join(each['dominated_by'])}" if each["dominated_by"] else "",
        )
        for each in frontier
    ]
    screen = console()
    screen.print()
    title = f"score against cost per success on {frontier[0].get('suite')}"
    screen.print(table(("version", "score", "per success", ""), rows, right=("score", "per success"), title=title))


def _unit_costs(run: Path) -> dict[str, Any]:
    """What the served version costs, from the report: the ledger alone knows no tokens and no successes.

    Raises:
        EvergradError: the report is broken.
    """
    path = run / "report.json"
    report = read_report(run) if path.exists() else {}
    budget = report.get("budget")
    units = {name: report.get(name) for name in (*_UNIT_COSTS, *_MORE)}
    units["unspent_usd"] = budget.get("unspent_usd") if isinstance(budget, Mapping) else None
    parts = [{name: units[name] for name in _UNIT_COSTS}]
    if isinstance(units["all_in"], Mapping):
        parts.append({name: units["all_in"].get(name) for name in _UNIT_COSTS})
    if not all(_sound(**part) for part in parts) or not _sound_more(units):
        raise EvergradError("the report's figures are no numbers", where=str(path), hint=_ANEW)
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


def _sound_more(units: Mapping[str, Any]) -> bool:
    all_in, index = units["all_in"] or {}, units["index"] or {"retired": []}
    if not isinstance(all_in, Mapping) or not isinstance(index, Mapping) or not isinstance(index.get("retired"), list):
        return False
    numbers = [units["usd_per_success_at_least"], units["unspent_usd"], *map(all_in.get, ("learning_usd", "attempts"))]
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
    if not (run / REGISTRY).is_file():
        return
    per_dollar = units["intelligence_per_dollar"] or {}
    interval = per_dollar.get("ci95")
    lines = {
        "per million tokens": _money(units["usd_per_million_tokens"]),
        "per success": _per_success(units),
        "successes per dollar": count(per_dollar.get("value"))
        + (f"  (95%: {count(interval[0])} to {count(interval[1])})" if interval else ""),
    }
    all_in = units["all_in"]
    if all_in:
        spread = f"{usd(all_in['learning_usd'])} of learning over {count(all_in['attempts'])} attempts"
        lines["all in"] = f"{spread} ({'by the [worth]' if all_in['basis'] == 'worth' else 'served so far'})"
        lines["  per million tokens"] = _money(all_in["usd_per_million_tokens"])
        lines["  per success"] = _per_success(all_in)
        lines["  successes per dollar"] = count((all_in["intelligence_per_dollar"] or {}).get("value"))
    index = units["index"]
    if index and index["retired"]:
        lines["saturated, so retired"] = ", ".join(index["retired"])
    if units["unspent_usd"] is not None:
        lines["unspent of the budget"] = _money(units["unspent_usd"])
    screen.print(table(("", ""), lines.items()))


def _per_success(units: Mapping[str, Any]) -> str:
    """Without a success, what one costs at least."""
    least = units.get("usd_per_success_at_least")
    return (
        f"at least {_money(least)}"
        if units["usd_per_success"] is None and least is not None
        else _money(units["usd_per_success"])
    )


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
