"""The gate: rules on promotion by paired evidence, and refuses whatever evidence it cannot rely on.

One ruling, in this order; all that fails is said, not only the first::

    reports usable? ──▶ as planned? ──▶ paired? ──▶ enough pairs?
                                                └──▶ better? (exact McNemar or sign flips, at this try's level in the series);
                                                     or with the aim "cost" no worse, and cheaper? (``saving.py``)
                                                └──▶ no guard suite worse than its margin? (incumbent, frozen anchor)
                                                └──▶ cost per success, and seconds, within bounds? (where asked for)
                                                └──▶ no gate task among the live tasks that were trained on? (where there are)
                                                └──▶ do rewards and gain hold by gold? (where audited)

A candidate is promoted only when every question has an answer and every answer is yes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from evergrad.evals._checks import Reports, Ruling, check_plan, check_reports, mismatch, one_version
from evergrad.evals._comparing import add_trial, compared, mean_score
from evergrad.evals._latency import Latencies, rule_latency
from evergrad.evals.evaluation import GIVEN_UP, EvalError, Turns, content_hash, report_hash
from evergrad.evals.integrity import AuditConfig, rule_integrity
from evergrad.evals.plan import Aim, Plan, uses_of
from evergrad.evals.saving import rule_saving
from evergrad.evals.sequential import betting_e_process, mixture_e_value
from evergrad.evals.series import next_level, trials_of
from evergrad.evals.settings import GateConfig
from evergrad.evals.statistics import (
    PairedDifference,
    cost_per_success_ratio,
    non_inferiority_p,
    paired_difference,
    sample_size,
    superiority_p,
)
from evergrad.types import Verdict, plain


@dataclass(frozen=True, slots=True)
class Costs:
    """What the tries of the primary suite cost, by task id, in USD; ``None`` where unpriced."""

    candidate: Mapping[str, Decimal | float | None]
    incumbent: Mapping[str, Decimal | float | None]


def gate(
    candidate: Reports,
    incumbent: Reports | None,
    config: GateConfig | None = None,
    *,
    primary: str | None = None,
    anchor: Reports | None = None,
    costs: Costs | None = None,
    latencies: Latencies | None = None,
    aim: Aim = "score",
    turns: Turns | None = None,
    clusters: Mapping[str, Hashable] | None = None,
    bootstrap: bool = False,
    history: Sequence[Verdict] = (),
    plan: Plan | None = None,
    audit: AuditConfig | None = None,
) -> Verdict:
    """Rules on promoting ``candidate`` over ``incumbent``.

    Args:
        candidate: Its reports, one per suite.
        incumbent: Those of the version that serves now, on the same suites; empty or ``None`` when nothing serves.
        config: Thresholds.
        primary: Suite on which the candidate must be better, or no worse; the first of its reports by default.
        anchor: Reports of frozen versions; every suite in it is guarded against it too, lest small losses add up.
        costs: Per-task costs on the primary suite; needed when ``config.max_cost_increase`` is set.
        latencies: Seconds per task on the primary suite; needed when ``config.max_latency_increase`` is set.
        aim: What the candidate is for: a better score, or with ``cost`` the same score for less.
        turns: What both took on the primary suite as they took turns; needed with the aim ``cost``.
        clusters: Task id to cluster (repository, customer, conversation); tasks of one cluster are not independent.
        bootstrap: Lets a first version pass without an incumbent, if its own reports are in order.
        history: All verdicts of the same series before this one, oldest first; they decide the level of this try.
        plan: What was announced before anything was measured; evidence that departs from it is refused.
        audit: How the gold scores of the primary suite's reports are judged; nobody's are when absent.
    """
    config = config or GateConfig()
    ruling = Ruling(config, clusters, history)
    chosen = primary or next(iter(candidate), "")
    candidate_id = one_version(ruling, candidate, "candidate")
    incumbent_id = one_version(ruling, incumbent, "incumbent") if incumbent else None
    if not chosen or chosen not in candidate:
        ruling.refusals.append(f"the candidate has no report on the primary suite{f' {chosen}' if chosen else ''}")
    if candidate_id and candidate_id == incumbent_id:
        ruling.refusals.append(f"candidate and incumbent are the same version, {candidate_id}")
    roles = {"candidate": candidate, "incumbent": incumbent or {}, "anchor": anchor or {}}
    ruling.given_up = chosen in candidate and GIVEN_UP in candidate[chosen].outcomes
    check_reports(ruling, roles)
    if plan is not None:
        check_plan(ruling, plan, candidate_id, incumbent_id, chosen, roles, audit, aim)
    _add_identity(ruling, chosen, roles, plan)
    if plan is not None and plan.contamination:
        _rule_contamination(ruling, plan.contamination)
    if not incumbent:
        _rule_without_incumbent(ruling, candidate, chosen, bootstrap)
    elif chosen in candidate:
        looks = plan.looks_by_hand if plan else 0
        if aim == "cost":
            ruling.evidence["aim"] = aim
            rule_saving(ruling, chosen, candidate, incumbent, turns, looks)
        else:
            _rule_primary(ruling, chosen, candidate, incumbent, looks)
        _rule_costs(ruling, chosen, candidate, incumbent, costs)
        rule_latency(ruling, chosen, candidate, incumbent, latencies)
        if audit is not None and not {("candidate", chosen), ("incumbent", chosen)} - ruling.usable:
            rule_integrity(ruling, chosen, candidate[chosen], incumbent[chosen], audit)
    ruling.evidence["guards"] = []
    if not ruling.given_up:
        _rule_guards(ruling, chosen, candidate, incumbent or {}, anchor or {})
    promote = not ruling.refusals
    reasons = tuple(ruling.findings if promote else ruling.refusals)
    return Verdict(promote, reasons, plain(ruling.evidence), candidate_id, incumbent_id)


def _rule_guards(ruling: Ruling, primary: str, candidate: Reports, incumbent: Reports, anchor: Reports) -> None:
    config = ruling.config
    if incumbent:
        for suite, margin in _guards(config, candidate, primary).items():
            _rule_guard(ruling, suite, margin, candidate, incumbent, "incumbent")
    for suite in anchor:
        margin_there = config.guards.get(suite, config.guard_margin)
        if margin_there is not None:
            _rule_guard(ruling, suite, margin_there, candidate, anchor, "anchor")


def _guards(config: GateConfig, candidate: Reports, primary: str) -> dict[str, float]:
    guards = dict(config.guards)
    if config.guard_margin is not None:
        guards.update({suite: config.guard_margin for suite in candidate if suite not in guards and suite != primary})
    return guards


def _rule_without_incumbent(ruling: Ruling, candidate: Reports, primary: str, bootstrap: bool) -> None:
    ruling.evidence["bootstrap"] = bootstrap
    if not bootstrap:
        ruling.refusals.append("there is no report of an incumbent to compare with")
        return
    if ("candidate", primary) not in ruling.usable:
        return
    report = candidate[primary]
    if len(report.scores) < ruling.config.min_n:
        ruling.refusals.append(f"{primary}: {len(report.scores)} scores, preset are at least {ruling.config.min_n}")
    ruling.evidence |= {"n": len(report.scores), "score_after": mean_score(report)}
    ruling.findings.append(
        f"nothing serves yet: first version, mean score {mean_score(report):.3f} of {len(report.scores)} tasks on {primary}"
    )


def _rule_primary(ruling: Ruling, suite: str, candidate: Reports, incumbent: Reports, looks: int) -> None:
    if suite not in incumbent:
        ruling.refusals.append(f"the incumbent has no report on the primary suite {suite}")
        return
    after, before, config = candidate[suite], incumbent[suite], ruling.config
    if ruling.given_up:
        # Shown to be worse before all was measured. Left out, the tries that remain would look better than they are.
        add_trial(ruling, next_level(config.series, config.alpha, trials_of(ruling.history)), 1.0, None)
    unusable = {("candidate", suite), ("incumbent", suite)} - ruling.usable
    if unusable or mismatch(ruling, suite, after, before, "incumbent"):
        return
    pairs = paired_difference(after.scores, before.scores, ruling.clusters)
    test, p_value = superiority_p(pairs, seed=config.seed)
    uses = uses_of(after.suite_hash, ruling.history)
    ruling.evidence |= {
        **compared(pairs, before, after, config.seed),
        "test": test,
        "p_value": p_value,
        "holdout": {"suite_hash": after.suite_hash, "uses_before": uses, "looks_by_hand": looks},
        "slices": {"before": before.slice_means(), "after": after.slice_means()},
    }
    told = f"{suite}: {pairs.wins} won, {pairs.losses} lost of {pairs.n}"
    # A mean of differences that cancel out is zero up to rounding only.
    tied = abs(pairs.delta) < 1e-12
    place = _rule_series(ruling, told, pairs, tied)
    if tied and mean_score(before) >= 1.0:
        ruling.refusals.append(f"{told}: tied; the incumbent already scores 1.000: nothing to gain, it goes on serving")
    elif tied:
        ruling.refusals.append(f"{told}: tied")
    elif pairs.delta < 0:
        ruling.refusals.append(f"{told}: the mean score falls by {-pairs.delta:.4f}")
    elif pairs.delta < config.min_delta:
        ruling.refusals.append(f"{told}: the gain of {pairs.delta:.4f} is below the preset {config.min_delta:g}")
    low, high = ruling.evidence["ci95"]
    ruling.findings.append(
        f"{told}: mean score {mean_score(before):.3f} to {mean_score(after):.3f}, gain {pairs.delta:+.4f}, "
        f"95% interval [{low:.4f}, {high:.4f}], p = {p_value:.3g} ({test}); {place}"
        + (f"; {uses} verdicts have looked at these tasks before" if uses else "")
        + (f"; {looks} looks at these tasks by hand" if looks else "")
    )


def _rule_series(ruling: Ruling, told: str, pairs: PairedDifference, tied: bool) -> str:
    """Holds the one-sided p-value against the level of this try; returns where it stands, in words."""
    config, trials = ruling.config, trials_of(ruling.history)
    level = next_level(config.series, config.alpha, trials)
    e_value = None
    if config.series == "e_lond":
        try:
            e_value = _e_value(pairs)
        except EvalError as error:
            ruling.refusals.append(f"{told}: no e-value: {error}")
            return "no e-value"
        p_value, what = min(1.0, 1 / e_value) if e_value > 0 else 1.0, "1/E"
    else:
        test, p_value = superiority_p(pairs, seed=config.seed, alternative="greater", level=level)
        what = f"one-sided p ({test})"
    place = f"try {len(trials) + 1} of the series: {what} {p_value:.3g}, level {level:.3g} ({config.series})"
    # Whatever is refused for another reason already could not have been promoted by its scores: that is no try.
    if not ruling.refusals:
        add_trial(ruling, level, p_value, e_value)
    if p_value > level and pairs.delta > 0 and not tied:
        ruling.refusals.append(f"{told}: {place}: not shown to be better{_pairs_needed(pairs, level)}")
    return place


def _pairs_needed(pairs: PairedDifference, level: float) -> str:
    """What would show such a gain, where it is one of success rates."""
    if not pairs.counts_decide or level >= 0.5:
        return ""
    needed = sample_size(pairs.delta, (pairs.wins + pairs.losses) / pairs.n, alpha=level)
    return f"; if it is real, {needed} pairs show it four times out of five"


def _e_value(pairs: PairedDifference) -> float:
    """That of the data's kind, as it stands at the preset n."""
    if pairs.counts_decide:
        return mixture_e_value(pairs.wins, pairs.losses)
    means = (total / size for total, size in zip(pairs.cluster_sums, pairs.cluster_sizes, strict=True))
    return betting_e_process(means)[-1]


def _rule_guard(ruling: Ruling, suite: str, margin: float, candidate: Reports, others: Reports, role: str) -> None:
    missing = [name for name, reports in (("candidate", candidate), (role, others)) if suite not in reports]
    if missing:
        ruling.refusals.append(f"guard {suite}: no report of the {' or of the '.join(missing)}")
        return
    after, before, config = candidate[suite], others[suite], ruling.config
    if {("candidate", suite), (role, suite)} - ruling.usable or mismatch(ruling, suite, after, before, role):
        return
    pairs = paired_difference(after.scores, before.scores, ruling.clusters)
    p_value = non_inferiority_p(pairs, margin)
    holds = p_value < config.alpha
    ruling.evidence["guards"].append(
        {
            "suite": suite,
            "against": role,
            "version_id": before.version_id,
            **compared(pairs, before, after, config.seed),
            "margin": margin,
            "p_value": p_value,
            "holds": holds,
        }
    )
    told = f"guard {suite} against the {role}: {pairs.delta:+.4f} of {pairs.n} pairs, margin {margin:g}, p = {p_value:.3g}"
    if holds:
        ruling.findings.append(f"{told}: not worse")
    else:
        ruling.refusals.append(f"{told}: not shown to be no worse")


def _rule_costs(ruling: Ruling, suite: str, candidate: Reports, incumbent: Reports, costs: Costs | None) -> None:
    limit = ruling.config.max_cost_increase
    if limit is None:
        return
    if costs is None:
        ruling.refusals.append("a limit on cost is set, but no costs are given")
        return
    if suite not in incumbent or {("candidate", suite), ("incumbent", suite)} - ruling.usable:
        return
    after, before = candidate[suite].scores, incumbent[suite].scores
    common = [task_id for task_id in after if task_id in before]
    ours, theirs = _priced(costs.candidate, common), _priced(costs.incumbent, common)
    if ours is None or theirs is None:
        ruling.refusals.append(f"{suite}: a limit on cost is set, but some of the {len(common)} pairs are unpriced")
        return
    try:
        ratio, upper = cost_per_success_ratio(after, before, ours, theirs, ruling.config.alpha, ruling.clusters)
    except (EvalError, ZeroDivisionError):
        ratio = upper = math.inf
    ruling.evidence["costs"] = {
        "cost_per_success_ratio": ratio if math.isfinite(ratio) else None,
        "upper_bound": upper if math.isfinite(upper) else None,
        "limit": 1 + limit,
    }
    confidence = f"{1 - ruling.config.alpha:.0%}"
    told = f"{suite}: cost per success is {ratio:.3f} times the incumbent's, at most {upper:.3f} with {confidence} confidence"
    if upper < 1 + limit:
        ruling.findings.append(told)
    else:
        ruling.refusals.append(f"{told}; the limit is {1 + limit:g}")


def _rule_contamination(ruling: Ruling, found: Mapping[str, Any]) -> None:
    """What was looked for before anything was measured: gate tasks among the live tasks that the candidate was trained on."""
    ruling.evidence["contamination"] = dict(found)
    among = f"the {found['trained_on']} live tasks that the candidate was trained on"
    if found["overlaps"]:
        ruling.refusals.append(
            f"{len(found['overlaps'])} of {found['gate_tasks']} gate tasks are among {among}, or nearly so: "
            f"{', '.join(sorted(found['overlaps'])[:3])}"
        )
    else:
        ruling.findings.append(f"none of {found['gate_tasks']} gate tasks is among {among}, or near one")


def _priced(costs: Mapping[str, Decimal | float | None], tasks: list[str]) -> dict[str, float] | None:
    found = {task_id: costs.get(task_id) for task_id in tasks}
    known = {task_id: float(cost) for task_id, cost in found.items() if cost is not None and math.isfinite(cost) and cost >= 0}
    return known if len(known) == len(tasks) else None


def _add_identity(ruling: Ruling, primary: str, roles: Mapping[str, Reports], plan: Plan | None) -> None:
    """What the ruling rests on, so that it can be checked later: plan, thresholds, suites, hashes of all reports."""
    settings = ruling.config.as_planned()
    ruling.evidence |= {
        "primary": primary,
        "alpha": ruling.config.alpha,
        "gate": settings,
        "gate_hash": content_hash(settings),
        "plan_hash": plan.hash if plan else None,
        "suite_hashes": {suite: report.suite_hash for suite, report in roles["candidate"].items()},
        "reports": {role: {suite: report_hash(report) for suite, report in reports.items()} for role, reports in roles.items()},
        "missing": {
            role: {suite: len(report.missing) for suite, report in reports.items() if report.missing}
            for role, reports in roles.items()
        },
    }
