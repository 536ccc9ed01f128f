"""``evergrad env``: what there is to learn on, and whether its rewards deserve it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from evergrad.service._screen import cell, console, table


def list_environments() -> None:
    """Prints the built-in environments, a line each."""
    from evergrad.envs import environment_names, load_environment

    rows = []
    for name in environment_names():
        summary = (inspect.getdoc(load_environment(name)) or "").split("\n\n")[0]
        rows.append((name, " ".join(summary.split())))
    console().print(table(("environment", "what it asks of an agent"), rows))
    console().print("An environment of your own is one Python file: evergrad env test my_environment.py")


def try_environment(name: str, overrides: Sequence[str], *, n: int, seed: int) -> int:
    """Prints the admission checks; 0 when all pass, else 1.

    Raises:
        EvergradError: the environment does not load, or has fewer than ``n`` training tasks.
    """
    from evergrad.config import parse_overrides
    from evergrad.envs import test_environment

    report = test_environment(name, parse_overrides(overrides), n=n, seed=seed)
    styles = {"pass": "green", "FAIL": "bold red"}
    rows = [(check, cell(word, styles[word]), figure, detail) for check, word, figure, detail in report.rows()]
    screen = console()
    screen.print(
        table(("check", "", "figure", "detail"), rows, right=("figure",), title=f"{report.environment}, {report.tasks} tasks")
    )
    failed = sum(not check.passed for check in report.checks)
    if failed:
        screen.print(cell(f"{failed} of {len(report.checks)} checks failed: do not train on these rewards yet.", "bold red"))
        return 1
    screen.print(cell(f"All {len(report.checks)} checks passed.", "green"))
    return 0
