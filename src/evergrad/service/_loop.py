"""``evergrad loop``: what the machine does, what it decided and why, and the hand on its brake."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evergrad.loop.pausing import is_running, lift_pause, pause_of, request_pause
from evergrad.loop.report import clock, to_plain, usd
from evergrad.loop.status import Status, decision_of, state_of, status_of
from evergrad.service._screen import cell, console, print_json, table
from evergrad.types import InputError


def show_status(run: Path, *, as_json: bool = False) -> None:
    status = status_of(run)
    if as_json:
        print_json(status)
        return
    rows = [
        ("is", f"{status.running}: {status.doing}"),
        ("cycle", f"{status.cycle} of {status.cycles}, set off by: {status.trigger}"),
        ("serves", status.serves),
        ("last decided", _told(status.last) if status.last else None),
        ("spent", _spent(status)),
        ("next", status.following),
    ]
    console().print(table(("", ""), rows, title=str(run)))


def explain(run: Path, number: int | None, *, as_json: bool = False) -> None:
    """Prints one decision with its evidence, or a line for each."""
    if number is not None:
        decision = decision_of(run, number)
        if as_json:
            print_json(decision)
        else:
            _print_decision(decision)
        return
    decisions = state_of(run).decisions
    if as_json:
        print_json(decisions)
        return
    rows = [
        (each["number"], clock(each["at_s"]), usd(each["usd"]), each["cycle"], each["stage"], each["decided"], each["why"])
        for each in decisions
    ]
    heads = ("#", "at", "spent", "cycle", "stage", "decided", "why")
    console().print(table(heads, rows, right=("#", "at", "spent", "cycle")))


def pause(run: Path, reason: str) -> None:
    """Asks for a pause, and says when it takes effect."""
    before = pause_of(run)
    if before is not None:
        print(f"{run} is paused already, since {before.at}: {before.reason}")
        return
    request_pause(run, reason or "by hand")
    print(f"{run} pauses at its next safe point" if is_running(run) else f"{run} is paused: nobody is running it now")
    print(f"to go on: evergrad loop resume --run {run}")


def resume(run: Path) -> Path | None:
    """Lifts a pause; the configuration to go on with, or ``None`` while a controller is at it.

    Raises:
        InputError: there is nothing to go on with.
    """
    if not (run / "config.toml").is_file():
        raise InputError("no config.toml to go on with", where=str(run), hint="start the run with 'evergrad run CONFIG.toml'")
    lifted = lift_pause(run)
    if lifted is not None:
        print(f"the pause of {lifted.at} is lifted: {lifted.reason}")
    if is_running(run):
        print(f"{run} goes on: its controller is running")
        return None
    return run / "config.toml"


def _told(decision: Mapping[str, Any]) -> str:
    return f"#{decision['number']} in cycle {decision['cycle']}, {decision['stage']}: {decision['decided']}: {decision['why']}"


def _spent(status: Status) -> str:
    money = usd(status.usd) + (f" of {usd(status.budget_usd)}" if status.budget_usd is not None else "")
    limit = f" of {status.budget_minutes:g}" if status.budget_minutes is not None else ""
    return f"{money}, {status.minutes:.1f}{limit} minutes"


def _print_decision(decision: Mapping[str, Any]) -> None:
    when = f"{decision['at']}, {clock(decision['at_s'])} into the run, {usd(decision['usd'])} spent"
    rows = [
        ("decided", decision["decided"]),
        ("why", decision["why"]),
        ("move", f"{decision['stage']} → {decision['following']}"),
        ("when", when),
    ]
    for key, value in to_plain(decision["evidence"]).items():
        text = json.dumps(value, ensure_ascii=False, indent=1) if isinstance(value, dict | list) and value else value
        rows.append((key, text))
    title = f"decision {decision['number']}, cycle {decision['cycle']}"
    console().print(table(("", ""), [(cell(name, "bold"), value) for name, value in rows], title=title))
