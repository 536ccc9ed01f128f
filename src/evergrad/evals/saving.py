"""The gate's other aim: the same success for fewer dollars.

A candidate on a smaller base model need not be better. It is promoted when two things are shown on the primary suite: that it
is not worse by the guards' margin or more, and that a success costs less than ``1 − min_saving`` times what it costs with the
incumbent. Both must hold, so the p-value of the whole is the larger of the two (an intersection–union test: Berger, 1982), and
it is this one that is held against the level of the try in its series.

Cost per success is compared block by block of :class:`~evergrad.evals.evaluation.Turns`. With C the seconds and S the summed
scores of all B blocks, small letters those of one, 1 the candidate and 0 the incumbent::

    R = (C₁/S₁) / (C₀/S₀)       u = c₁/C₁ − s₁/S₁ − c₀/C₀ + s₀/S₀       SE² = B/(B−1) · Σ u²
    p = P(t ≤ (log R − log(1 − min_saving)) / SE),    t of Student's distribution with B − 1 degrees of freedom

Seconds stand for dollars: both versions had the whole machine for theirs, at one price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from evergrad.evals._checks import Reports, Ruling, mismatch
from evergrad.evals._comparing import add_trial, compared, mean_score
from evergrad.evals.evaluation import EvalError, Turns
from evergrad.evals.plan import uses_of
from evergrad.evals.series import next_level, trials_of
from evergrad.evals.statistics import non_inferiority_p, paired_difference
from evergrad.types import EvalReport

BLOCKS = 12
"""Turns that each version has; fewer say too little of how uneven the machine is."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Cost per success of one version over that of another."""

    ratio: float
    upper_bound: float
    """Of the ratio, with the confidence that was asked for."""
    p_value: float
    """One-sided, of the hypothesis that the ratio is the limit or more."""
    seconds_per_success: tuple[float, float]
    """Of the machine: candidate and incumbent."""
    turns: int
    """That each version had."""


def saving(
    turns: Turns, after: Mapping[str, float], before: Mapping[str, float], *, least: float = 0.0, alpha: float = 0.05
) -> Saving:
    """Tests whether a success costs the candidate less than ``1 − least`` times what it costs the incumbent.

    >>> from itertools import repeat
    >>> blocks = tuple((f"t{number}",) for number in range(4))
    >>> scores = dict(zip((name for block in blocks for name in block), repeat(1.0)))
    >>> found = saving(Turns(blocks, (1.0, 1.1, 0.9, 1.0), (2.0, 2.1, 1.9, 2.0)), scores, scores)
    >>> round(found.ratio, 3), round(found.upper_bound, 3), found.p_value < 0.001
    (0.5, 0.525, True)

    Args:
        turns: Seconds by block, of both.
        after: Scores of the candidate by task id; a task without one adds its seconds, and no success.
        before: Those of the incumbent.
        least: The saving that must be exceeded, as a share.
        alpha: One less the confidence of the upper bound.

    A version that never succeeds has no cost per success, so that nothing is shown: p is 1.

    Raises:
        EvalError: fewer than two blocks, or seconds that are none.
    """
    from scipy.stats import t

    count = len(turns.blocks)
    successes = [
        [math.fsum(scores.get(task_id, 0.0) for task_id in block) for block in turns.blocks] for scores in (after, before)
    ]
    columns = (turns.candidate, successes[0], turns.incumbent, successes[1])
    totals = [math.fsum(column) for column in columns]
    if count < 2 or totals[0] <= 0 or totals[2] <= 0:
        raise EvalError(f"{count} blocks in {totals[0]:g} and {totals[2]:g} s show no cost", hint="time two blocks at least")
    if totals[1] <= 0 or totals[3] <= 0:
        ratio = math.inf if totals[1] <= 0 else 0.0
        return Saving(ratio, math.inf, 1.0, (_per(totals[0], totals[1]), _per(totals[2], totals[3])), count)
    seconds_per_success = (totals[0] / totals[1], totals[2] / totals[3])
    ratio = seconds_per_success[0] / seconds_per_success[1]
    signs = (1, -1, -1, 1)
    influence = [
        math.fsum(sign * value / total for sign, value, total in zip(signs, row, totals, strict=True))
        for row in zip(*columns, strict=True)
    ]
    error = math.sqrt(count / (count - 1) * math.fsum(each * each for each in influence))
    gap = math.log(ratio) - math.log1p(-least)
    # Where no two blocks differ, the ratio is what it is.
    p_value = float(t.cdf(gap / error, count - 1)) if error > 0 else float(gap >= 0)
    upper = ratio * math.exp(float(t.ppf(1 - alpha, count - 1)) * error)
    return Saving(ratio, upper, p_value, seconds_per_success, count)


def _per(seconds: float, successes: float) -> float:
    return seconds / successes if successes > 0 else math.inf


def rule_saving(
    ruling: Ruling, suite: str, candidate: Reports, incumbent: Reports, turns: Turns | None, looks_by_hand: int
) -> None:
    """Refuses a candidate that is not shown to be no worse on the primary suite and to cost less per success."""
    if suite not in incumbent:
        ruling.refusals.append(f"the incumbent has no report on the primary suite {suite}")
        return
    after, before, config = candidate[suite], incumbent[suite], ruling.config
    unusable = {("candidate", suite), ("incumbent", suite)} - ruling.usable
    if unusable or mismatch(ruling, suite, after, before, "incumbent"):
        return
    pairs = paired_difference(after.scores, before.scores, ruling.clusters)
    uses = uses_of(after.suite_hash, ruling.history)
    ruling.evidence |= {
        **compared(pairs, before, after, config.seed),
        "holdout": {"suite_hash": after.suite_hash, "uses_before": uses, "looks_by_hand": looks_by_hand},
        "slices": {"before": before.slice_means(), "after": after.slice_means()},
    }
    told = f"{suite}: {pairs.wins} won, {pairs.losses} lost of {pairs.n}"
    margin, found = config.guards.get(suite.partition("#")[0], config.guard_margin), _found(ruling, told, turns, after, before)
    if margin is None:
        ruling.refusals.append(f"{told}: the aim is a lower cost, and no margin says how much worse is no worse")
    if config.series == "e_lond":
        ruling.refusals.append(f"{told}: the aim is a lower cost, of which e_lond has no e-value")
    if margin is None or found is None or config.series == "e_lond":
        return
    not_worse, trials = non_inferiority_p(pairs, margin), trials_of(ruling.history)
    level, p_value = next_level(config.series, config.alpha, trials), max(not_worse, found.p_value)
    ruling.evidence["non_inferiority"] = {"margin": margin, "p_value": not_worse}
    # Whatever is refused for another reason already could not have been promoted by this: that is no try.
    if not ruling.refusals:
        add_trial(ruling, level, p_value, None)
    at, place = f"level {level:.3g} ({config.series})", f"try {len(trials) + 1} of the series"
    scores = f"mean score {mean_score(before):.3f} to {mean_score(after):.3f}"
    cost = f"a success costs {found.ratio:.3f} times what it did, at most {found.upper_bound:.3f} with {1 - config.alpha:.0%} "
    cost += "confidence"
    if not math.isfinite(found.upper_bound):
        cost = "one of the two never succeeds, and has no cost per success"
    if not_worse > level:
        ruling.refusals.append(f"{told}: {scores}, not shown to be no worse by {margin:g}: p = {not_worse:.3g}, {place}, {at}")
    if found.p_value > level:
        wanted = f"not shown to be below {1 - config.min_saving:g}"
        ruling.refusals.append(f"{told}: {cost}, {wanted}: p = {found.p_value:.3g}, {place}, {at}")
    ruling.findings.append(
        f"{told}: {scores}, no worse by the margin of {margin:g}, p = {not_worse:.3g}; {cost}, p = {found.p_value:.3g} "
        f"({found.turns} turns each); {place}: the larger p {p_value:.3g}, {at}"
    )


def _found(ruling: Ruling, told: str, turns: Turns | None, after: EvalReport, before: EvalReport) -> Saving | None:
    """The saving, on record; says why there is none."""
    config, problem = ruling.config, _problem(turns, after)
    if turns is None or problem:
        ruling.refusals.append(f"{told}: the aim is a lower cost, {problem}")
        return None
    found = saving(turns, after.scores, before.scores, least=config.min_saving, alpha=config.alpha)
    figures = {
        "cost_per_success_ratio": found.ratio,
        "upper_bound": found.upper_bound,
        "seconds_per_success_before": found.seconds_per_success[1],
        "seconds_per_success_after": found.seconds_per_success[0],
    }
    ruling.evidence["saving"] = {
        **{key: value if math.isfinite(value) else None for key, value in figures.items()},
        "limit": 1 - config.min_saving,
        "p_value": found.p_value,
        "turns": found.turns,
    }
    return found


def _problem(turns: Turns | None, report: EvalReport) -> str:
    """Why the seconds cannot be relied on; empty where they can."""
    if turns is None:
        return "and nobody has timed the two by turns"
    timed = [task_id for block in turns.blocks for task_id in block]
    if len(timed) != len(set(timed)) or set(timed) != {*report.scores, *report.missing}:
        return "and other tasks were timed than were scored"
    if len(turns.blocks) < BLOCKS:
        return f"and each version had {len(turns.blocks)} turns, preset are at least {BLOCKS}"
    seconds = (*turns.candidate, *turns.incumbent)
    if len(seconds) != 2 * len(turns.blocks) or not all(0 < each < math.inf for each in seconds):
        return "and some of the turns have no seconds"
    return ""
