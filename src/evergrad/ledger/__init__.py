"""Prices what a run uses; computes cost per token and intelligence per dollar."""

from evergrad.ledger.arms import NOTHING, ArmValue, Choice, Try, choose_arm
from evergrad.ledger.clock import CPU_RESOURCE, IDLE, PhaseClock, Span
from evergrad.ledger.energy import CPU_ENERGY, GPU_ENERGY, EnergyMeter
from evergrad.ledger.focus import focus_csv
from evergrad.ledger.forecast import FEWEST_STEPS, Curve, Estimate, Forecast, fit_forecast
from evergrad.ledger.frontier import Placed, Point, pareto_front
from evergrad.ledger.invoice import Reconciliation, reconcile
from evergrad.ledger.metrics import (
    Arm,
    Comparison,
    CostPerSuccess,
    IntelligencePerDollar,
    MarginalIntelligence,
    Payback,
    compare_intelligence,
    cost_per_million_tokens,
    cost_per_success,
    intelligence_per_dollar,
    marginal_intelligence,
    payback,
)
from evergrad.ledger.others import OtherModel, OtherModels
from evergrad.ledger.prices import LedgerError, Price, PriceBook, View
from evergrad.ledger.spending import NextDollar, next_dollar, worthwhile_until
from evergrad.ledger.store import UNATTRIBUTED, Conservation, CostSummary, Ledger, cost_summary, in_view, reprice
from evergrad.ledger.suites import Suite, SuiteIndex, suite_index

__all__ = [
    "CPU_ENERGY",
    "CPU_RESOURCE",
    "FEWEST_STEPS",
    "GPU_ENERGY",
    "IDLE",
    "NOTHING",
    "UNATTRIBUTED",
    "Arm",
    "ArmValue",
    "Choice",
    "Comparison",
    "Conservation",
    "CostPerSuccess",
    "CostSummary",
    "Curve",
    "EnergyMeter",
    "Estimate",
    "Forecast",
    "IntelligencePerDollar",
    "Ledger",
    "LedgerError",
    "MarginalIntelligence",
    "NextDollar",
    "OtherModel",
    "OtherModels",
    "Payback",
    "PhaseClock",
    "Placed",
    "Point",
    "Price",
    "PriceBook",
    "Reconciliation",
    "Span",
    "Suite",
    "SuiteIndex",
    "Try",
    "View",
    "choose_arm",
    "compare_intelligence",
    "cost_per_million_tokens",
    "cost_per_success",
    "cost_summary",
    "fit_forecast",
    "focus_csv",
    "in_view",
    "intelligence_per_dollar",
    "marginal_intelligence",
    "next_dollar",
    "pareto_front",
    "payback",
    "reconcile",
    "reprice",
    "suite_index",
    "worthwhile_until",
]
