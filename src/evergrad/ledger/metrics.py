"""What costs mean: per token, per success, and intelligence per dollar with its interval.

Definitions, so that every figure can be recomputed by hand (S score, C cost in USD, both per attempt; n attempts)::

    cost per million tokens    1e6 · Σ cost / tokens delivered, plus 1e6 · training cost amortized per token
    cost per success           Σ cost / Σ success, failures in the numerator
    intelligence per dollar    R = S̄ / C̄,   Var(R) ≈ (s_S² + R²·s_C² − 2R·s_SC) / (n·C̄²)      (delta method, paired)
    marginal                   (s₁ − s₀) / T, in points (hundredths of score) per $1,000 of training cost T
    break-even                 N* = T / (g₁ − g₀) with net value per attempt g = V·s − c;  ROI = (N·Δg − T) / T

What is unpriced, or divided by nothing, is ``None``: never 0, never infinity by accident.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from evergrad.ledger.prices import LedgerError

Z95 = 1.959963984540054
"""Two-sided 95% point of the normal distribution."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class CostPerSuccess:
    """Dollars per success.

    >>> cost_per_success(Decimal("0.90"), successes=0, attempts=30).lower_bound
    Decimal('0.30')
    """

    value: Decimal | None
    """``None`` without a success, or when unpriced."""
    lower_bound: Decimal | None
    """Without a success: at least so much, with 95% confidence (rule of three: a success rate of at most 3/n)."""


@dataclass(frozen=True, slots=True)
class IntelligencePerDollar:
    """Score per dollar, with a 95% interval."""

    value: float | None
    """``None`` when unpriced or free."""
    ci95: Interval | None
    """``None`` where ``value`` is, and for a single attempt."""
    n: int
    mean_score: float
    mean_cost: float | None


@dataclass(frozen=True, slots=True)
class MarginalIntelligence:
    """What a training run bought: points of score (hundredths) per $1,000."""

    value: float | None
    ci95: Interval | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Intelligence per dollar of one arm over that of another."""

    ratio: float | None
    """``None`` when either arm has no intelligence per dollar, or the second has none at all."""
    ci95: Interval | None


@dataclass(frozen=True, slots=True)
class Arm:
    """One version in service: what an attempt scores and costs, training left out."""

    score: float
    cost_per_attempt: float
    """USD."""


@dataclass(frozen=True, slots=True)
class Payback:
    """Whether, and when, a promotion earns its training cost back."""

    gain_per_attempt: float
    """Δg in USD: value of the additional score less the additional cost."""
    break_even_attempts: float
    """N*; ``inf`` when an attempt gains nothing."""
    break_even_ci95: Interval | None
    roi: float | None
    """Over ``attempts``; ``None`` for a training that cost nothing."""
    roi_ci95: Interval | None
    break_even_successes: float
    """N* in successes from lower cost alone, whatever a success is worth; ``inf`` when a success got no cheaper."""


def cost_per_million_tokens(
    usd: Decimal | None, tokens: int, *, amortized_usd_per_token: Decimal = Decimal(0)
) -> Decimal | None:
    """Dollars per million delivered tokens; ``None`` when unpriced or when no token was delivered.

    Args:
        usd: Everything that serving cost, retries and aborts included.
        tokens: Prompt and output tokens of the responses that were delivered, whatever they were worth. Prompt tokens that
            the engine had computed before count: they were delivered, and are the cheaper for it.
        amortized_usd_per_token: Training cost, spread over the tokens that it will serve.

    >>> f"{cost_per_million_tokens(Decimal('0.66'), 1_500_000):.2f}"
    '0.44'
    """
    if usd is None or tokens <= 0:
        return None
    return 1_000_000 * (usd / tokens + amortized_usd_per_token)


def cost_per_success(usd: Decimal | None, *, successes: int, attempts: int) -> CostPerSuccess:
    """Dollars per success, the cost of all failed attempts included.

    Raises:
        LedgerError: more successes than attempts, or a negative count.
    """
    if not 0 <= successes <= attempts:
        raise LedgerError(f"{successes} successes in {attempts} attempts", hint="count each attempt once")
    if usd is None or attempts == 0:
        return CostPerSuccess(None, None)
    if successes:
        return CostPerSuccess(usd / successes, None)
    # At most 3/n succeed, and never more than all: cost per attempt · n/3, and at least the cost of one attempt.
    return CostPerSuccess(None, usd / Decimal(min(3, attempts)))


def intelligence_per_dollar(scores: Sequence[float], costs: Sequence[Decimal | float | None]) -> IntelligencePerDollar:
    """Mean score over mean cost; ``scores[i]`` and ``costs[i]`` belong to one attempt.

    Raises:
        LedgerError: different lengths, no attempt, or a number that is not finite.
    """
    n = len(scores)
    known = _checked(scores, costs)
    mean_score = math.fsum(scores) / n
    if known is None:
        return IntelligencePerDollar(None, None, n, mean_score, None)
    mean_cost = math.fsum(known) / n
    if mean_cost <= 0:
        return IntelligencePerDollar(None, None, n, mean_score, mean_cost)
    ratio = mean_score / mean_cost
    if n == 1:
        return IntelligencePerDollar(ratio, None, n, mean_score, mean_cost)
    # s_S² + R²·s_C² − 2R·s_SC is the variance of S − R·C, whose sum of squares cannot turn negative by rounding.
    residuals = [(score - mean_score) - ratio * (cost - mean_cost) for score, cost in zip(scores, known, strict=True)]
    variance = math.fsum(residual * residual for residual in residuals) / (n - 1)
    half = Z95 * math.sqrt(variance / n) / mean_cost
    return IntelligencePerDollar(ratio, (ratio - half, ratio + half), n, mean_score, mean_cost)


def compare_intelligence(
    before: tuple[Sequence[float], Sequence[Decimal | float | None]],
    after: tuple[Sequence[float], Sequence[Decimal | float | None]],
    *,
    fixed_usd_per_attempt: float = 0.0,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 4000,
    seed: int = 0,
) -> Comparison:
    """Intelligence per dollar of ``after`` over that of ``before``, with a 95% interval by a paired cluster bootstrap.

    Args:
        before: Scores and costs of the first arm; entry i of both arms is the same task.
        after: Scores and costs of the second.
        fixed_usd_per_attempt: Training cost spread over attempts, added to the second arm as a known number.
        clusters: Cluster of each task, drawn whole; each task its own by default.
        resamples: Bootstrap draws.
        seed: Of the draws.
    """
    import numpy as np

    n = len(before[0])
    if len(after[0]) != n or (clusters is not None and len(clusters) != n):
        raise LedgerError("arms and clusters must have an entry for each task", hint="pair the tasks of both arms")
    costs = [_checked(*before), _checked(*after)]
    if costs[0] is None or costs[1] is None:
        return Comparison(None, None)
    names = {name: index for index, name in enumerate(dict.fromkeys(clusters or range(n)))}
    member = np.array([names[name] for name in (clusters or range(n))])
    columns = np.array([before[0], costs[0], after[0], np.array(costs[1]) + fixed_usd_per_attempt], dtype=float)
    sums = np.stack([np.bincount(member, weights=column, minlength=len(names)) for column in columns])
    whole = sums.sum(axis=1)
    if min(whole[0], whole[1], whole[3]) <= 0:
        return Comparison(None, None)
    counts = np.random.default_rng(seed).multinomial(len(names), [1 / len(names)] * len(names), size=resamples)
    score_0, cost_0, score_1, cost_1 = sums @ counts.T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (score_1 / cost_1) / (score_0 / cost_0)
    usable = ratios[~np.isnan(ratios)]
    low, high = (float(value) for value in np.quantile(usable, [0.025, 0.975], method="nearest"))
    return Comparison(float((whole[2] / whole[3]) / (whole[0] / whole[1])), (low, high))


def marginal_intelligence(gain: float, usd: Decimal | float | None, *, ci95: Interval | None = None) -> MarginalIntelligence:
    """Points per $1,000 for a gain in score (0.1 is ten points) that cost ``usd``, the training cost taken as known.

    >>> marginal_intelligence(0.1, 500, ci95=(0.05, 0.15)).ci95
    (10.0, 30.0)
    """
    if usd is None or usd <= 0:
        return MarginalIntelligence(None, None)
    scale = 100 * 1000 / float(usd)
    return MarginalIntelligence(gain * scale, (ci95[0] * scale, ci95[1] * scale) if ci95 else None)


def payback(
    before: Arm,
    after: Arm,
    training_usd: Decimal | float | None,
    *,
    attempts: float,
    value_per_success: float,
    gain_ci95: Interval | None = None,
) -> Payback | None:
    """When a promotion pays, over so many ``attempts`` with successes worth so much; ``None`` when training is unpriced.

    ``gain_ci95`` is the interval of the gain in score; score and cost of the first arm, and both costs, count as known.
    """
    if training_usd is None:
        return None
    spent = float(training_usd)
    saving = before.cost_per_attempt - after.cost_per_attempt

    def gain(score_gain: float) -> float:
        return value_per_success * score_gain + saving

    def roi(score_gain: float) -> float | None:
        return (attempts * gain(score_gain) - spent) / spent if spent > 0 else None

    delta = after.score - before.score
    ends = None if gain_ci95 is None else (roi(gain_ci95[0]), roi(gain_ci95[1]))
    return Payback(
        gain_per_attempt=gain(delta),
        break_even_attempts=_over(spent, gain(delta)),
        # The larger the gain, the sooner it pays: the ends change places.
        break_even_ci95=None if gain_ci95 is None else (_over(spent, gain(gain_ci95[1])), _over(spent, gain(gain_ci95[0]))),
        roi=roi(delta),
        roi_ci95=(ends[0], ends[1]) if ends and ends[0] is not None and ends[1] is not None else None,
        break_even_successes=_over(
            spent, _over(before.cost_per_attempt, before.score) - _over(after.cost_per_attempt, after.score)
        ),
    )


def _over(amount: float, rate: float) -> float:
    """``amount / rate``; infinite, for a rate at which it is never reached."""
    return amount / rate if rate > 0 else math.inf


def _checked(scores: Sequence[float], costs: Sequence[Decimal | float | None]) -> list[float] | None:
    """The costs as floats, ``None`` when one is unpriced."""
    if len(scores) != len(costs) or not scores:
        raise LedgerError(f"{len(scores)} scores and {len(costs)} costs", hint="give one score and one cost for each attempt")
    known = [float(cost) for cost in costs if cost is not None]
    if not all(math.isfinite(value) for value in (*scores, *known)):
        raise LedgerError("a score or cost is not finite", hint="leave faulty attempts out, and say how many there were")
    if any(cost < 0 for cost in known):
        raise LedgerError("a cost is negative", hint="credits belong in the price book")
    return known if len(known) == len(costs) else None
