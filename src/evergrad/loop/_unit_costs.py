"""What the version that serves costs per token and per success, with and without the cost of learning; the suites' index."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from evergrad.envs import Taskset
from evergrad.evals import is_saturated
from evergrad.ledger import (
    CostSummary,
    Suite,
    cost_per_million_tokens,
    cost_per_success,
    intelligence_per_dollar,
    suite_index,
)
from evergrad.loop._folder import LoopState
from evergrad.loop._scores import row_of, speaking_row
from evergrad.loop._serving import PRODUCTION
from evergrad.loop.config import RunConfig
from evergrad.registry import Registry

_SERVING_PHASES = ("serve", "shadow")


def deployed_suite(config: RunConfig, state: LoopState) -> str:
    return Taskset(config.environment.name, state.deployed).suite


def unit_costs(config: RunConfig, state: LoopState, registry: Registry, spent: CostSummary) -> dict[str, Any]:
    """Running cost of the served version, from its evaluation on what it serves; and the same with the cost of learning in it.

    Definitions: cost per million tokens and per success count failures in the numerator; intelligence per dollar is mean score
    over mean cost of an attempt, with the interval of a ratio of paired means.
    """
    served = registry.resolve(PRODUCTION)
    row = None
    if served is not None:
        row = speaking_row(state, registry.get(served), deployed_suite(config, state))
    if row is None or not row["task_usd"]:
        return {**_figures(None, 0, [], None), "all_in": None}
    learning, attempts, basis = _learning_cost(config, state, registry, spent)
    all_in = None
    if attempts:
        each = None if learning is None else learning / Decimal(attempts)
        made = _figures(row, row["tokens"], row["task_usd"], each)
        all_in = {**made, "learning_usd": learning, "attempts": attempts, "basis": basis}
    return {
        **_figures(row, row["tokens"], row["task_usd"], Decimal(0)),
        "all_in": all_in,
        "priced_on": {"version_id": row["version_id"], "suite": row["suite"], "n": row["n"]},
    }


def _figures(row: dict[str, Any] | None, tokens: int, task_usd: Sequence[float], learning: Decimal | None) -> dict[str, Any]:
    """The unit costs of a row of scores, with ``learning`` dollars added to each attempt; all ``None`` when that is unknown."""
    if row is None or learning is None:
        unknown = {"value": None, "ci95": None}
        names = ("usd_per_million_tokens", "usd_per_success", "usd_per_success_at_least")
        return {**dict.fromkeys(names), "intelligence_per_dollar": unknown}
    scores, attempts = row["task_scores"], len(row["task_scores"])
    usd = Decimal(repr(sum(task_usd)))
    successes = sum(score >= 1.0 for score in scores)
    per_token = learning * attempts / tokens if tokens else Decimal(0)
    success = cost_per_success(usd + learning * attempts, successes=successes, attempts=attempts)
    worth = intelligence_per_dollar(scores, [cost + float(learning) for cost in task_usd])
    return {
        "usd_per_million_tokens": cost_per_million_tokens(usd, tokens=tokens, amortized_usd_per_token=per_token),
        "usd_per_success": success.value,
        "usd_per_success_at_least": success.lower_bound,
        "intelligence_per_dollar": {"value": worth.value, "ci95": worth.ci95},
    }


def _learning_cost(
    config: RunConfig, state: LoopState, registry: Registry, spent: CostSummary
) -> tuple[Decimal | None, float, str]:
    """Dollars of all that was not serving, the attempts that they are spread over, and whose word those are.

    Refused candidates are in it: a loop pays for the tries that fail, too.
    """
    serving = sum((spent.by_phase.get(phase) or Decimal(0) for phase in _SERVING_PHASES), Decimal(0))
    learning = None if spent.usd is None else spent.usd - serving
    if config.worth is not None:
        versions = {move.version_id for move in registry.history(PRODUCTION)}
        return learning, config.worth.attempts * len(versions), "worth"
    live = sum(row["n"] for row in state.scores if "suite_hash" not in row)
    return learning, float(live), "served"


def version_index(config: RunConfig, state: LoopState, served: str | None) -> dict[str, Any]:
    """The index over every suite that was measured: normalized, equally weighted, without those that are saturated."""
    measured = [row for row in state.scores if "suite_hash" in row]
    names, versions = (dict.fromkeys(row[key] for row in measured) for key in ("suite", "version_id"))
    scores: dict[str, dict[str, float]] = {version: {} for version in versions}
    for version in versions:
        for suite in names:
            row = row_of(state, version, suite)
            if row is not None and row["mean"] is not None:
                scores[version][suite] = row["mean"]
    told = {name: row_of(state, served, name) for name in names} if served is not None else {}
    retired = [name for name, row in told.items() if row is not None and is_saturated(row["mean"], row["n"])]
    suites = [Suite(name, chance=config.eval.chance) for name in names]
    return dataclasses.asdict(suite_index(suites, scores, retired))
