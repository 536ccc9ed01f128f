"""Reward integrity: do the rewards still mean what they stand for? A share of the tries is judged by a gold verifier, too.

A verifier is cheap and can be fooled; what it stands for is dear to find out (a person, a slower check, an outcome that comes
later). With rewards r of all n tries and gold g of a random m of them, the prediction-powered mean of gold is::

    ĝ = mean(r) + mean over the audited of (g − r)          Var(ĝ) = Var(g)/n + Var(g − r)·(1/m − 1/n)

Where verifier and gold agree, it is as precise as n gold judgements; where they do not, it is right all the same, and wide.
(Angelopoulos et al., "Prediction-powered inference", Science 2023; the audited are among the n here, hence the second form.)

The alarm is an e-process on r − g of the audited tries, of the hypothesis that the verifier overstates by no more than a
tolerance: it may be looked at after every one, and a verifier that does not is accused with a chance of α at most.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from pydantic import Field

from evergrad.config import Config
from evergrad.evals._checks import Ruling
from evergrad.evals.evaluation import EvalError
from evergrad.evals.sequential import Bettor
from evergrad.evals.statistics import Z95
from evergrad.types import EvalReport


class AuditConfig(Config):
    """How much is judged by gold, and what the verifier is allowed."""

    share: float = Field(default=0.5, gt=0, le=1)
    """Of the tasks of each evaluation."""
    training_share: float = Field(default=0.05, ge=0, le=1)
    """Of the rollouts that are trained on; an alarm there ends the training."""
    tolerance: float = Field(default=0.05, ge=0, lt=1)
    """By how much the mean reward may exceed the mean gold."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Largest chance that a verifier within the tolerance is accused; also the level at which a gain must hold by gold."""
    min_n: int = Field(default=30, ge=2)
    """Audited pairs below which nothing is promoted."""


@dataclass(frozen=True, slots=True)
class PoweredMean:
    """A mean of gold scores, from all rewards and a share of gold."""

    value: float
    se: float
    ci95: tuple[float, float]
    n: int
    audited: int


@dataclass(frozen=True, slots=True)
class Overstatement:
    """What the audited tries say of the verifier."""

    audited: int
    reward: float
    """Mean of the audited tries by the verifier."""
    gold: float
    """Mean of the same tries by gold."""
    e_value: float
    """The largest that the e-process came to."""
    alarm: bool

    @property
    def told(self) -> str:
        return f"reward {self.reward:.3f}, gold {self.gold:.3f} on {self.audited} audited tries, e = {self.e_value:.3g}"


def is_audited(key: str, share: float) -> bool:
    """Whether a rollout is judged by gold: by a hash of its id, so that a second run asks about the same ones."""
    return _place(key) < share


def audited_tasks(task_ids: Iterable[str], share: float) -> frozenset[str]:
    """The tasks of a suite that are judged by gold: a fixed number of them, the same for every version.

    >>> len(audited_tasks([f"t{i}" for i in range(96)], 0.5))
    48
    """
    ordered = sorted(task_ids, key=_place)
    return frozenset(ordered[: math.ceil(share * len(ordered))])


def powered_mean(rewards: Mapping[str, float], gold: Mapping[str, float]) -> PoweredMean:
    """The prediction-powered mean of gold; differences of paired tries are fine in the place of scores.

    >>> found = powered_mean({"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0}, {"a": 1.0, "b": 0.0})
    >>> found.value, found.n, found.audited
    (0.0, 4, 2)

    Raises:
        EvalError: fewer than two audited tries, or one without a reward.
    """
    if len(gold) < 2 or not gold.keys() <= rewards.keys():
        raise EvalError(f"{len(gold)} audited tries of {len(rewards)} rewards", hint="audit two at least, each with a reward")
    n, m = len(rewards), len(gold)
    corrections = [gold[key] - rewards[key] for key in gold]
    value = math.fsum(rewards.values()) / n + math.fsum(corrections) / m
    variance = _variance(list(gold.values())) / n + _variance(corrections) * (1 / m - 1 / n)
    se = math.sqrt(max(0.0, variance))
    return PoweredMean(value, se, (value - Z95 * se, value + Z95 * se), n, m)


def overstatement(pairs: Iterable[tuple[float, float]], config: AuditConfig) -> Overstatement:
    """Judges the verifier by (reward, gold) of audited tries, in the order in which they came.

    Raises:
        EvalError: a reward or gold outside of [0, 1].
    """
    bettor, highest, rewards, golds = Bettor(config.tolerance), 1.0, [], []
    for reward, gold in pairs:
        if not (0 <= reward <= 1 and 0 <= gold <= 1):
            raise EvalError(f"reward {reward} and gold {gold} cannot be audited", hint="both must lie in [0, 1]")
        highest = max(highest, bettor.see(reward - gold))
        rewards.append(reward)
        golds.append(gold)
    n = len(rewards)
    means = (math.fsum(rewards) / n, math.fsum(golds) / n) if n else (0.0, 0.0)
    return Overstatement(n, *means, highest, highest >= 1 / config.alpha)


def rule_integrity(ruling: Ruling, suite: str, candidate: EvalReport, incumbent: EvalReport, config: AuditConfig) -> None:
    """Refuses a candidate whose gain is the verifier's word alone; all that it rests on goes into the evidence."""
    chosen = audited_tasks([*candidate.scores, *candidate.missing], config.share)
    pairs = [each for each in sorted(chosen, key=_place) if each in candidate.gold and each in incumbent.gold]
    if len(pairs) < config.min_n:
        ruling.refusals.append(f"{suite}: {len(pairs)} pairs were audited by gold, preset are at least {config.min_n}")
        return
    try:
        found = overstatement([(candidate.scores[each], candidate.gold[each]) for each in pairs], config)
    except EvalError as error:
        ruling.refusals.append(f"{suite}: {error}")
        return
    common = candidate.scores.keys() & incumbent.scores.keys()
    gain = powered_mean(
        {each: candidate.scores[each] - incumbent.scores[each] for each in common},
        {each: candidate.gold[each] - incumbent.gold[each] for each in pairs},
    )
    bound = gain.value - NormalDist().inv_cdf(1 - config.alpha) * gain.se
    ruling.evidence["integrity"] = _evidence(found, gain, bound, config)
    interval = f"[{gain.ci95[0]:.4f}, {gain.ci95[1]:.4f}]"
    if found.alarm:
        ruling.refusals.append(f"{suite}: the verifier overstates the candidate ({found.told}): it is not to be trusted")
    if bound <= 0:
        ruling.refusals.append(f"{suite}: by gold no gain is shown: {gain.value:+.4f}, 95% interval {interval}")
    ruling.findings.append(f"gold agrees: {found.told}; gain by gold {gain.value:+.4f}, 95% interval {interval}")


def _evidence(found: Overstatement, gain: PoweredMean, bound: float, config: AuditConfig) -> dict[str, Any]:
    return {
        "audited": found.audited,
        "reward": found.reward,
        "gold": found.gold,
        "e_value": found.e_value,
        "alarm": found.alarm,
        "tolerance": config.tolerance,
        "gain_by_gold": gain.value,
        "gain_se": gain.se,
        "gain_ci95": gain.ci95,
        "gain_bound": bound,
    }


def _variance(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _place(key: str) -> float:
    return int.from_bytes(hashlib.blake2b(f"gold/{key}".encode(), digest_size=7).digest(), "big") / 2**56
