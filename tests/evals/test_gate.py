"""The gate: promotes on sound evidence only, and says everything that is wrong with the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.config import ConfigError, parse_config
from evergrad.evals import (
    GIVEN_UP,
    Costs,
    GateConfig,
    Plan,
    Trial,
    announce,
    betting_e_process,
    gate,
    mcnemar_p,
    plan_from_json,
    report_from_json,
    report_hash,
    trials_of,
)
from evergrad.evals.statistics import tango_interval
from evergrad.types import EvalReport, Verdict, strict_json

SUITE, GUARD = "desk@v2/gate", "desk@v1/gate"


def report(version: str, scores: dict[str, float], suite: str = SUITE, **changes: object) -> EvalReport:
    return replace(EvalReport(version, suite, scores, "suite-hash"), **changes)  # type: ignore[arg-type]


def pair(wins: int, losses: int, n: int, suite: str = SUITE) -> tuple[dict[str, EvalReport], dict[str, EvalReport]]:
    after = {f"t{i}": float(i < wins or i >= wins + losses) for i in range(n)}
    before = {f"t{i}": float(i >= wins) for i in range(n)}
    return {suite: report("new", after, suite)}, {suite: report("old", before, suite)}


def refused(verdict: Verdict, *sentences: str) -> None:
    assert verdict.promote is False
    text = "\n".join(verdict.reasons)
    for sentence in sentences:
        assert sentence in text, text
    assert len(verdict.reasons) == len(sentences), verdict.reasons


def test_a_clear_gain_is_promoted_with_all_its_numbers() -> None:
    candidate, incumbent = pair(70, 30, 400)
    verdict = gate(candidate, incumbent)
    assert verdict.promote is True
    assert (verdict.candidate_id, verdict.incumbent_id) == ("new", "old")
    evidence = verdict.evidence
    assert (evidence["n"], evidence["wins"], evidence["losses"], evidence["test"]) == (400, 70, 30, "exact McNemar")
    assert evidence["delta"] == pytest.approx(0.1)
    assert (evidence["interval"], evidence["ci95"]) == ("Tango score", list(tango_interval(70, 30, 400)))
    assert evidence["p_value"] == pytest.approx(7.850e-5, abs=5e-9)
    assert evidence["alpha"] == 0.05
    assert evidence["reports"]["candidate"] == {SUITE: report_hash(candidate[SUITE])}
    assert evidence["reports"]["incumbent"] == {SUITE: report_hash(incumbent[SUITE])}
    assert evidence["suite_hashes"] == {SUITE: "suite-hash"}
    assert "gain +0.1000, 95% interval [0.0521, 0.1489], p = 7.85e-05 (exact McNemar)" in verdict.reasons[0]
    assert json.loads(strict_json(verdict))["evidence"] == evidence, "evidence is JSON already"


def test_reports_read_back_from_json_give_the_same_verdict() -> None:
    candidate, incumbent = pair(70, 30, 400)

    def again(reports: dict[str, EvalReport]) -> dict[str, EvalReport]:
        return {suite: report_from_json(json.loads(strict_json(each))) for suite, each in reports.items()}

    assert gate(again(candidate), again(incumbent)) == gate(candidate, incumbent)


def test_chance_ties_falls_and_small_gains_are_refused() -> None:
    refused(gate(*pair(12, 6, 100)), "one-sided p (exact McNemar) 0.119, level 0.00547 (saffron): not shown to be better")
    refused(gate(*pair(30, 30, 100)), "30 won, 30 lost of 100: tied")
    refused(gate(*pair(0, 0, 100)), "tied; the incumbent already scores 1.000: nothing to gain, it goes on serving")
    refused(gate(*pair(30, 70, 400)), "the mean score falls by 0.1000")
    refused(gate(*pair(70, 30, 400), GateConfig(min_delta=0.11)), "the gain of 0.1000 is below the preset 0.11")


def test_too_few_pairs_are_refused_however_clear() -> None:
    refused(gate(*pair(40, 0, 95)), "95 pairs with the incumbent, preset are at least 96")
    assert gate(*pair(40, 0, 96)).promote


def test_missing_evidence_is_refused() -> None:
    candidate, incumbent = pair(70, 30, 400)
    short = dict(candidate[SUITE].scores)
    gone = [short.popitem()[0] for _ in range(3)]
    partial = {SUITE: report("new", short, missing=tuple(gone))}
    refused(gate(partial, incumbent), "candidate on desk@v2/gate: 3 of 400 tasks are missing, none may be")
    refused(gate(candidate, {SUITE: report("old", short, missing=tuple(gone))}), "incumbent on desk@v2/gate: 3 of 400")
    allowed = gate(partial, incumbent, GateConfig(max_missing_share=0.01))
    assert allowed.promote
    assert allowed.evidence["n"] == 397
    assert allowed.evidence["missing"]["candidate"] == {SUITE: 3}
    refused(gate({SUITE: report("new", short)}, incumbent), "0 tasks only under the candidate, 3 only under the incumbent")
    refused(gate({SUITE: report("new", {})}, incumbent), "the report has no scores")


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, None, "1.0"])
def test_scores_that_are_no_finite_numbers_are_refused_and_shown_in_strict_json(score: object) -> None:
    for side in (0, 1):
        reports = pair(70, 30, 400)
        broken = {**reports[side][SUITE].scores, "t7": score}
        reports[side][SUITE] = replace(reports[side][SUITE], scores=broken)  # type: ignore[arg-type]
        verdict = gate(*reports)
        refused(verdict, "1 scores are not finite numbers, that of task t7 first")
        json.loads(strict_json(verdict), parse_constant=lambda name: pytest.fail(name))
        refused(gate(reports[side], None, bootstrap=True), "1 scores are not finite numbers, that of task t7 first")


def test_evidence_that_does_not_belong_together_is_refused() -> None:
    candidate, incumbent = pair(70, 30, 400)
    other = {SUITE: replace(incumbent[SUITE], suite_hash="other")}
    refused(gate(candidate, other), "measured differently (suite_hash suite-hash and other)")
    renamed = {SUITE: replace(candidate[SUITE], suite="elsewhere")}
    refused(gate(renamed, incumbent), "the report is about the suite elsewhere")
    unsaid = {SUITE: replace(candidate[SUITE], suite_hash="")}
    refused(gate(unsaid, incumbent), "does not say what it measured")
    itself = {SUITE: replace(incumbent[SUITE], version_id="new")}
    refused(gate(candidate, itself), "candidate and incumbent are the same version, new")
    mixed = {**candidate, GUARD: report("newer", dict(candidate[SUITE].scores), GUARD)}
    old = {**incumbent, GUARD: report("old", dict(candidate[SUITE].scores), GUARD)}
    refused(gate(mixed, old), "the candidate's reports are about 2 versions: new, newer")
    refused(gate({}, incumbent), "the candidate has no report that names its version", "no report on the primary suite")
    refused(gate(candidate, incumbent, primary="typo"), "the candidate has no report on the primary suite typo")
    refused(gate(candidate, {GUARD: old[GUARD]}), "the incumbent has no report on the primary suite")


def test_all_that_is_wrong_is_said_at_once() -> None:
    candidate, incumbent = pair(3, 5, 40)
    candidate[GUARD] = report("new", {"g1": 1.0}, GUARD, missing=("g2",))
    verdict = gate(candidate, incumbent, GateConfig(guards={"absent": 0.1}))
    refused(
        verdict,
        "candidate on desk@v1/gate: 1 of 2 tasks are missing",
        "40 pairs with the incumbent, preset are at least 96",
        "the mean score falls by 0.0500",
        "guard absent: no report of the candidate or of the incumbent",
        "guard desk@v1/gate: no report of the incumbent",
    )


def test_without_an_incumbent_only_a_bootstrap_passes_and_only_with_sound_reports() -> None:
    candidate, _ = pair(70, 30, 400)
    for nothing in (None, {}):
        refused(gate(candidate, nothing), "there is no report of an incumbent to compare with")
        verdict = gate(candidate, nothing, bootstrap=True)
        assert (verdict.promote, verdict.incumbent_id, verdict.evidence["bootstrap"]) == (True, None, True)
        assert verdict.reasons == ("nothing serves yet: first version, mean score 0.925 of 400 tasks on desk@v2/gate",)
    refused(gate(pair(5, 0, 20)[0], None, bootstrap=True), "20 scores, preset are at least 96")
    assert not gate(*pair(30, 70, 400), bootstrap=True).promote, "with an incumbent there is no bootstrap"


def guarded(wins: int, losses: int, n: int) -> tuple[dict[str, EvalReport], dict[str, EvalReport]]:
    (candidate, incumbent), (after, before) = pair(70, 30, 400), pair(wins, losses, n, GUARD)
    return candidate | after, incumbent | before


def test_a_guard_must_be_shown_not_to_fall() -> None:
    # The known example: 20 wins, 24 losses of 600 against a margin of two points is not shown (p = .114).
    config = GateConfig(guards={GUARD: 0.02})
    verdict = gate(*guarded(20, 24, 600), config)
    refused(verdict, "guard desk@v1/gate against the incumbent: -0.0067 of 600 pairs, margin 0.02, p = 0.114: not shown")
    (guard,) = verdict.evidence["guards"]
    assert (guard["suite"], guard["holds"], guard["n"]) == (GUARD, False, 600)
    assert guard["se"] == pytest.approx(0.01105, abs=5e-6)
    assert gate(*guarded(20, 24, 600), GateConfig(guards={GUARD: 0.03})).promote
    assert gate(*guarded(0, 0, 96)).promote, "guarded by default, and nothing lost"
    refused(gate(*guarded(0, 12, 96)), "guard desk@v1/gate against the incumbent: -0.1250 of 96 pairs, margin 0.05, p = 0.987")
    assert gate(*guarded(0, 12, 96), GateConfig(guard_margin=None)).promote, "unguarded only when asked for"
    refused(gate(*guarded(0, 0, 95)), "desk@v1/gate: 95 pairs with the incumbent, preset are at least 96")


def test_the_primary_suite_can_be_chosen() -> None:
    candidate, incumbent = guarded(0, 0, 96)
    swapped = gate({GUARD: candidate[GUARD], SUITE: candidate[SUITE]}, incumbent, primary=SUITE)
    assert swapped.promote
    assert swapped.evidence["primary"] == SUITE
    refused(gate(candidate, incumbent, primary=GUARD), "desk@v1/gate: 0 won, 0 lost of 96: tied")


def test_small_losses_add_up_against_a_frozen_anchor() -> None:
    candidate, incumbent = guarded(0, 0, 200)
    anchor = {GUARD: report("first", {f"t{i}": 1.0 for i in range(200)}, GUARD)}
    fallen = {f"t{i}": float(i >= 12) for i in range(200)}
    candidate[GUARD], incumbent[GUARD] = report("new", fallen, GUARD), report("old", fallen, GUARD)
    assert gate(candidate, incumbent).promote, "no worse than the last"
    refused(
        gate(candidate, incumbent, anchor=anchor), "guard desk@v1/gate against the anchor: -0.0600 of 200 pairs, margin 0.05"
    )


def test_graded_scores_are_ruled_by_sign_flips() -> None:
    after = {f"t{i}": 0.3 + (i % 7) / 10 for i in range(120)}
    before = {f"t{i}": 0.25 + (i % 7) / 10 + (i % 3) / 50 for i in range(120)}
    verdict = gate({SUITE: report("new", after)}, {SUITE: report("old", before)})
    assert verdict.promote
    assert verdict.evidence["test"] == "sign-flip permutation"
    assert verdict.evidence["p_value"] == pytest.approx(2e-4), "the smallest that 9,999 draws can show"
    assert gate({SUITE: report("new", after)}, {SUITE: report("old", before)}) == verdict, "seeded"


def test_gains_that_cancel_out_are_tied_in_spite_of_rounding() -> None:
    after = {f"t{i}": [0.1, 0.2, 0.3][i % 3] for i in range(99)}
    before = {f"t{i}": [0.3, 0.1, 0.2][i % 3] for i in range(99)}
    refused(gate({SUITE: report("new", after)}, {SUITE: report("old", before)}), "tied")


def test_tasks_of_one_cluster_are_one_piece_of_evidence() -> None:
    candidate, incumbent = pair(20, 4, 96)
    assert gate(candidate, incumbent).promote
    one_customer = {f"t{i}": "big customer" if i < 20 else f"customer {i}" for i in range(96)}
    verdict = gate(candidate, incumbent, clusters=one_customer)
    assert verdict.promote is False
    assert "sign-flip" in verdict.reasons[0]


def test_the_cost_of_a_success_can_be_limited() -> None:
    candidate, incumbent = pair(70, 30, 400)
    names = list(candidate[SUITE].scores)
    cheap, dear = dict.fromkeys(names, 0.01), dict.fromkeys(names, 0.02)
    config = GateConfig(max_cost_increase=0.1)
    promoted = gate(candidate, incumbent, config, costs=Costs(cheap, cheap))
    assert promoted.promote
    assert promoted.evidence["costs"]["cost_per_success_ratio"] == pytest.approx(0.825 / 0.925)
    refused(gate(candidate, incumbent, config, costs=Costs(dear, cheap)), "cost per success is 1.784 times the incumbent's")
    refused(gate(candidate, incumbent, config), "a limit on cost is set, but no costs are given")
    unpriced = {**cheap, "t5": None}
    refused(gate(candidate, incumbent, config, costs=Costs(unpriced, cheap)), "unpriced")
    refused(gate(candidate, incumbent, config, costs=Costs(cheap, {})), "unpriced")
    assert gate(candidate, incumbent, costs=Costs(dear, cheap)).promote, "no limit, no ruling"


def scored(version: str, values: list[float], **changes: object) -> dict[str, EvalReport]:
    return {SUITE: report(version, {f"t{i}": value for i, value in enumerate(values)}, **changes)}


LIMIT = GateConfig(max_cost_increase=0.1)
FREE = Costs(dict.fromkeys((f"t{i}" for i in range(100)), 0.0), dict.fromkeys((f"t{i}" for i in range(100)), 0.0))
NEVER, HALF = scored("old", [0.0] * 100), scored("old", [0.0, 1.0] * 50)
EDGES = {
    "a score that is no number": (scored("new", [1.0] * 99 + [math.nan]), NEVER, {}, "not finite numbers"),
    "a missing task": (
        scored("new", [1.0] * 99, missing=("t99",)),
        NEVER,
        {},
        "1 of 100 tasks are missing",
    ),
    "part of the tasks": (scored("new", [1.0] * 99), NEVER, {}, "1 only under the incumbent"),
    "other tasks": (scored("new", [1.0] * 100, suite_hash="other"), NEVER, {}, "measured differently"),
    "a tie": (scored("new", [1.0, 0.0] * 50), HALF, {}, "tied"),
    "one task": (scored("new", [1.0]), scored("old", [0.0]), {}, "1 pairs with the incumbent, preset are at least 96"),
    "no cost": (
        scored("new", [1.0] * 100),
        HALF,
        {"config": LIMIT, "costs": FREE},
        "the limit is 1.1",
    ),
    "no success": (scored("new", [0.0] * 100), NEVER, {}, "tied"),
    "a fall": (scored("new", [0.0] * 100), HALF, {}, "the mean score falls by 0.5000"),
    "nothing to gain": (scored("new", [1.0] * 100), scored("old", [1.0] * 100), {}, "nothing to gain"),
}


@pytest.mark.parametrize("case", EDGES)
def test_no_edge_case_promotes_and_each_says_why(case: str) -> None:
    candidate, incumbent, options, told = EDGES[case]
    verdict = gate(candidate, incumbent, **options)
    assert verdict.promote is False
    assert told in "\n".join(verdict.reasons), verdict.reasons


# ── The series ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_level_of_a_try_follows_from_the_verdicts_before_it() -> None:
    first = gate(*pair(25, 10, 100))
    assert first.evidence["series"] == {
        "rule": "saffron",
        "alpha": 0.05,
        "trial": 1,
        "promotions_before": 0,
        "level": pytest.approx(0.5 * 0.025 / 2.285765668),
        "p_value": pytest.approx(mcnemar_p(25, 10, "greater")),
        "e_value": None,
    }
    refused(first, "try 1 of the series: one-sided p (exact McNemar) 0.00834, level 0.00547 (saffron): not shown to be better")
    assert gate(*pair(25, 10, 100), GateConfig(series="fixed")).promote, "what a single test at 0.05 would have promoted"
    clear = gate(*pair(40, 10, 100), history=[first])
    assert clear.promote
    later = gate(*pair(25, 10, 100), history=[first, clear])
    assert later.promote, "a promotion earns level for the tries after it"
    assert later.evidence["series"]["level"] > 0.01
    assert later.evidence["series"]["promotions_before"] == 1


def test_only_tries_that_could_have_promoted_take_part_in_the_series() -> None:
    short = gate(*pair(40, 0, 95))
    by_hand = Verdict(True, ("by hand",), {"by_hand": True}, "x", "old")
    bootstrap = gate(pair(70, 30, 400)[0], None, bootstrap=True)
    assert trials_of([short, by_hand, bootstrap]) == []
    assert gate(*pair(40, 10, 100), history=[short, by_hand, bootstrap]).evidence["series"]["trial"] == 1


def test_a_gain_that_a_guard_stopped_earns_no_level() -> None:
    stopped = gate(*guarded(0, 12, 96))
    assert stopped.evidence["series"]["p_value"] < stopped.evidence["series"]["level"]
    assert trials_of([stopped]) == [Trial(1.0, promoted=False)]
    assert gate(*pair(40, 10, 100), history=[stopped]).evidence["series"]["level"] < 0.002


def test_e_values_rule_where_they_are_asked_for() -> None:
    config = GateConfig(series="e_lond")
    verdict = gate(*pair(70, 30, 400), config)
    assert verdict.evidence["series"]["e_value"] == pytest.approx(854.59, abs=0.005)
    assert verdict.evidence["series"]["p_value"] == pytest.approx(1 / 854.59, rel=1e-5)
    assert verdict.evidence["series"]["level"] == pytest.approx(0.05 * 0.07720838 * math.log(2))
    assert verdict.promote
    after = {f"t{i}": 0.3 + (i % 7) / 20 for i in range(120)}
    before = {f"t{i}": 0.1 + (i % 7) / 20 for i in range(120)}
    graded = gate({SUITE: report("new", after)}, {SUITE: report("old", before)}, config)
    assert graded.evidence["series"]["e_value"] == pytest.approx(betting_e_process([0.2] * 120)[-1])
    beyond = {name: 20 * score for name, score in after.items()}
    refused(gate({SUITE: report("new", beyond)}, {SUITE: report("old", before)}, config), "no e-value: difference")


def test_a_clear_win_is_promoted_under_e_values_too() -> None:
    config = GateConfig(series="e_lond")
    assert gate(*pair(2000, 0, 2000), config).promote
    refused(gate(*pair(0, 2000, 2000), config), "falls by 1.0000")


def test_a_candidate_that_was_given_up_is_refused_and_counts_as_a_try_without_hope() -> None:
    candidate, incumbent = pair(0, 400, 400)
    scores = dict(list(candidate[SUITE].scores.items())[:9])
    missing = tuple(name for name in candidate[SUITE].scores if name not in scores)
    given_up = {SUITE: report("new", scores, missing=missing, outcomes={GIVEN_UP: 9})}
    plan = plan_of(suites={SUITE: "suite-hash", GUARD: "never measured"})
    verdict = gate(given_up, incumbent, GateConfig(guards={GUARD: 0.1}, max_cost_increase=0.1), costs=Costs({}, {}))
    refused(verdict, "candidate on desk@v2/gate: given up after 9 of 400 tasks: shown to be worse by then")
    assert trials_of([verdict]) == [Trial(1.0, promoted=False)]
    refused(gate(given_up, incumbent, plan=plan), "given up after 9 of 400 tasks")


def test_looks_at_the_same_tasks_are_counted() -> None:
    looks: list[Verdict] = []
    for count in range(3):
        verdict = gate(*pair(70, 30, 400), history=looks)
        assert verdict.evidence["holdout"] == {"suite_hash": "suite-hash", "uses_before": count, "looks_by_hand": 0}
        assert ("2 verdicts have looked at these tasks before" in verdict.reasons[0]) == (count == 2)
        looks.append(verdict)
    peeked = gate(*pair(70, 30, 400), plan=plan_of(looks_by_hand=3))
    assert peeked.evidence["holdout"]["looks_by_hand"] == 3
    assert "3 looks at these tasks by hand" in peeked.reasons[0]


# ── The plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_of(earlier: Sequence[Verdict] = (), **changes: object) -> Plan:
    plan = announce("new", "old", {SUITE: "suite-hash"}, SUITE, GateConfig(), history=earlier)
    return replace(plan, **changes)  # type: ignore[arg-type]


def test_evidence_that_follows_its_plan_is_ruled_by_it() -> None:
    earlier = [gate(*pair(40, 10, 100))]
    plan = plan_of(earlier)
    verdict = gate(*pair(70, 30, 400), history=earlier, plan=plan)
    assert verdict.promote
    assert verdict.evidence["plan_hash"] == plan.hash
    assert (plan.trial, plan.level) == (2, verdict.evidence["series"]["level"])
    assert plan_from_json(json.loads(strict_json(plan))) == plan


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"candidate_id": "other"}, "candidate new, announced was other"),
        ({"incumbent_id": "other"}, "incumbent old, announced was other"),
        ({"primary": GUARD}, "primary suite"),
        ({"suites": {SUITE: "other tasks"}}, "suites"),
        ({"suites": {SUITE: "suite-hash", GUARD: "h"}}, "suites"),
        ({"anchors": {GUARD: "first"}}, "anchors"),
        ({"gate": {**GateConfig().model_dump(mode="json"), "alpha": 0.2}}, "settings"),
        ({"clusters": "abcd"}, "clusters"),
        ({"history": "0000"}, "history"),
        ({"level": 0.05}, "level"),
    ],
)
def test_evidence_that_departs_from_its_plan_is_refused(change: dict[str, object], told: str) -> None:
    verdict = gate(*pair(70, 30, 400), plan=plan_of(**change))
    refused(verdict, f"the evidence departs from the plan: {told}")
    assert "series" not in verdict.evidence


def test_a_plan_has_the_hash_of_all_that_it_says() -> None:
    assert plan_of().hash == plan_of().hash
    changed = [plan_of(level=0.01), plan_of(trial=2), plan_of(price_book="x"), plan_of(clusters="x")]
    assert len({plan_of().hash, *(plan.hash for plan in changed)}) == 5


def test_configuration_is_strict() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'alpha'\?"):
        parse_config(GateConfig, {"alhpa": 0.01}, where="run.toml")
    for bad in ({"alpha": 0}, {"min_n": 0}, {"min_delta": math.nan}, {"max_missing_share": 1}, {"guard_margin": 0}):
        with pytest.raises(ConfigError):
            parse_config(GateConfig, bad, where="run.toml")
    with pytest.raises(ConfigError, match="saffron"):
        parse_config(GateConfig, {"series": "bonferroni"}, where="run.toml")


weird = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(), st.none())
reports = st.dictionaries(
    st.sampled_from([SUITE, GUARD]),
    st.builds(
        EvalReport,
        version_id=st.sampled_from(["", "a", "b"]),
        suite=st.sampled_from([SUITE, GUARD]),
        scores=st.dictionaries(st.sampled_from([f"t{i}" for i in range(6)]), weird),
        suite_hash=st.sampled_from(["", "h", "h", "h"]),
        missing=st.sampled_from([(), ("t9",)]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(reports, st.none() | reports, st.none() | reports, st.booleans())
def test_whatever_comes_in_a_verdict_with_strict_evidence_comes_out(
    candidate: dict[str, EvalReport], incumbent: dict[str, EvalReport] | None, anchor: dict[str, EvalReport] | None, first: bool
) -> None:
    config = GateConfig(min_n=3, alpha=0.9, max_cost_increase=0.1)
    verdict = gate(candidate, incumbent, config, anchor=anchor, bootstrap=first)
    assert verdict.reasons
    json.loads(strict_json(verdict), parse_constant=lambda name: pytest.fail(name))
    if verdict.promote:
        scores = candidate[verdict.evidence["primary"]].scores.values()
        assert all(isinstance(score, float) and math.isfinite(score) for score in scores)
        assert not incumbent, "without costs, a limit on cost lets nothing pass an incumbent"
        assert first
