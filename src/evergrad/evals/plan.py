"""The plan of one ruling, written and hashed before anything is measured.

What is tested, on which tasks, against whom, at which level: all that could be bent once the scores are known. A gate that
is given a plan refuses evidence that does not match it, and the verdict carries the plan's hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evergrad.config import Config
from evergrad.evals.evaluation import content_hash
from evergrad.evals.series import next_level, trials_of
from evergrad.evals.settings import GateConfig
from evergrad.types import Verdict, plain

Aim = Literal["score", "cost"]
"""What a candidate must be to be promoted: better, or no worse and cheaper per success."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One ruling as it was announced; JSON values only."""

    candidate_id: str
    incumbent_id: str
    anchors: Mapping[str, str]
    """Suite to the frozen version that it is guarded against, besides the incumbent."""
    primary: str
    """Suite on which the candidate must be better; with the aim ``cost``, no worse and cheaper."""
    suites: Mapping[str, str]
    """Suite to suite hash (tasks, limits, sampling and verifier), of all that will be measured."""
    gate: Mapping[str, Any]
    """The gate's settings."""
    trial: int
    """Position in the series, from 1."""
    level: float
    """What the one-sided p-value may be at most."""
    history: str
    """Hash of the verdicts from which the level follows."""
    clusters: str = ""
    """Hash of the map from task to cluster; empty where each task is its own."""
    price_book: str = ""
    """Hash of the prices that the costs of both versions are taken at."""
    looks_by_hand: int = 0
    """How often somebody has measured a version on some of the primary suite's tasks, outside of any ruling."""
    audit: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the gold audit; empty where there is none."""
    contamination: Mapping[str, Any] = field(default_factory=dict)
    """``trained_on``: live tasks that made the candidate; ``gate_tasks``: how many were held against them; ``overlaps``: gate
    task to how it overlaps. Empty where no live task made it."""

    aim: Aim = "score"

    @property
    def hash(self) -> str:
        content = plain(self)
        # A plan without them keeps the name that it had before there were audits, live tasks and other aims.
        absent = {key for key in ("audit", "contamination") if not content[key]}
        absent |= {"aim"} if self.aim == "score" else set()
        return content_hash({key: value for key, value in content.items() if key not in absent})


def announce(
    candidate_id: str,
    incumbent_id: str,
    suites: Mapping[str, str],
    primary: str,
    config: GateConfig,
    *,
    history: Sequence[Verdict] = (),
    anchors: Mapping[str, str] | None = None,
    clusters: Mapping[str, Any] | None = None,
    price_book: str = "",
    looks_by_hand: int = 0,
    audit: Config | None = None,
    contamination: Mapping[str, Any] | None = None,
    aim: Aim = "score",
) -> Plan:
    """The plan of the ruling that follows ``history``: all verdicts of the series so far, oldest first."""
    trials = trials_of(history)
    return Plan(
        candidate_id=candidate_id,
        incumbent_id=incumbent_id,
        anchors=dict(anchors or {}),
        primary=primary,
        suites=dict(sorted(suites.items())),
        gate=config.as_planned(),
        trial=len(trials) + 1,
        level=next_level(config.series, config.alpha, trials),
        history=content_hash(history),
        clusters=content_hash(dict(clusters)) if clusters else "",
        price_book=price_book,
        looks_by_hand=looks_by_hand,
        audit=audit.model_dump(mode="json") if audit else {},
        contamination=dict(contamination or {}),
        aim=aim,
    )


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that was written as JSON; has the hash of the original."""
    return Plan(**data)


def uses_of(suite_hash: str, history: Sequence[Verdict]) -> int:
    """How many verdicts have looked at these tasks before: each one makes the next say less.

    A verdict looks at every suite that it rests on, whether it promoted by it or not.
    """
    return sum(suite_hash in dict(verdict.evidence.get("suite_hashes", {})).values() for verdict in history)
