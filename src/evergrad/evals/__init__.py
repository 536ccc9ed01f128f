"""Measures a version on held-out tasks and rules on promotion."""

from evergrad.evals.canary import CanaryConfig, CanaryRuling, CanaryStep, HarmTest, rule_on_canary
from evergrad.evals.evaluation import (
    GIVEN_UP,
    EvalError,
    GiveUp,
    Run,
    content_hash,
    evaluate,
    report_from_json,
    report_hash,
    suite_hash,
)
from evergrad.evals.plan import Plan, announce, plan_from_json, uses_of
from evergrad.evals.ruling import Costs, gate
from evergrad.evals.sequential import Bettor, betting_e_process, give_up_on, mixture_e_value
from evergrad.evals.series import Rule, Trial, next_level, trials_of
from evergrad.evals.settings import GateConfig
from evergrad.evals.statistics import (
    PairedDifference,
    cost_per_success_ratio,
    gain_interval,
    mcnemar_p,
    mean_interval,
    non_inferiority_p,
    paired_difference,
    pass_at_k,
    sample_size,
    sign_flip_p,
    t_quantile,
    wilson_interval,
)

__all__ = [
    "GIVEN_UP",
    "Bettor",
    "CanaryConfig",
    "CanaryRuling",
    "CanaryStep",
    "Costs",
    "EvalError",
    "GateConfig",
    "GiveUp",
    "HarmTest",
    "PairedDifference",
    "Plan",
    "Rule",
    "Run",
    "Trial",
    "announce",
    "betting_e_process",
    "content_hash",
    "cost_per_success_ratio",
    "evaluate",
    "gain_interval",
    "gate",
    "give_up_on",
    "mcnemar_p",
    "mean_interval",
    "mixture_e_value",
    "next_level",
    "non_inferiority_p",
    "paired_difference",
    "pass_at_k",
    "plan_from_json",
    "report_from_json",
    "report_hash",
    "rule_on_canary",
    "sample_size",
    "sign_flip_p",
    "suite_hash",
    "t_quantile",
    "trials_of",
    "uses_of",
    "wilson_interval",
]
