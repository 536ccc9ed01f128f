"""Prices what a run uses; computes cost per token and intelligence per dollar."""

from evergrad.ledger.clock import CPU_RESOURCE, IDLE, PhaseClock, Span
from evergrad.ledger.focus import focus_csv
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
from evergrad.ledger.store import UNATTRIBUTED, Conservation, CostSummary, Ledger, cost_summary, reprice

__all__ = [
    "CPU_RESOURCE",
    "IDLE",
    "UNATTRIBUTED",
    "Arm",
    "Comparison",
    "Conservation",
    "CostPerSuccess",
    "CostSummary",
    "IntelligencePerDollar",
    "Ledger",
    "LedgerError",
    "MarginalIntelligence",
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
    "focus_csv",
    "intelligence_per_dollar",
    "marginal_intelligence",
    "pareto_front",
    "payback",
    "reprice",
]
