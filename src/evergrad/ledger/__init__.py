"""Prices what a run uses; computes cost per token and intelligence per dollar."""

from evergrad.ledger.clock import CPU_RESOURCE, IDLE, PhaseClock, Span
from evergrad.ledger.focus import focus_csv
from evergrad.ledger.forecast import FEWEST_STEPS, Curve, Estimate, Forecast, fit_forecast
from evergrad.ledger.frontier import Placed, Point, pareto_front
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
from evergrad.ledger.prices import LedgerError, Price, PriceBook
from evergrad.ledger.spending import NextDollar, next_dollar, worthwhile_until
from evergrad.ledger.store import UNATTRIBUTED, Conservation, CostSummary, Ledger, cost_summary, reprice

__all__ = [
    "CPU_RESOURCE",
    "FEWEST_STEPS",
    "IDLE",
    "UNATTRIBUTED",
    "Arm",
    "Comparison",
    "Conservation",
    "CostPerSuccess",
    "CostSummary",
    "Curve",
    "Estimate",
    "Forecast",
    "IntelligencePerDollar",
    "Ledger",
    "LedgerError",
    "MarginalIntelligence",
    "NextDollar",
    "Payback",
    "PhaseClock",
    "Placed",
    "Point",
    "Price",
    "PriceBook",
    "Span",
    "compare_intelligence",
    "cost_per_million_tokens",
    "cost_per_success",
    "cost_summary",
    "fit_forecast",
    "focus_csv",
    "intelligence_per_dollar",
    "marginal_intelligence",
    "next_dollar",
    "pareto_front",
    "payback",
    "reprice",
    "worthwhile_until",
]
