"""The statistics of paired comparison. D is a task's score under the candidate less that under the incumbent.

Standard error, clustered where clusters are given (Miller, "Adding error bars to evals", 2024)::

    SE² = n⁻² · Σ over clusters of (Σ (D_i − D̄))²          = (b + c − (b − c)²/n) / n²   for b wins, c losses, no clusters

Which test fits is a matter of the data: exact McNemar for independent 0/1 scores; for graded or clustered ones sign flips of
whole clusters, with an interval by the bootstrap of whole clusters.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from evergrad.evals.evaluation import EvalError

_NORMAL = NormalDist()
Z95 = _NORMAL.inv_cdf(0.975)
_FLIPS = 9999
_MOST_FLIPS = 2_000_000
_RESAMPLES = 4000

Alternative = Literal["two-sided", "greater"]
"""``greater``: only a gain counts as evidence."""


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Two versions on the same tasks.

    >>> pairs = paired_difference({"a": 1.0, "b": 1.0, "c": 0.0}, {"a": 0.0, "b": 1.0, "c": 0.0})
    >>> pairs.n, pairs.wins, pairs.losses
    (3, 1, 0)
    """

    n: int
    wins: int
    losses: int
    delta: float
    """Mean of D."""
    se: float
    ci95: tuple[float, float]
    binary: bool
    """All scores are 0 or 1."""
    cluster_sums: tuple[float, ...]
    """Sum of D in each cluster; without clusters, each D."""
    cluster_sizes: tuple[int, ...] = ()
    clustered: bool = False

    @property
    def counts_decide(self) -> bool:
        """Independent 0/1 scores: all that matters is how many were won and how many lost."""
        return self.binary and not self.clustered


def paired_difference(
    after: Mapping[str, float], before: Mapping[str, float], clusters: Mapping[str, Hashable] | None = None
) -> PairedDifference:
    """Pairs scores by task id over the tasks that both have.

    Raises:
        EvalError: no common task, or a score that is not finite.
    """
    common = [task_id for task_id in after if task_id in before]
    if not common:
        raise EvalError("no common task to compare", hint="evaluate both versions on the same tasks")
    pairs = [(float(after[task_id]), float(before[task_id])) for task_id in common]
    if not all(math.isfinite(score) for pair in pairs for score in pair):
        raise EvalError("a score is not finite", hint="name faulty tasks as missing")
    differences = [new - old for new, old in pairs]
    n = len(differences)
    delta = math.fsum(differences) / n
    groups: dict[Hashable, list[float]] = {}
    for task_id, difference in zip(common, differences, strict=True):
        groups.setdefault(task_id if clusters is None else clusters.get(task_id, task_id), []).append(difference)
    se = math.sqrt(math.fsum(math.fsum(value - delta for value in group) ** 2 for group in groups.values())) / n
    return PairedDifference(
        n=n,
        wins=sum(difference > 0 for difference in differences),
        losses=sum(difference < 0 for difference in differences),
        delta=delta,
        se=se,
        ci95=(delta - Z95 * se, delta + Z95 * se),
        binary=all(score in (0.0, 1.0) for pair in pairs for score in pair),
        cluster_sums=tuple(math.fsum(group) for group in groups.values()),
        cluster_sizes=tuple(len(group) for group in groups.values()),
        clustered=len(groups) < n,
    )


def mcnemar_p(wins: int, losses: int, alternative: Alternative = "two-sided") -> float:
    """Exact McNemar: the chance of a split at least as uneven if both sides were equally likely.

    >>> f"{mcnemar_p(70, 30):.3e}", f"{mcnemar_p(70, 30, 'greater'):.3e}"
    ('7.850e-05', '3.925e-05')
    """
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses, alternative=alternative).pvalue) if wins + losses else 1.0


def sign_flip_p(
    differences: Sequence[float], *, seed: int = 0, alternative: Alternative = "two-sided", level: float = 0.05
) -> float:
    """p of a mean of ``differences`` (one per independent cluster) if each sign were a coin's.

    Exact for up to thirteen that are not zero, else from 9,999 draws, the observed one counted among them; from more where
    ``level`` is so small that these could not fall below it.
    """
    import numpy as np
    from scipy.stats import permutation_test

    moving = np.array([value for value in differences if value != 0.0])
    if moving.size <= 1:
        return 1.0
    result = permutation_test(
        (moving,),
        lambda values, axis: values.sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        alternative=alternative,
        n_resamples=min(_MOST_FLIPS, max(_FLIPS, math.ceil(20 / level))),
        batch=_FLIPS + 1,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def superiority_p(
    pairs: PairedDifference, *, seed: int = 0, alternative: Alternative = "two-sided", level: float = 0.05
) -> tuple[str, float]:
    """Name and p-value of the test that fits: exact McNemar for independent 0/1 scores, else sign flips."""
    if pairs.counts_decide:
        return "exact McNemar", mcnemar_p(pairs.wins, pairs.losses, alternative)
    return "sign-flip permutation", sign_flip_p(pairs.cluster_sums, seed=seed, alternative=alternative, level=level)


def gain_interval(pairs: PairedDifference, *, seed: int = 0) -> tuple[str, tuple[float, float]]:
    """Name and 95% interval of the mean difference: Tango's for independent 0/1 scores, else a cluster bootstrap's.

    Whole clusters are drawn with replacement, as many as there are; the mean is over the tasks in those that were drawn.
    """
    import numpy as np

    if pairs.counts_decide:
        return "Tango score", tango_interval(pairs.wins, pairs.losses, pairs.n)
    if len(pairs.cluster_sums) == 1:
        return "normal", pairs.ci95
    sums, sizes = np.array(pairs.cluster_sums), np.array(pairs.cluster_sizes)
    counts = np.random.default_rng(seed).multinomial(sums.size, np.full(sums.size, 1 / sums.size), size=_RESAMPLES)
    means = (counts @ sums) / (counts @ sizes)
    low, high = np.quantile(means, [0.025, 0.975])
    return "cluster bootstrap", (float(low), float(high))


def tango_interval(wins: int, losses: int, n: int) -> tuple[float, float]:
    """95% score interval of a paired difference of success rates (Tango, Statistics in Medicine 17, 1998).

    All differences d whose score statistic, with the share q of losses estimated under d, is within the normal quantile::

        (wins − losses − n·d) / √(n · (2q + d·(1 − d)))

    Unlike the normal interval it stays within [−1, 1] and does not collapse where no task differs.

    >>> tuple(round(end, 4) for end in tango_interval(70, 30, 400))
    (0.0521, 0.1489)
    >>> tuple(round(end, 4) for end in tango_interval(0, 0, 96))
    (-0.0385, 0.0385)
    """
    from scipy.optimize import brentq

    def score(difference: float) -> float:
        b = (2 * n - wins + losses) * difference - wins - losses
        c = -losses * difference * (1 - difference)
        lost = max(0.0, (math.sqrt(b * b - 8 * n * c) - b) / (4 * n))
        variance = n * (2 * lost + difference * (1 - difference))
        gap = wins - losses - n * difference
        # At the ends of what is possible nothing varies; any finite number beyond the quantile does for the search.
        return max(-9.0, min(9.0, gap / math.sqrt(variance))) if variance > 0 else 9.0 * ((gap > 0) - (gap < 0))

    observed = (wins - losses) / n
    low = brentq(lambda difference: score(difference) - Z95, -1.0, observed) if observed > -1 else -1.0
    high = brentq(lambda difference: score(difference) + Z95, observed, 1.0) if observed < 1 else 1.0
    return float(low), float(high)


def sample_size(gain: float, discordance: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Pairs that show a gain in success rate by a one-sided test (normal approximation).

    Args:
        gain: Δ, the difference in success rate that should be seen.
        discordance: ψ, the share of tasks on which the two versions differ.
        alpha: One-sided level.
        power: Chance to see it.

    Raises:
        EvalError: numbers that no two versions can have.

    >>> sample_size(0.05, 0.25)  # 612.07
    613
    """
    if not 0 < gain <= discordance <= 1 or not 0 < alpha < power < 1:
        raise EvalError(
            f"no sample size for a gain of {gain} with a discordance of {discordance}", hint="0 < gain <= discordance"
        )
    points = _NORMAL.inv_cdf(1 - alpha) + _NORMAL.inv_cdf(power)
    return math.ceil(points**2 * (discordance - gain**2) / gain**2)


def non_inferiority_p(pairs: PairedDifference, margin: float) -> float:
    """One-sided p of the hypothesis that the candidate is worse by ``margin`` or more.

    Where no task differs, the normal approximation has nothing to go by; then p is the chance of seeing no loss among n
    tasks if a share of ``margin`` were lost.
    """
    if pairs.se > 0:
        return _NORMAL.cdf(-(pairs.delta + margin) / pairs.se)
    if pairs.delta < 0:
        return 0.0 if pairs.delta > -margin else 1.0
    independent = len(pairs.cluster_sums)
    return (1 - min(margin, 1.0)) ** independent if margin > 0 else 1.0


def cost_per_success_ratio(
    after: Mapping[str, float],
    before: Mapping[str, float],
    costs_after: Mapping[str, float],
    costs_before: Mapping[str, float],
    alpha: float,
    clusters: Mapping[str, Hashable] | None = None,
) -> tuple[float, float]:
    """Cost per success of the candidate over that of the incumbent, and its upper 1 − ``alpha`` bound (delta method on logs).

    An incumbent without any success has an infinite cost per success: the ratio is 0. A candidate without one: infinite.
    """
    common = [task_id for task_id in after if task_id in before]
    columns = [[source[task_id] for task_id in common] for source in (after, before, costs_after, costs_before)]
    success_1, success_0, cost_1, cost_0 = (math.fsum(column) / len(common) for column in columns)
    if success_1 <= 0 or cost_0 <= 0:
        return math.inf, math.inf
    if success_0 <= 0:
        return 0.0, 0.0
    ratio = (cost_1 / success_1) / (cost_0 / success_0)
    if ratio <= 0:
        return ratio, ratio
    weights = (-1 / success_1, 1 / success_0, 1 / cost_1, -1 / cost_0)
    influence = {
        task_id: sum(w * v for w, v in zip(weights, row, strict=True)) for task_id, *row in zip(common, *columns, strict=True)
    }
    spread = paired_difference(influence, dict.fromkeys(common, 0.0), clusters)
    return ratio, ratio * math.exp(_NORMAL.inv_cdf(1 - alpha) * spread.se)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95% interval of a success rate; stays within [0, 1] and does not collapse at its ends.

    >>> tuple(round(end, 3) for end in wilson_interval(96, 96))
    (0.962, 1.0)
    """
    if not 0 <= successes <= n or n == 0:
        raise EvalError(f"{successes} successes in {n} tries", hint="count each try once")
    share, square = successes / n, Z95 * Z95
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = Z95 / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(scores: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of a mean score: Wilson's for a share of successes, Student's t for graded scores.

    ``None`` where the scores say nothing of their spread: without any, or with graded ones that are all equal.

    >>> mean_interval([1.0] * 96) == wilson_interval(96, 96)
    True
    >>> tuple(round(end, 3) for end in mean_interval([0.2, 0.4, 0.6]) or ())
    (-0.097, 0.897)
    """
    if not scores:
        return None
    if all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(sum(map(int, scores)), len(scores))
    mean = math.fsum(scores) / len(scores)
    square = math.fsum((score - mean) ** 2 for score in scores)
    if square <= 0:
        return None
    half = t_quantile(len(scores) - 1) * math.sqrt(square / (len(scores) - 1) / len(scores))
    return mean - half, mean + half


def t_quantile(degrees: int) -> float:
    """Two-sided 95% point of Student's t: what a mean of ``degrees + 1`` values with an estimated spread needs for 1.96.

    >>> round(t_quantile(5), 2)
    2.57
    """
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Chance that at least one of ``k`` tries succeeds, without bias from ``successes`` in ``samples`` (Chen et al., 2021).

    Raises:
        EvalError: k beyond the samples, or counts that cannot be.

    >>> round(pass_at_k(4, 1, 2), 3)
    0.5
    """
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise EvalError(f"pass@{k} of {successes} successes in {samples} samples", hint=f"k must be between 1 and {samples}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)
