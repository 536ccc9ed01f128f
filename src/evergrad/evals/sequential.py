"""E-processes: evidence that may be looked at after every task, and stopped at any time.

An e-process starts at 1 and, while the hypothesis holds, is below 1/α for ever with probability 1 − α (Ville's inequality).
So a candidate can be given up, or a canary rolled back, the moment it crosses, however often one has looked.

Wins and losses alone (uniform mixture over win rates between 1/2 and 1)::

    E(w, l) = 2^{w+l+1} · B(w+1, l+1) · (1 − I_{1/2}(w+1, l+1))

Graded scores (betting; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2023)::

    X = (D + 1)/2,   m = (1 + θ)/2,   E = Π (1 + λ_i (X_i − m)),   λ_i from the past alone, in [0, 1/(2m)]

tests the hypothesis that the mean difference D is θ or less: θ = 0 for a gain, θ = −δ for "no worse than δ". For harm, swap
the arms. One cluster is one observation: of tasks that belong together, give the mean.

A rate that may have fallen (a mixture over all lower rates q; the largest r that stays below 1/α is the upper end of a
confidence sequence)::

    E(s, f) = 1/r · ∫₀ʳ (q/r)^s ((1 − q)/(1 − r))^f dq = B(s+1, f+1) · I_r(s+1, f+1) / (r^{s+1} (1 − r)^f)

E-processes need more evidence than a test at a preset n. Promotions are ruled by the exact test; these are for stopping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from evergrad.evals.evaluation import EvalError, GiveUp

_LARGEST_LOG = 700.0
"""Where e-values end, just short of what a float holds; a smaller one than earned is valid evidence still."""


def mixture_e_value(wins: int, losses: int) -> float:
    """E-value of the hypothesis that a win is no likelier than a loss; ties are left out.

    >>> round(mixture_e_value(70, 30), 2)
    854.59
    >>> mixture_e_value(0, 0)
    1.0
    """
    from scipy.special import betaincc, betaln

    if wins < 0 or losses < 0:
        raise EvalError(f"{wins} wins and {losses} losses", hint="count each pair once")
    log_e = (wins + losses + 1) * math.log(2) + betaln(wins + 1, losses + 1)
    above = float(betaincc(wins + 1, losses + 1, 0.5))
    return math.exp(min(_LARGEST_LOG, log_e + math.log(above))) if above > 0 else 0.0


def fall_e_value(successes: int, failures: int, rate: float) -> float:
    """E-value of the hypothesis that each try succeeds with probability ``rate`` or more.

    >>> round(fall_e_value(1, 3, 0.5), 3), fall_e_value(0, 0, 0.9)
    (1.3, 1.0)
    """
    from scipy.special import betainc, betaln

    if successes < 0 or failures < 0 or not 0 < rate < 1:
        raise EvalError(f"{successes} successes, {failures} failures at rate {rate}", hint="give counts, and a rate in (0, 1)")
    below = float(betainc(successes + 1, failures + 1, rate))
    if below == 0:
        return 0.0
    log_e = betaln(successes + 1, failures + 1) + math.log(below)
    log_e -= (successes + 1) * math.log(rate) + failures * math.log1p(-rate)
    return math.exp(min(_LARGEST_LOG, log_e))


def success_upper_bound(successes: int, failures: int, alpha: float) -> float:
    """Upper end of the confidence sequence of a success rate: wrong at any time, ever, with probability ``alpha`` at most.

    >>> success_upper_bound(0, 0, 0.01), round(success_upper_bound(3, 21, 0.01), 2)
    (1.0, 0.44)
    """
    low, high = successes / max(1, successes + failures), 1.0
    if failures == 0:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle >= 1.0 or fall_e_value(successes, failures, middle) >= 1 / alpha:
            high = middle
        else:
            low = middle
    return high


def betting_e_process(differences: Iterable[float], *, threshold: float = 0.0) -> list[float]:
    """The e-process after each difference, of the hypothesis that their mean is ``threshold`` or less.

    Args:
        differences: Score of the one arm less that of the other, in [−1, 1]; one per independent cluster.
        threshold: θ in (−1, 1).

    Raises:
        EvalError: a difference outside of [−1, 1], or not finite.
    """
    bettor = Bettor(threshold)
    return [bettor.see(difference) for difference in differences]


class Bettor:
    """A betting e-process, one observation at a time.

    The stake is the Kelly bet for the mean and variance seen so far (with one imagined observation at the hypothesis and a
    variance of 1/4), never more than half of what could be lost, so that no single loss ruins it.

    >>> bettor = Bettor()
    >>> [round(bettor.see(1.0), 3) for _ in range(3)]
    [1.0, 1.5, 2.25]
    """

    def __init__(self, threshold: float = 0.0) -> None:
        if not -1 < threshold < 1:
            raise EvalError(f"threshold {threshold} is no mean difference of scores", hint="give a number between -1 and 1")
        self.value = 1.0
        self._mean = (1 + threshold) / 2
        self._n, self._sum, self._squares = 1, self._mean, 0.25

    def see(self, difference: float) -> float:
        """The e-value after one more difference."""
        if not -1 <= difference <= 1:
            raise EvalError(f"difference {difference} is outside of [-1, 1]", hint="scores must lie between 0 and 1")
        observed = (difference + 1) / 2
        self.value = min(math.exp(_LARGEST_LOG), self.value * (1 + self._stake() * (observed - self._mean)))
        before = self._sum / self._n
        self._n, self._sum = self._n + 1, self._sum + observed
        self._squares += (observed - before) * (observed - self._sum / self._n)
        return self.value

    def _stake(self) -> float:
        gain = self._sum / self._n - self._mean
        variance = self._squares / self._n
        return min(max(0.0, gain / (variance + gain * gain)), 0.5 / self._mean)


def give_up_on(rival: Mapping[str, float], alpha: float) -> GiveUp:
    """Gives an evaluation up once it is shown to score less than ``rival``, whose scores are by task id.

    One that is not worse is given up with probability ``alpha`` at most. Graded scores beyond [0, 1] are never given up on.
    """
    bettor, sound = Bettor(), True

    def ask(task_id: str, score: float) -> bool:
        nonlocal sound
        sound = sound and 0 <= score <= 1 and 0 <= rival.get(task_id, 0.0) <= 1
        if not sound or task_id not in rival:
            return False
        return bettor.see(rival[task_id] - score) >= 1 / alpha

    return ask
