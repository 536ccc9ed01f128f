"""What more money will buy: reward as a sigmoid of dollars, with an interval.

The curve (ScaleRL, arXiv 2510.13786, equation 1), with C the dollars spent since reinforcement learning began::

    R(C) = R₀ + (A − R₀) / (1 + (C_mid / C)^B)

Few steps identify the ceiling A poorly, so that the interval matters more than the curve. It comes from a parametric bootstrap
in which each replicate fits the steps with fresh noise and with a fresh draw of a weak prior ("randomize then optimize",
Bardsley and others 2014). Where the steps say nothing of a parameter, the replicates spread as wide as the prior; where they
say much, the prior is drowned. A plain bootstrap of the residuals would be sure of a ceiling that nobody has seen yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evergrad.ledger.prices import LedgerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FEWEST_STEPS = 5
"""Steps from which on a curve is fitted: one more than it has parameters."""
REPLICATES = 200
_PRIOR_MEAN = (0.0, 1.0, 0.0, math.log(2))
_PRIOR_SD = (1.5, 2.0, 1.5, 0.8)
"""Of logit R₀, of logit of the share of what is left to gain that A gains, of ln C_mid over the dollars seen, of ln B."""
_LEAST_NOISE = 0.02
"""Of one step's mean reward: equal rewards in a few groups do not mean that the next step's would be the same."""
_HORIZONS, _ITERATIONS = 64, 60
_NEXT = 1.0001
"""The next dollars: so many times those spent."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One sigmoid of dollars.

    >>> round(Curve(0.5, 0.8, 1000.0, 1.0).reward(1000.0), 6)
    0.65
    """

    start: float
    """R₀, the reward before anything was spent."""
    ceiling: float
    """A, the reward that no money exceeds."""
    midpoint_usd: float
    """C_mid, where half of A − R₀ is gained."""
    steepness: float
    """B."""

    def reward(self, usd: float) -> float:
        """R(C) at ``usd`` dollars."""
        if usd <= 0:
            return self.start
        rise: float = (self.ceiling - self.start) / (1 + math.pow(self.midpoint_usd / usd, self.steepness))
        return self.start + rise

    def slope(self, usd: float) -> float:
        """dR/dC in reward per dollar, at ``usd`` > 0.

        >>> curve = Curve(0.5, 0.8, 1000.0, 1.0)
        >>> round(1e4 * curve.slope(732.0508), 6)
        1.0
        """
        x = math.pow(self.midpoint_usd / usd, self.steepness)
        return (self.ceiling - self.start) * self.steepness * x / (usd * (1 + x) ** 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 90% interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """
        >>> Estimate(0.2, 0.1, 0.3).times(10)
        Estimate(value=2.0, low=1.0, high=3.0)
        """
        return Estimate(factor * self.value, factor * self.low, factor * self.high)


@dataclass(frozen=True, eq=False)
class Forecast:
    """A fitted curve and its replicates."""

    curve: Curve
    spent_usd: float
    """Dollars of the last step that it was fitted to."""
    steps: int
    noise: float
    """Standard deviation of one step's mean reward around the curve."""
    _replicates: Floats
    """Start, ceiling, midpoint and steepness of each replicate, in rows; float64 [replicates, 4]."""

    def reward(self, usd: float) -> Estimate:
        """The mean reward after ``usd`` dollars since reinforcement learning began."""
        return _estimate(self.curve.reward(usd), self._at(usd))

    def gain(self, before_usd: float, after_usd: float) -> Estimate:
        """How much the reward rises from ``before_usd`` to ``after_usd``."""
        point = self.curve.reward(after_usd) - self.curve.reward(before_usd)
        return _estimate(point, self._at(after_usd) - self._at(before_usd))

    def observed(self, usd: float, steps: int = 1) -> Estimate:
        """Where the mean of ``steps`` measured rewards around ``usd`` will lie: the curve's interval and the steps' noise."""
        import numpy as np

        draws = np.random.default_rng(steps).normal(0.0, self.noise / math.sqrt(steps), len(self._replicates))
        return _estimate(self.curve.reward(usd), self._at(usd) + draws)

    @property
    def ceiling(self) -> Estimate:
        """A, the reward that no money exceeds."""
        return _estimate(self.curve.ceiling, self._replicates[:, 1])

    def marginal(self, at_usd: float | None = None, until_usd: float | None = None) -> Estimate:
        """Reward per dollar that the next dollars bring, at best: the steepest line from now to a later point of the curve.

        Wherever the curve bends down, that is its slope dR/dC. Before it does, the slope is small and would end a run that has
        only begun.

        Args:
            at_usd: Where on the curve; after what is spent by default.
            until_usd: The last point that can be reached; without one, 16 times as far.
        """
        import numpy as np

        now = self.spent_usd if at_usd is None else at_usd
        reach = max((until_usd or 16 * now) / now, _NEXT)
        later = now * np.geomspace(_NEXT, reach, _HORIZONS)
        rise = (self._curves(later) - self._at(now)[:, None]) / (later - now)[None, :]
        point = max((self.curve.reward(usd) - self.curve.reward(now)) / (usd - now) for usd in map(float, later))
        return _estimate(point, rise.max(axis=1))

    def _at(self, usd: float) -> Floats:
        import numpy as np

        column: Floats = self._curves(np.array([usd]))[:, 0]
        return column

    def _curves(self, usd: Floats) -> Floats:
        import numpy as np

        start, ceiling, midpoint, steepness = (column[:, None] for column in self._replicates.T)
        with np.errstate(divide="ignore", over="ignore"):
            curves: Floats = start + (ceiling - start) / (1 + (midpoint / np.maximum(usd, 1e-300)[None, :]) ** steepness)
        return curves


def fit_forecast(
    usd: Sequence[float], rewards: Sequence[float], *, bounds: tuple[float, float] = (0.0, 1.0), seed: int = 0
) -> Forecast | None:
    """Fits the sigmoid to the steps of one phase of reinforcement learning.

    Args:
        usd: Dollars since the phase began, after each step; rising, > 0.
        rewards: Mean reward of each step, within ``bounds``.
        bounds: The least and the largest reward that a rollout can have.
        seed: Of the replicates.

    Returns:
        ``None`` for fewer than ``FEWEST_STEPS`` steps.

    Raises:
        LedgerError: lengths that differ, dollars that do not rise, or a number that is not finite.
    """
    import numpy as np

    if len(usd) != len(rewards) or not all(map(math.isfinite, [*usd, *rewards])):
        raise LedgerError("a forecast needs a finite reward for each amount", hint="leave steps without a price out")
    if any(after <= before for before, after in zip([0.0, *usd], usd, strict=False)):
        raise LedgerError("the dollars of a forecast must rise from step to step", hint="count them from the phase's begin")
    if len(usd) < FEWEST_STEPS:
        return None
    low, high = bounds
    scale, freedom = usd[-1], max(1, len(usd) - 4)
    log_cost = np.log(np.asarray(usd) / scale)
    seen = np.clip((np.asarray(rewards, dtype=float) - low) / (high - low), 0.0, 1.0)
    mean, sd = np.array([_PRIOR_MEAN]), np.array([_PRIOR_SD])
    best, noise = mean, 0.1
    for _ in range(3):  # the noise decides how much the prior counts, and is known only from a fit
        best = _fit(log_cost, seen[None], np.array([noise]), mean, best)
        left = seen - _sigmoid(best, log_cost)[0][0]
        noise = max(_LEAST_NOISE, math.sqrt(float(left @ left) / freedom))
    draws = np.random.default_rng(seed)
    # A variance that is estimated from few steps is uncertain itself.
    own = np.clip(noise * np.sqrt(freedom / draws.chisquare(freedom, REPLICATES)), _LEAST_NOISE, 0.5)
    targets = seen + own[:, None] * draws.standard_normal((REPLICATES, len(seen)))
    priors = draws.normal(mean, sd, (REPLICATES, 4))
    fitted = _fit(log_cost, targets, own, priors, np.repeat(best, REPLICATES, axis=0))
    start, ceiling, midpoint, steepness = (float(value) for value in _natural(best, scale, low, high)[0])
    replicates = _natural(fitted, scale, low, high)
    return Forecast(Curve(start, ceiling, midpoint, steepness), scale, len(usd), noise * (high - low), replicates)


def _fit(log_cost: Floats, targets: Floats, noise: Floats, priors: Floats, begin: Floats) -> Floats:
    """Penalized least squares for all rows at once (Levenberg and Marquardt); one problem of four unknowns each.

    Args:
        log_cost: ln of the dollars over the last; [n].
        targets: Rewards within 0 and 1; [m, n].
        noise: Standard deviation of a reward; [m].
        priors: Where each row's parameters are drawn to; [m, 4].
        begin: [m, 4].
    """
    import numpy as np

    weight, pull = 1 / noise[:, None], 1 / np.array(_PRIOR_SD)

    def loss(theta: Floats) -> Floats:
        misfit, drawn = (_sigmoid(theta, log_cost)[0] - targets) * weight, (theta - priors) * pull
        total: Floats = (misfit**2).sum(axis=1) + (drawn**2).sum(axis=1)
        return total

    theta, damping = begin.copy(), np.full(len(begin), 1e-2)
    now = loss(theta)
    for _ in range(_ITERATIONS):
        value, slopes = _sigmoid(theta, log_cost)
        scaled = slopes * weight[:, :, None]
        normal = np.einsum("mni,mnj->mij", scaled, scaled) + np.diag(pull**2)
        downhill = np.einsum("mni,mn->mi", scaled, (value - targets) * weight) + (theta - priors) * pull**2
        step = np.linalg.solve(normal + damping[:, None, None] * np.eye(4), downhill[:, :, None])[:, :, 0]
        tried = theta - step
        then = loss(tried)
        better = then < now
        theta, now = np.where(better[:, None], tried, theta), np.where(better, then, now)
        damping = np.clip(np.where(better, damping / 4, damping * 4), 1e-9, 1e9)
        if float(np.abs(step[better]).max(initial=0.0)) < 1e-5 and bool((better | (damping > 1e3)).all()):
            break
    return theta


def _sigmoid(theta: Floats, log_cost: Floats) -> tuple[Floats, Floats]:
    """Reward within 0 and 1 at the costs, and its derivatives by the four parameters; [m, n] and [m, n, 4]."""
    import numpy as np
    from scipy.special import expit

    start, share = expit(theta[:, 0:1]), expit(theta[:, 1:2])
    steepness = np.exp(np.clip(theta[:, 3:4], -5.0, 5.0))
    distance = log_cost[None, :] - theta[:, 2:3]
    along = expit(steepness * distance)
    climb = (1 - start) * share
    bend = climb * along * (1 - along)
    slopes = [
        start * (1 - start) * (1 - share * along),
        climb * (1 - share) * along,
        -bend * steepness,
        bend * steepness * distance,
    ]
    return start + climb * along, np.stack(slopes, axis=2)


def _natural(theta: Floats, scale: float, low: float, high: float) -> Floats:
    """R₀, A, C_mid and B of each row."""
    import numpy as np
    from scipy.special import expit

    start = expit(theta[:, 0])
    ceiling = start + (1 - start) * expit(theta[:, 1])
    span = high - low
    midpoint, steepness = scale * np.exp(np.clip(theta[:, 2], -50.0, 50.0)), np.exp(np.clip(theta[:, 3], -5.0, 5.0))
    return np.stack([low + span * start, low + span * ceiling, midpoint, steepness], axis=1)


def _estimate(value: float, replicates: Floats) -> Estimate:
    import numpy as np

    low, high = np.quantile(replicates, [0.05, 0.95])
    return Estimate(float(value), float(low), float(high))
