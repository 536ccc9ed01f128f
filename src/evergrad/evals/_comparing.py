"""What every ruling on a primary suite says: the figures of the pairs, and its place in the series."""

from __future__ import annotations

from typing import Any

from evergrad.evals._checks import Ruling
from evergrad.evals.series import trials_of
from evergrad.evals.statistics import PairedDifference, gain_interval
from evergrad.types import EvalReport


def compared(pairs: PairedDifference, before: EvalReport, after: EvalReport, seed: int) -> dict[str, Any]:
    """The figures of every paired comparison in a verdict's evidence."""
    interval, ci95 = gain_interval(pairs, seed=seed)
    return {
        "n": pairs.n,
        "clusters": len(pairs.cluster_sums),
        "wins": pairs.wins,
        "losses": pairs.losses,
        "score_before": mean_score(before),
        "score_after": mean_score(after),
        "delta": pairs.delta,
        "se": pairs.se,
        "ci95": ci95,
        "interval": interval,
    }


def mean_score(report: EvalReport) -> float:
    return report.mean or 0.0


def add_trial(ruling: Ruling, level: float, p_value: float, e_value: float | None) -> None:
    """Counts the ruling among the tries of its series."""
    config, trials = ruling.config, trials_of(ruling.history)
    ruling.evidence["series"] = {
        "rule": config.series,
        "alpha": config.alpha,
        "trial": len(trials) + 1,
        "promotions_before": sum(trial.promoted for trial in trials),
        "level": level,
        "p_value": p_value,
        "e_value": e_value,
    }
