"""Rows of scores: what each version scored on each suite, and which of its rows speaks for it now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evergrad.evals import mean_interval, t_quantile
from evergrad.loop._folder import LoopState
from evergrad.types import EvalReport, ModelVersion, Rollout

PER_TASK = ("task_ids", "task_scores", "task_usd", "task_seconds")
"""Keys that stay in the state: too long for people, needed for prices."""


FEWEST_GROUPS = 4
"""Groups from which on a step's reward has an interval: that of fewer can reach beyond all that a reward may be."""


def reward_interval(groups: int, standard_error: float) -> float:
    """Half the width of the 95% interval of a step's mean reward, whose standard error is over groups; NaN for too few.

    >>> round(reward_interval(8, 0.1), 3), reward_interval(2, 0.375)
    (0.236, nan)
    """
    return t_quantile(groups - 1) * standard_error if groups >= FEWEST_GROUPS else math.nan


def score_row(report: EvalReport, rollouts: Sequence[Rollout], usd: float | None, seconds: float) -> dict[str, Any]:
    """One evaluation as a row. ``tokens`` were delivered; ``usd`` is shared out by those computed, which took the time."""
    scores = list(report.scores.values())
    successes = sum(score >= 1.0 for score in scores)
    judged = {each.task_id: each.usage for each in rollouts if each.task_id in report.scores and each.outcome.trainable}
    computed = {task: use.prompt_tokens - use.cached_tokens + use.completion_tokens for task, use in judged.items()}
    total = sum(computed.values())
    return {
        "label": f"{report.version_id} on {report.suite}",
        "suite": report.suite,
        "suite_hash": report.suite_hash,
        "version_id": report.version_id,
        "mean": report.mean,
        "ci95": mean_interval(scores),
        "success_rate": successes / len(scores),
        "n": len(scores),
        "slices": report.slice_means(),
        "usd": usd,
        "seconds": round(seconds, 1),
        "usd_per_success": usd / successes if successes and usd is not None else None,
        "tokens": sum(use.prompt_tokens + use.completion_tokens for use in judged.values()),
        "task_ids": list(computed),
        "task_scores": [report.scores[task_id] for task_id in computed],
        "task_usd": [usd * own / max(1, total) for own in computed.values()] if usd is not None else None,
        "task_seconds": [use.seconds for use in judged.values()],
        "outcomes": dict(report.outcomes),
    }


def live_row(cycle: int, check: int, suite: str, version_id: str, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Live traffic as a row; it has no ``suite_hash``, for no two checks see the same tasks."""
    rewards = [float(each.reward or 0.0) for each in rollouts if each.outcome.trainable]
    label = f"live, cycle {cycle}" + (f", check {check + 1}" if check else "")
    return _traffic_row(label, cycle, check, suite, version_id, rewards)


def customers_row(cycle: int, suite: str, version_id: str, scores: Sequence[float]) -> dict[str, Any]:
    """All stored conversations with a version on a suite as one row, of no single check; it replaces the one before."""
    return _traffic_row(f"live, customers of {version_id} on {suite}", cycle, None, suite, version_id, scores)


def _traffic_row(
    label: str, cycle: int, check: int | None, suite: str, version_id: str, rewards: Sequence[float]
) -> dict[str, Any]:
    n = len(rewards)
    return {
        "label": label,
        "cycle": cycle,
        "check": check,
        "suite": suite,
        "version_id": version_id,
        "mean": math.fsum(rewards) / n if n else None,
        "ci95": mean_interval(rewards),
        "success_rate": sum(reward >= 1.0 for reward in rewards) / n if n else None,
        "n": n,
    }


def p_of_so_few(successes: int, requests: int, expected: float, n_gate: int) -> float:
    """Chance of so few live successes at the success rate that ``n_gate`` tasks of the gate gave (exact, one-sided)."""
    from scipy.stats import binomtest

    # A perfect score on n tasks does not mean that failure is impossible: the rule of three bounds it.
    rate = min(expected, 1 - 3 / max(n_gate, 4))
    return float(binomtest(successes, requests, rate, alternative="less").pvalue)


def keep_row(state: LoopState, row: Mapping[str, Any]) -> None:
    """Puts a row into the state, in the place of an earlier one that it repeats."""
    same = [index for index, other in enumerate(state.scores) if other["label"] == row["label"]]
    if same:
        state.scores[same[-1]] = dict(row)
    else:
        state.scores.append(dict(row))


def row_of(state: LoopState, version_id: str, suite: str) -> dict[str, Any] | None:
    """The evaluation of a version on a suite; live traffic is none."""
    rows = [row for row in state.scores if row["version_id"] == version_id and row["suite"] == suite and "suite_hash" in row]
    return rows[-1] if rows else None


def task_costs(state: LoopState, version_id: str, suite: str) -> dict[str, float]:
    """Task id to USD, of those tries of a version on a suite that have a price."""
    row = row_of(state, version_id, suite)
    return dict(zip(row["task_ids"], row["task_usd"], strict=True)) if row and row["task_usd"] else {}


def task_seconds(state: LoopState, version_id: str, suite: str) -> dict[str, float]:
    """Task id to seconds, of the tries of a version on a suite."""
    row = row_of(state, version_id, suite)
    return dict(zip(row["task_ids"], row.get("task_seconds", ()), strict=False)) if row else {}


def speaking_row(state: LoopState, version: ModelVersion, deployed: str) -> dict[str, Any] | None:
    """What ``version`` is worth in service: its row on the deployed suite, else on the suite that it was made for.

    Rows on earlier contracts are measured after it, as guards; they say nothing of the traffic that it serves.
    """
    return row_of(state, version.version_id, deployed) or row_of(
        state, version.version_id, str(version.metadata.get("suite", ""))
    )
