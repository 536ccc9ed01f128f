"""Unit costs with and without learning in them, and the index over suites, from what a run has on record."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from evergrad.ledger import CostSummary
from evergrad.loop._folder import LoopState
from evergrad.loop._unit_costs import unit_costs, version_index
from evergrad.loop.config import RunConfig
from evergrad.registry import Registry
from evergrad.types import ModelVersion

# The candidate of the worked example: 70 of 100 attempts succeed at $0.03 each, 0.03 million tokens each; $500 of training.
N, SUCCESSES, USD, TOKENS = 100, 70, 0.03, 30_000
SUITE = "letters@v1"
LETTERS = Path(__file__).parents[2] / "examples" / "letters.py"


def row(version: str, suite: str = SUITE, successes: int = SUCCESSES, n: int = N) -> dict[str, Any]:
    scores = [1.0] * successes + [0.0] * (n - successes)
    return {
        "label": f"{version} on {suite}", "suite": suite, "suite_hash": "h", "version_id": version,
        "mean": successes / n, "n": n,
        "task_ids": [str(index) for index in range(n)], "task_scores": scores, "task_usd": [USD] * n, "tokens": TOKENS * n,
    }  # fmt: skip


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry.sqlite") as registry:
        registry.register(ModelVersion("new", None, 1, "versions/new", "tiny", "re", "", {"suite": SUITE}))
        registry.promote("production", "new", bootstrap=True)
        yield registry


def config_of(**config: Any) -> RunConfig:
    environment = {"name": str(LETTERS), "settings": {"contract": "v1"}}
    return RunConfig.model_validate({"environment": environment, **config})


def state_of(*rows: dict[str, Any]) -> LoopState:
    return LoopState(deployed={"contract": "v1"}, scores=list(rows))


def spent(usd: str | None, **by_phase: str) -> CostSummary:
    known = {phase: Decimal(amount) for phase, amount in by_phase.items()}
    return CostSummary(None if usd is None else Decimal(usd), Decimal(0), 1.0, (), 1, known)


def test_the_worked_example_all_in(registry: Registry) -> None:
    config = config_of(worth={"usd_per_success": 0.10, "attempts": 100_000})
    found = unit_costs(config, state_of(row("new")), registry, spent("507", serve="6", shadow="1", train="500"))
    assert float(found["usd_per_success"]) == pytest.approx(0.03 / 0.7)
    assert float(found["usd_per_million_tokens"]) == pytest.approx(1.0)
    whole = found["all_in"]
    assert (whole["learning_usd"], whole["attempts"], whole["basis"]) == (500, 100_000, "worth")
    assert float(whole["usd_per_success"]) == pytest.approx(0.05)
    assert float(whole["usd_per_million_tokens"]) == pytest.approx(1.166667, abs=1e-6)
    assert whole["intelligence_per_dollar"]["value"] == pytest.approx(20.0)
    low, high = whole["intelligence_per_dollar"]["ci95"]
    assert low < 20 < high


def test_without_a_worth_learning_is_spread_over_what_was_served(registry: Registry) -> None:
    live = {"label": "live, cycle 1", "suite": SUITE, "version_id": "new", "mean": 0.5, "n": 24}
    found = unit_costs(config_of(), state_of(row("new"), live, {**live, "n": 26}), registry, spent("500"))
    assert (found["all_in"]["attempts"], found["all_in"]["basis"]) == (50.0, "served")
    assert unit_costs(config_of(), state_of(row("new")), registry, spent("500"))["all_in"] is None, "nothing served yet"


def test_an_unpriced_run_knows_no_cost_all_in(registry: Registry) -> None:
    config = config_of(worth={"usd_per_success": 0.10, "attempts": 10})
    whole = unit_costs(config, state_of(row("new")), registry, spent(None))["all_in"]
    assert (whole["usd_per_success"], whole["usd_per_million_tokens"], whole["learning_usd"]) == (None, None, None)
    assert whole["intelligence_per_dollar"]["value"] is None


def test_without_a_success_a_bound_stands_in(registry: Registry) -> None:
    found = unit_costs(config_of(), state_of(row("new", successes=0)), registry, spent("500"))
    assert found["usd_per_success"] is None
    assert float(found["usd_per_success_at_least"]) == pytest.approx(0.03 * N / 3)
    assert found["intelligence_per_dollar"]["value"] == 0


def test_nothing_measured_is_unknown(registry: Registry) -> None:
    found = unit_costs(config_of(), state_of(), registry, spent("500"))
    assert found["all_in"] is found["usd_per_success"] is found["usd_per_million_tokens"] is None


def test_the_index_leaves_out_what_the_served_version_has_saturated() -> None:
    state = state_of(row("new", successes=99), row("new", "other@v1", 60), row("old", successes=50), row("old", "other@v1", 20))
    index = version_index(config_of(), state, "new")
    assert (index["suites"], index["retired"]) == (("other@v1",), (SUITE,))
    assert index["values"] == {"new": pytest.approx(0.6), "old": pytest.approx(0.2)}
    by_chance = version_index(config_of(eval={"chance": 0.2}), state, None)
    assert by_chance["retired"] == ()
    assert by_chance["values"]["old"] == pytest.approx(((0.5 - 0.2) / 0.8 + 0.0) / 2)
