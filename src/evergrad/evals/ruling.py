"""The gate: rules on promotion by paired evidence, and refuses whatever evidence it cannot rely on.

One ruling, in this order; all that fails is said, not only the first::

    reports usable? ──▶ paired? ──▶ enough pairs? ──▶ better? (exact McNemar or sign flips, Δ ≥ min_delta)
                                                 └──▶ no guard suite worse than its margin? (incumbent, frozen anchor)
                                                 └──▶ cost per success within bounds? (where asked for)

A candidate is promoted only when every question has an answer and every answer is yes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from pydantic import Field

from evergrad.config import Config
from evergrad.evals.evaluation import EvalError, report_hash
from evergrad.evals.statistics import (
    PairedDifference,
    cost_per_success_ratio,
    non_inferiority_p,
    paired_difference,
    superiority_p,
)
from evergrad.types import EvalReport, Verdict, plain, strict_json

Reports = Mapping[str, EvalReport]
"""Suite name to report, all of one version."""


class GateConfig(Config):
    """What evidence promotes; fixed before the evidence is seen."""

    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Level of the superiority test (two-sided) and of each guard (one-sided)."""
    min_n: int = Field(default=96, ge=1)
    """Pairs that a suite must have at least."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Smallest gain in mean score that promotes; any gain by default."""
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
    seed: int = 0
    """Of the sign flips."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the tries of the primary suite cost, by task id, in USD; ``None`` where unpriced."""

    candidate: Mapping[str, Decimal | float | None]
    incumbent: Mapping[str, Decimal | float | None]
    training_usd: Decimal | float | None = None
    """What making the candidate cost; goes into the evidence."""


@dataclass
class _Ruling:
    """What has been found so far."""

    config: GateConfig
    clusters: Mapping[str, Hashable] | None
    refusals: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)


def gate(
    candidate: Reports,
    incumbent: Reports | None,
    config: GateConfig | None = None,
    *,
    primary: str | None = None,
    anchor: Reports | None = None,
    costs: Costs | None = None,
    clusters: Mapping[str, Hashable] | None = None,
    bootstrap: bool = False,
) -> Verdict:
    """Rules on promoting ``candidate`` over ``incumbent``.

    Args:
        candidate: Its reports, one per suite.
        incumbent: Those of the version that serves now, on the same suites; empty or ``None`` when nothing serves.
        config: Thresholds.
        primary: Suite on which the candidate must be better; the first of its reports by default.
        anchor: Reports of a frozen version; every suite in it is guarded against it too, lest small losses add up.
        costs: Per-task costs on the primary suite; needed when ``config.max_cost_increase`` is set.
        clusters: Task id to cluster (repository, customer, conversation); tasks of one cluster are not independent.
        bootstrap: Lets a first version pass without an incumbent, if its own reports are in order.
    """
    config = config or GateConfig()
    ruling = _Ruling(config, clusters)
    chosen = primary or next(iter(candidate), "")
    candidate_id = _one_version(ruling, candidate, "candidate")
    incumbent_id = _one_version(ruling, incumbent, "incumbent") if incumbent else None
    if not chosen or chosen not in candidate:
        ruling.refusals.append(f"the candidate has no report on the primary suite{f' {chosen}' if chosen else ''}")
    if candidate_id and candidate_id == incumbent_id:
        ruling.refusals.append(f"candidate and incumbent are the same version, {candidate_id}")
    roles = {"candidate": candidate, "incumbent": incumbent or {}, "anchor": anchor or {}}
    usable = _check_reports(ruling, roles)
    _add_identity(ruling, chosen, roles)
    if not incumbent:
        _rule_without_incumbent(ruling, candidate, chosen, bootstrap, usable)
    elif chosen in candidate:
        _rule_primary(ruling, chosen, candidate, incumbent, usable)
        _rule_costs(ruling, chosen, candidate, incumbent, costs, usable)
    ruling.evidence["guards"] = []
    if incumbent:
        for suite, margin in _guards(config, candidate, chosen).items():
            _rule_guard(ruling, suite, margin, candidate, incumbent, "incumbent", usable)
    for suite in anchor or {}:
        margin_there = config.guards.get(suite, config.guard_margin)
        if margin_there is not None:
            _rule_guard(ruling, suite, margin_there, candidate, anchor or {}, "anchor", usable)
    promote = not ruling.refusals
    reasons = tuple(ruling.findings if promote else ruling.refusals)
    return Verdict(promote, reasons, plain(ruling.evidence), candidate_id, incumbent_id)


def _guards(config: GateConfig, candidate: Reports, primary: str) -> dict[str, float]:
    guards = dict(config.guards)
    if config.guard_margin is not None:
        guards.update({suite: config.guard_margin for suite in candidate if suite not in guards and suite != primary})
    return guards


def _one_version(ruling: _Ruling, reports: Reports, role: str) -> str:
    names = sorted({report.version_id for report in reports.values()})
    if len(names) > 1:
        ruling.refusals.append(f"the {role}'s reports are about {len(names)} versions: {', '.join(names)}")
    if not names or not names[0]:
        ruling.refusals.append(f"the {role} has no report that names its version")
    return names[0] if names else ""


def _check_reports(ruling: _Ruling, roles: Mapping[str, Reports]) -> set[tuple[str, str]]:
    """Judges each report by itself; returns role and suite of those that may be paired."""
    usable = set()
    for role, reports in roles.items():
        for suite, report in reports.items():
            problems = _problems(report, suite, ruling.config.max_missing_share)
            ruling.refusals += [f"{role} on {suite}: {problem}" for problem in problems]
            if not problems:
                usable.add((role, suite))
    return usable


def _problems(report: EvalReport, suite: str, max_missing_share: float) -> list[str]:
    problems = []
    if report.suite != suite:
        problems.append(f"the report is about the suite {report.suite}")
    if not report.scores:
        problems.append("the report has no scores")
    broken = [task_id for task_id, score in report.scores.items() if not _finite(score)]
    if broken:
        problems.append(f"{len(broken)} scores are not finite numbers, that of task {broken[0]} first")
    asked = len(report.scores) + len(report.missing)
    if asked and len(report.missing) / asked > max_missing_share:
        allowed = f"{max_missing_share:.1%} may be" if max_missing_share else "none may be"
        problems.append(f"{len(report.missing)} of {asked} tasks are missing, {allowed}")
    if not report.suite_hash:
        problems.append("the report does not say what it measured (no suite_hash)")
    return problems


def _finite(score: object) -> bool:
    return isinstance(score, (int, float)) and math.isfinite(score)


def _mismatch(ruling: _Ruling, suite: str, after: EvalReport, before: EvalReport, role: str) -> bool:
    """Whether two reports cannot be paired; says why."""
    if after.suite_hash != before.suite_hash:
        ruling.refusals.append(
            f"{suite}: candidate and {role} were measured differently (suite_hash {after.suite_hash} and {before.suite_hash})"
        )
        return True
    ours, theirs = {*after.scores, *after.missing}, {*before.scores, *before.missing}
    if ours != theirs:
        ruling.refusals.append(
            f"{suite}: {len(ours - theirs)} tasks only under the candidate, {len(theirs - ours)} only under the {role}"
        )
        return True
    common = len(after.scores.keys() & before.scores.keys())
    if common < ruling.config.min_n:
        ruling.refusals.append(f"{suite}: {common} pairs with the {role}, preset are at least {ruling.config.min_n}")
    return common == 0


def _rule_without_incumbent(
    ruling: _Ruling, candidate: Reports, primary: str, bootstrap: bool, usable: set[tuple[str, str]]
) -> None:
    ruling.evidence["bootstrap"] = bootstrap
    if not bootstrap:
        ruling.refusals.append("there is no report of an incumbent to compare with")
        return
    if ("candidate", primary) not in usable:
        return
    report = candidate[primary]
    if len(report.scores) < ruling.config.min_n:
        ruling.refusals.append(f"{primary}: {len(report.scores)} scores, preset are at least {ruling.config.min_n}")
    ruling.evidence |= {"n": len(report.scores), "score_after": _mean(report)}
    ruling.findings.append(
        f"nothing serves yet: first version, mean score {_mean(report):.3f} of {len(report.scores)} tasks on {primary}"
    )


def _rule_primary(ruling: _Ruling, suite: str, candidate: Reports, incumbent: Reports, usable: set[tuple[str, str]]) -> None:
    if suite not in incumbent:
        ruling.refusals.append(f"the incumbent has no report on the primary suite {suite}")
        return
    after, before, config = candidate[suite], incumbent[suite], ruling.config
    if {("candidate", suite), ("incumbent", suite)} - usable or _mismatch(ruling, suite, after, before, "incumbent"):
        return
    pairs = paired_difference(after.scores, before.scores, ruling.clusters)
    test, p_value = superiority_p(pairs, seed=config.seed)
    ruling.evidence |= {
        **_compared(pairs, before, after),
        "test": test,
        "p_value": p_value,
        "slices": {"before": before.slice_means(), "after": after.slice_means()},
    }
    told = f"{suite}: {pairs.wins} wins, {pairs.losses} losses of {pairs.n}"
    # A mean of differences that cancel out is zero up to rounding only.
    tied = abs(pairs.delta) < 1e-12
    if tied and _mean(before) >= 1.0:
        ruling.refusals.append(f"{told}: tied; the incumbent already scores 1.000: nothing to gain, it goes on serving")
    elif tied:
        ruling.refusals.append(f"{told}: tied")
    elif pairs.delta < 0:
        ruling.refusals.append(f"{told}: the mean score falls by {-pairs.delta:.4f}")
    elif pairs.delta < config.min_delta:
        ruling.refusals.append(f"{told}: the gain of {pairs.delta:.4f} is below the preset {config.min_delta:g}")
    if p_value > config.alpha and not tied:
        ruling.refusals.append(f"{told}: p = {p_value:.3g} ({test}) is above the preset {config.alpha:g}")
    low, high = pairs.ci95
    ruling.findings.append(
        f"{told}: mean score {_mean(before):.3f} to {_mean(after):.3f}, gain {pairs.delta:+.4f}, "
        f"95% interval [{low:.4f}, {high:.4f}], p = {p_value:.3g} ({test})"
    )


def _rule_guard(
    ruling: _Ruling, suite: str, margin: float, candidate: Reports, others: Reports, role: str, usable: set[tuple[str, str]]
) -> None:
    missing = [name for name, reports in (("candidate", candidate), (role, others)) if suite not in reports]
    if missing:
        ruling.refusals.append(f"guard {suite}: no report of the {' or of the '.join(missing)}")
        return
    after, before, config = candidate[suite], others[suite], ruling.config
    if {("candidate", suite), (role, suite)} - usable or _mismatch(ruling, suite, after, before, role):
        return
    pairs = paired_difference(after.scores, before.scores, ruling.clusters)
    p_value = non_inferiority_p(pairs, margin)
    holds = p_value < config.alpha
    ruling.evidence["guards"].append(
        {
            "suite": suite,
            "against": role,
            "version_id": before.version_id,
            **_compared(pairs, before, after),
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


def _compared(pairs: PairedDifference, before: EvalReport, after: EvalReport) -> dict[str, Any]:
    """The figures of every paired comparison in a verdict's evidence."""
    return {
        "n": pairs.n,
        "wins": pairs.wins,
        "losses": pairs.losses,
        "score_before": _mean(before),
        "score_after": _mean(after),
        "delta": pairs.delta,
        "se": pairs.se,
        "ci95": pairs.ci95,
    }


def _rule_costs(
    ruling: _Ruling, suite: str, candidate: Reports, incumbent: Reports, costs: Costs | None, usable: set[tuple[str, str]]
) -> None:
    limit = ruling.config.max_cost_increase
    if costs is not None and costs.training_usd is not None:
        ruling.evidence["costs"] = {"training_usd": costs.training_usd}
    if limit is None:
        return
    if costs is None:
        ruling.refusals.append("a limit on cost is set, but no costs are given")
        return
    if suite not in incumbent or {("candidate", suite), ("incumbent", suite)} - usable:
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
        **ruling.evidence.get("costs", {}),
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


def _priced(costs: Mapping[str, Decimal | float | None], tasks: list[str]) -> dict[str, float] | None:
    found = {task_id: costs.get(task_id) for task_id in tasks}
    known = {task_id: float(cost) for task_id, cost in found.items() if cost is not None and math.isfinite(cost) and cost >= 0}
    return known if len(known) == len(tasks) else None


def _add_identity(ruling: _Ruling, primary: str, roles: Mapping[str, Reports]) -> None:
    """What the ruling rests on, so that it can be checked later: thresholds, suites, hashes of all reports."""
    settings = ruling.config.model_dump(mode="json")
    ruling.evidence |= {
        "primary": primary,
        "alpha": ruling.config.alpha,
        "gate": settings,
        "gate_hash": hashlib.sha256(strict_json(settings).encode()).hexdigest()[:16],
        "suite_hashes": {suite: report.suite_hash for suite, report in roles["candidate"].items()},
        "reports": {role: {suite: report_hash(report) for suite, report in reports.items()} for role, reports in roles.items()},
        "missing": {
            role: {suite: len(report.missing) for suite, report in reports.items() if report.missing}
            for role, reports in roles.items()
        },
    }


def _mean(report: EvalReport) -> float:
    return report.mean or 0.0
