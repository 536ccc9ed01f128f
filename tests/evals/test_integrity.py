"""Gold audits: the powered mean against closed forms and simulation, the alarm's promise, and the gate's refusals by them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.evals import (
    AuditConfig,
    EvalError,
    GateConfig,
    announce,
    audited_tasks,
    gate,
    is_audited,
    overstatement,
    plan_from_json,
    powered_mean,
    report_from_json,
    report_hash,
)
from evergrad.types import EvalReport, plain

AUDIT = AuditConfig(share=0.5, min_n=30)
SCORES = st.sampled_from([0.0, 0.25, 1.0])


@given(st.lists(st.tuples(SCORES, SCORES), min_size=2, max_size=40))
def test_with_all_tries_audited_it_is_the_mean_of_gold(pairs: list[tuple[float, float]]) -> None:
    rewards = {str(i): reward for i, (reward, _) in enumerate(pairs)}
    gold = {str(i): each for i, (_, each) in enumerate(pairs)}
    found = powered_mean(rewards, gold)
    assert found.value == pytest.approx(fmean(gold.values()), abs=1e-12)
    assert found.se == pytest.approx(math.sqrt(variance(gold.values()) / len(pairs)), abs=1e-12)


@given(st.lists(SCORES, min_size=4, max_size=40), st.integers(2, 4))
def test_a_verifier_that_gold_confirms_costs_no_precision(rewards: list[float], audited: int) -> None:
    by_task = {str(i): reward for i, reward in enumerate(rewards)}
    gold = {str(i): rewards[i] for i in range(audited)}
    found = powered_mean(by_task, gold)
    assert found.value == pytest.approx(fmean(rewards))
    assert found.se == pytest.approx(math.sqrt(variance(gold.values()) / len(rewards)))


def test_its_interval_covers_the_truth_where_the_verifier_is_wrong() -> None:
    """A verifier that passes a third of the failures: plain rewards say 0.67, gold is 0.5, and the interval knows it."""
    rng, covered, trials = Random(0), 0, 1000
    for _ in range(trials):
        gold = [float(rng.random() < 0.5) for _ in range(96)]
        rewards = [1.0 if each or rng.random() < 1 / 3 else 0.0 for each in gold]
        audited = rng.sample(range(96), 48)
        found = powered_mean({str(i): r for i, r in enumerate(rewards)}, {str(i): gold[i] for i in audited})
        covered += found.ci95[0] <= 0.5 <= found.ci95[1]
    assert 0.93 <= covered / trials <= 0.97


def test_the_alarm_keeps_its_promise_and_finds_a_verifier_that_can_be_fooled() -> None:
    rng, trials = Random(1), 400
    false, found = 0, 0
    for _ in range(trials):
        # At the edge of the tolerance: of what gold refuses the verifier passes so much that the mean is off by 0.05.
        honest = [(1.0, 1.0) if rng.random() < 0.5 else (float(rng.random() < 0.1), 0.0) for _ in range(400)]
        false += overstatement(honest, AUDIT).alarm
        fooled = [(1.0, float(rng.random() < 0.5)) for _ in range(48)]
        found += overstatement(fooled, AUDIT).alarm
    assert false / trials <= AUDIT.alpha
    assert found / trials >= 0.95


def test_rewards_beyond_the_scale_of_gold_cannot_be_audited() -> None:
    with pytest.raises(EvalError, match="cannot be audited"):
        overstatement([(2.0, 1.0)], AUDIT)
    with pytest.raises(EvalError, match="audit two at least"):
        powered_mean({"a": 1.0}, {"a": 1.0})


def test_who_is_audited_depends_on_the_id_alone() -> None:
    ids = [f"queues/{i:04x}" for i in range(4000)]
    assert audited_tasks(ids, 0.25) == audited_tasks(reversed(ids), 0.25)
    assert len(audited_tasks(ids[:97], 0.5)) == 49
    share = sum(is_audited(each, 0.05) for each in ids) / len(ids)
    assert 0.04 < share < 0.06


def report(version: str, scores: list[float], gold: list[float]) -> EvalReport:
    ids = [f"t{i}" for i in range(len(scores))]
    chosen = audited_tasks(ids, AUDIT.share)
    return EvalReport(
        version,
        "q@v1",
        dict(zip(ids, scores, strict=True)),
        "hash",
        gold={t: g for t, g in zip(ids, gold, strict=True) if t in chosen},
    )


FAILING = report("old", [0.0] * 96, [0.0] * 96)
GATE = GateConfig(series="fixed")


def test_a_gain_that_gold_confirms_is_promoted_and_says_so() -> None:
    ruled = gate({"q@v1": report("new", [1.0] * 96, [1.0] * 96)}, {"q@v1": FAILING}, GATE, audit=AUDIT)
    assert ruled.promote
    assert ruled.evidence["integrity"]["gain_by_gold"] == 1.0
    assert any("gold agrees" in each for each in ruled.reasons)


def test_a_shortcut_that_only_the_verifier_likes_is_refused() -> None:
    shortcut = report("new", [1.0] * 96, [float(i % 4 == 0) for i in range(96)])
    ruled = gate({"q@v1": shortcut}, {"q@v1": FAILING}, GATE, audit=AUDIT)
    assert not ruled.promote
    assert any("the verifier overstates the candidate" in each for each in ruled.reasons)
    assert ruled.evidence["integrity"]["alarm"]
    # A promotion that gold did not confirm is no promotion of the series either.
    assert gate({"q@v1": shortcut}, {"q@v1": FAILING}, GATE).promote


def test_a_gain_that_gold_does_not_see_is_refused_without_an_alarm() -> None:
    gold = [float(i < 10) for i in range(96)]
    before, after = [float(i < 10) for i in range(96)], [float(i < 20) for i in range(96)]
    ruled = gate({"q@v1": report("new", after, gold)}, {"q@v1": report("old", before, gold)}, GATE, audit=AUDIT)
    assert not ruled.promote
    assert not ruled.evidence["integrity"]["alarm"]
    assert any("by gold no gain is shown" in each for each in ruled.reasons)


@pytest.mark.parametrize("missing", ["candidate", "incumbent", "both"])
def test_an_audit_that_was_not_made_promotes_nothing(missing: str) -> None:
    good = report("new", [1.0] * 96, [1.0] * 96)
    after = good if missing == "incumbent" else replace(good, gold={})
    before = FAILING if missing == "candidate" else replace(FAILING, gold={})
    ruled = gate({"q@v1": after}, {"q@v1": before}, GATE, audit=AUDIT)
    assert not ruled.promote
    assert any("0 pairs were audited by gold, preset are at least 30" in each for each in ruled.reasons)


def test_the_audit_is_announced_and_cannot_be_softened_afterwards() -> None:
    good = {"q@v1": report("new", [1.0] * 96, [1.0] * 96)}
    plan = announce("new", "old", {"q@v1": "hash"}, "q@v1", GATE, audit=AUDIT)
    assert plan_from_json(plain(plan)).hash == plan.hash != announce("new", "old", {"q@v1": "hash"}, "q@v1", GATE).hash
    assert gate(good, {"q@v1": FAILING}, GATE, plan=plan, audit=AUDIT).promote
    for softer in (None, AuditConfig(share=0.5, min_n=30, tolerance=0.5)):
        ruled = gate(good, {"q@v1": FAILING}, GATE, plan=plan, audit=softer)
        assert any("departs from the plan: audit" in each for each in ruled.reasons)


def test_reports_without_an_audit_keep_their_names() -> None:
    bare = replace(FAILING, gold={})
    before_audits = {key: value for key, value in plain(bare).items() if key != "gold"}
    from evergrad.evals import content_hash

    assert report_hash(bare) == content_hash(before_audits)
    assert report_hash(FAILING) != report_hash(bare)
    assert report_from_json(plain(FAILING)) == FAILING
