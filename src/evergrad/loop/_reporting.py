"""What a run knows about itself, put together for ``report.json`` and ``report.html``."""

from __future__ import annotations

import math
import time
from typing import Any

from evergrad.evals import GIVEN_UP, error_reduction
from evergrad.ledger import Ledger, Point, pareto_front
from evergrad.loop._folder import LoopState, RunFolder
from evergrad.loop._scores import PER_TASK, row_of
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.loop._spending import budget_left
from evergrad.loop._unit_costs import deployed_suite, unit_costs, version_index
from evergrad.loop.config import RunConfig
from evergrad.loop.report import write_report
from evergrad.registry import Registry

PAGE_SHARE = 0.05
"""Of a run's time, at most, that goes into drawing its page while it runs: stages of a tiny model end every few seconds."""


class Reporter:
    """Keeps the report of a running run up to date: its figures after every stage, its page as often as ``PAGE_SHARE`` allows.
    Whoever ends the run draws it once more."""

    def __init__(self) -> None:
        self._next_page = -math.inf

    def report(self, session: Session) -> None:
        """Called after every stage."""
        started = time.monotonic()
        page = started >= self._next_page
        session.clock.settle()
        _write(session.config, session.folder, session.state, session.registry, session.ledger, session.wall_s(), page=page)
        if page:
            ended = time.monotonic()
            self._next_page = ended + (ended - started) * (1 / PAGE_SHARE - 1)


def rebuild_report(config: RunConfig, folder: RunFolder) -> None:
    """Writes both report files of a run that nobody runs now, from what it saved."""
    state = folder.load_state(LoopState())
    with Registry(folder.path / "registry.sqlite") as registry, Ledger.for_reading(folder.path / "ledger.sqlite") as ledger:
        _write(config, folder, state, registry, ledger, state.wall_s)


def _write(
    config: RunConfig,
    folder: RunFolder,
    state: LoopState,
    registry: Registry,
    ledger: Ledger,
    wall_s: float,
    *,
    page: bool = True,
) -> None:
    summary = ledger.summary()
    write_report(
        folder.path,
        {
            "name": config.name,
            "model": config.model,
            "seed": config.seed,
            "wall_s": wall_s,
            "cycles": [_with_error_reduction(cycle) for cycle in state.cycles],
            "steps": [step for step in state.steps if step["kind"] == "rl"],
            "timeline": state.timeline,
            "decisions": state.decisions,
            "scores": [_without_tasks(score) for score in state.scores],
            "versions": _versions(registry),
            "cost": {
                "total_usd": summary.usd,
                "by_phase": dict(summary.by_phase),
                "by_cycle": dict(summary.by_subject),
                "entries": summary.entries,
                "coverage": summary.coverage,
            },
            "budget": {
                "usd": config.budget.usd,
                "unspent_usd": budget_left(config, None if summary.usd is None else float(summary.usd)),
            },
            **unit_costs(config, state, registry, summary),
            "serving": _serving(state, registry.resolve(PRODUCTION), deployed_suite(config, state)),
            "frontier": _frontier(config, state),
            "index": version_index(config, state, registry.resolve(PRODUCTION)),
        },
        page=page,
    )


def _serving(state: LoopState, served: str | None, suite: str) -> dict[str, Any] | None:
    """What production scores on the deployed suite: by its evaluation, or by its last traffic while there is none."""
    if served is None:
        return None
    live = [row for row in state.scores if (row["version_id"], row["suite"]) == (served, suite) and "suite_hash" not in row]
    evaluated = row_of(state, served, suite)
    row = evaluated or (live[-1] if live else None)
    if row is None:
        return None
    return {"version_id": served, "suite": suite, "score": row["mean"], "n": row["n"], "live": evaluated is None}


def _frontier(config: RunConfig, state: LoopState) -> list[dict[str, Any]]:
    """Score against cost per success of all versions measured on the whole deployed suite, and who is dominated by whom."""
    suite = deployed_suite(config, state)
    names = dict.fromkeys(row["version_id"] for row in state.scores if row["suite"] == suite and "suite_hash" in row)
    found = (row_of(state, name, suite) for name in names)
    rows = [row for row in found if row is not None and GIVEN_UP not in row["outcomes"]]
    placed = pareto_front(Point(row["version_id"], row["mean"], row["usd_per_success"]) for row in rows)
    return [
        {
            "version_id": each.point.name,
            "suite": suite,
            "score": each.point.score,
            "usd_per_success": each.point.usd_per_success,
            "on_front": each.on_front,
            "dominated_by": list(each.dominated_by),
        }
        for each in placed
    ]


def _with_error_reduction(cycle: dict[str, Any]) -> dict[str, Any]:
    return {**cycle, "error_reduction": error_reduction(cycle["score_before"], cycle["score_after"])}


def _versions(registry: Registry) -> list[dict[str, Any]]:
    serving = {version_id: alias for alias, version_id in registry.aliases().items()}
    return [
        {
            "version_id": version.version_id,
            "parent_id": version.parent_id,
            "merged_id": version.merged_id,
            "policy_version": version.policy_version,
            "created_at": version.created_at,
            "system_prompt": version.system_prompt,
            "aliases": [serving[version.version_id]] if version.version_id in serving else [],
        }
        for version in registry.list()
    ]


def _without_tasks(score: dict[str, Any]) -> dict[str, Any]:
    """A score as people read it; the figures per task stay in the state and in ``evals/``."""
    return {key: value for key, value in score.items() if key not in PER_TASK}
