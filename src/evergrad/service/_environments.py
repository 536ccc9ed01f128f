"""``evergrad env``: what there is to learn on, and whether its rewards deserve it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from evergrad.service._screen import cell, console, table

_DEFAULT_MODEL = "smollm2-135m"


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

    report = test_environment(name, parse_overrides(overrides), n=n, seed=seed, **_token_count())
    styles = {"pass": "green", "FAIL": "bold red", "skip": "yellow"}
    rows = [(check, cell(word, styles[word]), figure, detail) for check, word, figure, detail in report.rows()]
    screen = console()
    screen.print(
        table(("check", "", "figure", "detail"), rows, right=("figure",), title=f"{report.environment}, {report.tasks} tasks")
    )
    failed, skipped = len(report.failed), len(report.skipped)
    unchecked = f", {skipped} not checked" if skipped else ""
    if failed:
        what = f"{failed} of {len(report.checks)} checks failed{unchecked}: do not train on these rewards yet."
        screen.print(cell(what, "bold red"))
        return 1
    passed = len(report.checks) - skipped
    screen.print(cell(f"{passed} passed{unchecked}." if skipped else f"All {passed} checks passed.", "green"))
    return 0


def _token_count() -> dict[str, Any]:
    """How many tokens a reply has for the model that runs train unless told otherwise; nothing where it was never made."""
    from evergrad.registry import default_cache

    found = sorted(default_cache().glob(f"{_DEFAULT_MODEL}-*/tokenizer.json"))
    if not found:
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(found[-1]))
    return {
        "count_tokens": lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids) + 1,
        "counted_by": f"the tokenizer of {_DEFAULT_MODEL}",
    }
