"""What evidence promotes: the gate's thresholds, fixed before any evidence is seen."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from evergrad.config import Config
from evergrad.evals.series import Rule


class GateConfig(Config):
    """What evidence promotes; fixed before the evidence is seen."""

    alpha: float = Field(default=0.05, gt=0, lt=1)
    """What ``series`` bounds (by default the share of promotions that are false); also the level of each guard (one-sided)."""
    series: Rule = "saffron"
    """How ``alpha`` is spread over the candidates of a run: ``saffron`` or ``lord`` bound the share of false promotions,
    ``e_lond`` does so whatever the dependence of the tries, ``alpha_spending`` bounds the chance that even one is false, and
    ``fixed`` gives each try the whole of it."""
    min_n: int = Field(default=96, ge=1)
    """Pairs that a suite must have at least."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Smallest gain in mean score that promotes; any gain by default."""
    min_saving: float = Field(default=0.0, ge=0, lt=1)
    """Share of the cost per success that a candidate on a smaller base model must be shown to save; any saving by default."""
    guards: dict[str, float] = Field(default_factory=dict)
    """Suite to margin: how much worse, in mean score, the candidate must be shown not to be."""
    guard_margin: float | None = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Margin of the suites that ``guards`` does not name; ``None`` leaves those unguarded."""
    max_missing_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of a suite's tasks that may lack a score, under either version."""
    max_cost_increase: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How much dearer a success may become: 0.1 allows ten percent. ``None`` asks for no cost at all.

    A cost is the time of the machine: where others use it too, or a suite takes but seconds, it is as uneven as that time.
    """
    max_latency_increase: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How much longer a try may take: 0.1 allows ten percent, in the geometric mean over tasks that both versions tried, with
    confidence 1 − alpha. ``None`` asks for no seconds. They are as uneven as the machine, as costs are."""
    seed: int = 0
    """Of the sign flips and the bootstrap."""

    def as_planned(self) -> dict[str, Any]:
        """As plans and verdicts hold it. A limit that is not set is left out where it came later than they did, so that those
        on record keep their names."""
        unset = {"max_latency_increase": None, "min_saving": 0.0}
        settings = self.model_dump(mode="json")
        return {key: value for key, value in settings.items() if key not in unset or value != unset[key]}
