"""The guard on latency, and gate tasks among what a candidate was trained on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evergrad.evals import GateConfig, Latencies, announce, gate, latency_ratio, plan_from_json
from evergrad.types import plain
from tests.evals.test_gate import SUITE, pair, refused

LIMIT = GateConfig(max_latency_increase=0.2)


def seconds(factor: float, n: int = 400) -> dict[str, float]:
    return {f"t{i}": factor * (1 + i % 7) for i in range(n)}


def test_how_long_a_try_takes_can_be_limited() -> None:
    candidate, incumbent = pair(70, 30, 400)
    quick = gate(candidate, incumbent, LIMIT, latencies=Latencies(seconds(1.1), seconds(1.0)))
    assert quick.promote
    assert quick.evidence["latency"] == {
        "ratio": pytest.approx(1.1),
        "upper_bound": pytest.approx(1.1),
        "limit": pytest.approx(1.2),
        "n": 400,
    }
    slow = Latencies(seconds(1.3), seconds(1.0))
    refused(gate(candidate, incumbent, LIMIT, latencies=slow), "a try takes 1.300 times the incumbent's seconds")
    refused(gate(candidate, incumbent, LIMIT), "a limit on latency is set, but no seconds are given")
    for odd in ({}, {**seconds(1.0), "t3": 0.0}, {**seconds(1.0), "t3": math.nan}):
        refused(gate(candidate, incumbent, LIMIT, latencies=Latencies(odd, seconds(1.0))), "have no seconds")
    assert gate(candidate, incumbent, latencies=slow).promote, "no limit, no ruling"


def test_a_few_tries_that_had_to_wait_do_not_rule() -> None:
    candidate, incumbent = pair(70, 30, 400)
    waited = {**seconds(1.0), "t0": 500.0, "t1": 500.0}
    assert gate(candidate, incumbent, LIMIT, latencies=Latencies(waited, seconds(1.0))).promote


def test_a_candidate_just_at_the_limit_passes_as_often_as_alpha_says() -> None:
    rng, passed = np.random.default_rng(5), 0
    for _ in range(600):
        before = np.exp(rng.normal(size=96))
        after = before * 1.2 * np.exp(rng.normal(scale=0.5, size=96))
        columns = [{str(i): float(value) for i, value in enumerate(column)} for column in (after, before)]
        passed += latency_ratio(columns[0], columns[1], 0.05)[1] < 1.2
    assert 0.02 < passed / 600 < 0.085, "5%, give or take three standard errors and the normal approximation"


def test_a_gate_task_among_what_was_trained_on_refuses() -> None:
    candidate, incumbent = pair(70, 30, 400)
    suites = {SUITE: "suite-hash"}
    clean = {"trained_on": 12, "gate_tasks": 400, "overlaps": {}}
    plan = announce("new", "old", suites, SUITE, GateConfig(), contamination=clean)
    verdict = gate(candidate, incumbent, plan=plan)
    assert verdict.promote
    assert verdict.evidence["contamination"] == clean
    assert "none of 400 gate tasks is among the 12 live tasks" in "\n".join(verdict.reasons)
    found = {**clean, "overlaps": {"t7": "near"}}
    dirty = announce("new", "old", suites, SUITE, GateConfig(), contamination=found)
    refused(gate(candidate, incumbent, plan=dirty), "1 of 400 gate tasks are among the 12 live tasks")
    assert dirty.hash != plan.hash
    assert plan_from_json(plain(dirty)).hash == dirty.hash


def test_a_run_without_live_traffic_or_limit_has_the_plan_that_it_always_had() -> None:
    plan = announce("new", "old", {SUITE: "suite-hash"}, SUITE, GateConfig())
    assert "max_latency_increase" not in plan.gate
    assert "max_latency_increase" in announce("new", "old", {SUITE: "x"}, SUITE, LIMIT).gate
    before = plan_from_json({key: value for key, value in plain(plan).items() if key != "contamination"})
    assert before.hash == plan.hash
