"""The gate's guard on latency: is a try shown not to take longer than it may?

For each task, the ratio of the candidate's seconds to the incumbent's. A few tries that had to wait would rule a mean of
seconds, so it is their *geometric* mean that is bounded: the mean D of the log-ratios, with the standard error of paired
differences (clustered where tasks are)::

    exp(D + z · SE) < 1 + limit        z: the upper quantile 1 − alpha of the normal distribution
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from evergrad.evals._checks import Reports, Ruling
from evergrad.evals.statistics import paired_difference


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds from request to answer, all turns of a try together, on the primary suite by task id."""

    candidate: Mapping[str, float]
    incumbent: Mapping[str, float]


def latency_ratio(
    after: Mapping[str, float], before: Mapping[str, float], alpha: float, clusters: Mapping[str, Hashable] | None = None
) -> tuple[float, float]:
    """Geometric mean of the ratios of positive seconds, task by task, and its upper 1 − ``alpha`` bound.

    >>> ratio, bound = latency_ratio({"a": 2.2, "b": 1.1}, {"a": 2.0, "b": 1.0}, 0.05)
    >>> round(ratio, 3), round(bound, 3)
    (1.1, 1.1)
    """
    logs = [{task_id: math.log(value) for task_id, value in seconds.items()} for seconds in (after, before)]
    pairs = paired_difference(logs[0], logs[1], clusters)
    return math.exp(pairs.delta), math.exp(pairs.delta + NormalDist().inv_cdf(1 - alpha) * pairs.se)


def rule_latency(ruling: Ruling, suite: str, candidate: Reports, incumbent: Reports, latencies: Latencies | None) -> None:
    """Refuses a candidate that is not shown to be quick enough, where a limit is set."""
    limit = ruling.config.max_latency_increase
    if limit is None:
        return
    if latencies is None:
        ruling.refusals.append("a limit on latency is set, but no seconds are given")
        return
    if suite not in incumbent or {("candidate", suite), ("incumbent", suite)} - ruling.usable:
        return
    common = [task_id for task_id in candidate[suite].scores if task_id in incumbent[suite].scores]
    ours, theirs = _timed(latencies.candidate, common), _timed(latencies.incumbent, common)
    if ours is None or theirs is None or len(common) < 2:
        ruling.refusals.append(f"{suite}: a limit on latency is set, but some of the {len(common)} pairs have no seconds")
        return
    ratio, bound = latency_ratio(ours, theirs, ruling.config.alpha, ruling.clusters)
    ruling.evidence["latency"] = {"ratio": ratio, "upper_bound": bound, "limit": 1 + limit, "n": len(common)}
    told = (
        f"{suite}: a try takes {ratio:.3f} times the incumbent's seconds (geometric mean of {len(common)} pairs), at most "
        f"{bound:.3f} with {1 - ruling.config.alpha:.0%} confidence"
    )
    if bound < 1 + limit:
        ruling.findings.append(told)
    else:
        ruling.refusals.append(f"{told}; the limit is {1 + limit:g}")


def _timed(seconds: Mapping[str, float], tasks: list[str]) -> dict[str, float] | None:
    """The seconds of all ``tasks``; ``None`` where one has none, or what is no duration."""
    known = {task_id: seconds[task_id] for task_id in tasks if 0 < seconds.get(task_id, math.nan) < math.inf}
    return known if len(known) == len(tasks) else None
