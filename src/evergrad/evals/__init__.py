"""Measures a version on held-out tasks and rules on promotion."""

from evergrad.evals.evaluation import EvalError, Run, evaluate, report_from_json, report_hash, suite_hash
from evergrad.evals.ruling import Costs, GateConfig, gate
from evergrad.evals.statistics import (
    PairedDifference,
    cost_per_success_ratio,
    mcnemar_p,
    mean_interval,
    non_inferiority_p,
    paired_difference,
    pass_at_k,
    sign_flip_p,
    t_quantile,
    wilson_interval,
)

__all__ = [
    "Costs",
    "EvalError",
    "GateConfig",
    "PairedDifference",
    "Run",
    "cost_per_success_ratio",
    "evaluate",
    "gate",
    "mcnemar_p",
    "mean_interval",
    "non_inferiority_p",
    "paired_difference",
    "pass_at_k",
    "report_from_json",
    "report_hash",
    "sign_flip_p",
    "suite_hash",
    "t_quantile",
    "wilson_interval",
]
