"""What must hold before two reports may be compared: each is whole, both measured the same, and as the plan announced."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evergrad.config import Config
from evergrad.evals.evaluation import GIVEN_UP, content_hash
from evergrad.evals.plan import Aim, Plan
from evergrad.evals.series import next_level, trials_of
from evergrad.evals.settings import GateConfig
from evergrad.types import EvalReport, Verdict, plain

Reports = Mapping[str, EvalReport]
"""Suite name to report, all of one version (of an anchor: each of a version of its own)."""


@dataclass
class Ruling:
    """What has been found so far."""

    config: GateConfig
    clusters: Mapping[str, Hashable] | None
    history: Sequence[Verdict] = ()
    refusals: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    usable: set[tuple[str, str]] = field(default_factory=set)
    """Role and suite of the reports that may be paired."""
    given_up: bool = False
    """The candidate was shown to be worse on the primary suite before all of it was measured; nothing else need be."""


def one_version(ruling: Ruling, reports: Reports, role: str) -> str:
    """The version that all of a role's reports are about; says so where they are not."""
    names = sorted({report.version_id for report in reports.values()})
    if len(names) > 1:
        ruling.refusals.append(f"the {role}'s reports are about {len(names)} versions: {', '.join(names)}")
    if not names or not names[0]:
        ruling.refusals.append(f"the {role} has no report that names its version")
    return names[0] if names else ""


def check_reports(ruling: Ruling, roles: Mapping[str, Reports]) -> None:
    """Judges each report by itself."""
    for role, reports in roles.items():
        for suite, report in reports.items():
            problems = _problems(report, suite, ruling.config.max_missing_share)
            ruling.refusals += [f"{role} on {suite}: {problem}" for problem in problems]
            if not problems:
                ruling.usable.add((role, suite))


def check_plan(
    ruling: Ruling,
    plan: Plan,
    candidate_id: str,
    incumbent_id: str | None,
    primary: str,
    roles: Mapping[str, Reports],
    audit: Config | None = None,
    aim: Aim = "score",
) -> None:
    """Refuses evidence that is not what was announced; names what differs."""
    measured_suites = {suite: report.suite_hash for suite, report in sorted(roles["candidate"].items())}
    planned = {suite: each for suite, each in plan.suites.items() if suite in measured_suites or not ruling.given_up}
    measured = {
        "candidate": (plan.candidate_id, candidate_id),
        "incumbent": (plan.incumbent_id, incumbent_id),
        "aim": (plan.aim, aim),
        "primary suite": (plan.primary, primary),
        "suites": (planned, measured_suites),
        "anchors": (dict(plan.anchors), {suite: report.version_id for suite, report in roles["anchor"].items()}),
        "settings": (plain(plan.gate), plain(ruling.config.as_planned())),
        "audit": (plain(plan.audit), plain(audit.model_dump(mode="json")) if audit else {}),
        "clusters": (plan.clusters, content_hash(dict(ruling.clusters)) if ruling.clusters else ""),
        "history": (plan.history, content_hash(ruling.history)),
        "level": (plan.level, next_level(ruling.config.series, ruling.config.alpha, trials_of(ruling.history))),
    }
    for what, (announced, found) in measured.items():
        if announced != found:
            ruling.refusals.append(
                f"the evidence departs from the plan: {what} {_short(found)}, announced was {_short(announced)}"
            )


def mismatch(ruling: Ruling, suite: str, after: EvalReport, before: EvalReport, role: str) -> bool:
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
    if GIVEN_UP in report.outcomes:
        problems.append(f"given up after {report.outcomes[GIVEN_UP]} of {asked} tasks: shown to be worse by then")
    elif asked and len(report.missing) / asked > max_missing_share:
        allowed = f"{max_missing_share:.1%} may be" if max_missing_share else "none may be"
        problems.append(f"{len(report.missing)} of {asked} tasks are missing, {allowed}")
    if not report.suite_hash:
        problems.append("the report does not say what it measured (no suite_hash)")
    return problems


def _finite(score: object) -> bool:
    return isinstance(score, (int, float)) and math.isfinite(score)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
