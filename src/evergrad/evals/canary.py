"""The canary: live sessions decide whether a candidate that passed the gate harms anyone.

Every session is dealt to one of the two versions by a hash of its id, so sides are compared as in a randomized trial. Sessions
come in some order, and form blocks: all since the last block, as soon as both sides are in it. A block gives one difference,
the incumbent's mean less the candidate's, in [−1, 1]. Where a block ends depends on the sides alone, so while the candidate is
no worse its expectation is 0 or less, whatever the share of the sessions, and a betting e-process on the blocks
(:class:`~evergrad.evals.sequential.Bettor`) is a fair game. What befalls both sides alike, such as a change of the traffic, is
no harm: only the block in which it falls compares sessions before it with sessions after it. Two things are harm, and each has
its process:

- lower scores, of the sessions that were scored;
- sessions that nobody could score, because engine, tools or verifier failed, and more often so on the candidate's side.

Their mean is an e-process too (a mean of fair games is one). It may be looked at after every session: that a harmless
candidate ever comes to 1/α has a chance of α at most (Ville's inequality), over all stages of its release together.

**Customers** are no sample: they come when they choose and ask what they choose, more of them after a bad day, other ones at
night, and only some say what became of it. Blocks would not do, for one compares earlier sessions with later ones. So nothing
is assumed of them but the coin of their side, which is tossed when a session begins, is unknown to them, and comes down
for the candidate with the known chance s, its share. Each session counts once, as (weights of Horvitz and Thompson, 1952; over
time: Ham, Bojinov, Lindon and Tingley, "Design-based confidence sequences", 2022)::

    X = (Y − b) / (1 − s) on the incumbent's side,   X = −(Y − b) / s on the candidate's,   bets on min(s, 1 − s) · X

where b is the mean score of the incumbent's customers so far. Whoever comes, with whatever would become of him on either side,
X has the expectation Y(incumbent) − Y(candidate) over that coin alone: 0 where the version makes no difference to what is said
of it and when. It stays a fair game however the customers of today depend on the outcomes of yesterday, for a coin that is
still to be tossed depends on nothing. A session that nobody judges is no bet on either side. What the process cannot see is
a candidate of which the disappointed keep silent more often than they do of the incumbent.

With the first customer's session half of what was won so far is staked on customers, and half stays with the loop's own
sessions; without customers all of it does. Capital that is split at a time known beforehand is a fair game as before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator

from evergrad.config import Config
from evergrad.evals.evaluation import EvalError
from evergrad.evals.sequential import Bettor
from evergrad.types import SessionOutcome, Side


class CanaryConfig(Config):
    """The stages between the gate's word and the whole of the traffic; registered before a candidate meets any of it."""

    shadow: int = Field(default=0, ge=0)
    """Live requests whose copies the candidate answers first, unseen; 0 leaves this stage out."""
    shares: tuple[float, ...] = (0.01, 0.05, 0.25)
    """Of the sessions, one stage after another; after the last the alias moves, and all are the candidate's."""
    outcomes: int = Field(default=50, ge=1)
    """Scored sessions of the candidate that end a stage, if there is no harm by then; of those that the run plays itself."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Largest chance that a candidate which is no worse is rolled back, over all stages together."""
    margin: float = Field(default=0.0, ge=0, lt=1)
    """How much worse, in mean score, counts as no harm."""

    @field_validator("shares")
    @classmethod
    def _grow(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        if not shares or any(not 0 < share < 1 for share in shares):
            raise ValueError(f"shares = {list(shares)}: give at least one, each above 0 and below 1; the whole comes by itself")
        if any(later <= earlier for earlier, later in itertools.pairwise(shares)):
            raise ValueError(f"shares = {list(shares)} must grow from one to the next: a session never changes sides")
        return shares

    def after(self, share: float) -> float | None:
        """The share that follows; ``None`` after the last.

        >>> CanaryConfig().after(0.0), CanaryConfig().after(0.05), CanaryConfig().after(0.25)
        (0.01, 0.25, None)
        """
        return next((each for each in self.shares if each > share), None)


class CanaryStep(StrEnum):
    """What follows from the outcomes so far."""

    HOLD = "hold"
    """The stage goes on."""
    WIDEN = "widen"
    """The next share, or after the last of them the whole."""
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class CanaryRuling:
    """The canary's word on one release as it stands."""

    step: CanaryStep
    reason: str
    """One sentence."""
    evidence: dict[str, Any]
    """JSON values: the e-value and its threshold; by side ``sessions``, ``scored``, ``mean`` of what the loop played, and where
    customers came, the same of them under ``customers``."""


class HarmTest:
    """The e-process of harm, one session at a time.

    >>> test = HarmTest()
    >>> good, bad = SessionOutcome("a", Side.INCUMBENT, 1.0, 0.5), SessionOutcome("b", Side.CANDIDATE, 0.0, 0.5)
    >>> [round(test.see(each), 2) for each in (good, bad, good, bad, good, bad)]
    [1.0, 1.0, 1.0, 1.25, 1.25, 1.62]

    Args:
        margin: How much worse, in mean score, counts as no harm.
    """

    def __init__(self, margin: float = 0.0) -> None:
        self._scores, self._answers = _Blocks(Bettor(margin)), _Blocks(Bettor())
        self._customers: tuple[_Dealt, _Dealt] | None = None
        self._margin, self._staked = margin, 0.0

    @property
    def e_value(self) -> float:
        """As it stands."""
        own = (self._scores.e_value + self._answers.e_value) / 2
        if self._customers is None:
            return own
        scores, answers = self._customers
        return (own + self._staked * (scores.e_value + answers.e_value) / 2) / 2

    def see(self, outcome: SessionOutcome) -> float:
        """The e-value after one more session.

        Raises:
            EvalError: its score is not in [0, 1], or it is a customer's for whose side no coin was tossed.
        """
        if outcome.score is not None and not 0 <= outcome.score <= 1:
            raise EvalError(
                f"the score {outcome.score} of session {outcome.session_id} is outside of [0, 1]",
                hint="bound it before it is put down",
            )
        if outcome.by_customer:
            self._see_customer(outcome)
            return self.e_value
        if outcome.score is not None:
            self._scores.see(outcome.side, outcome.score)
        self._answers.see(outcome.side, float(outcome.score is not None))
        return self.e_value

    def _see_customer(self, outcome: SessionOutcome) -> None:
        if not 0 < outcome.share < 1:
            raise EvalError(
                f"session {outcome.session_id} was dealt to the candidate with the chance {outcome.share:g}",
                hint="only sessions that could have come to either side say anything",
            )
        if self._customers is None:
            self._staked, self._customers = self.e_value, (_Dealt(self._margin), _Dealt())
        scores, answers = self._customers
        if outcome.score is not None:
            scores.see(outcome.side, outcome.score, outcome.share)
        answers.see(outcome.side, float(outcome.score is not None), outcome.share)


class _Blocks:
    """One number per session as one difference per block, bet upon."""

    def __init__(self, bettor: Bettor) -> None:
        self._bettor = bettor
        self._block: dict[Side, list[float]] = {side: [] for side in Side}

    @property
    def e_value(self) -> float:
        return self._bettor.value

    def see(self, side: Side, value: float) -> None:
        self._block[side].append(value)
        if all(self._block.values()):
            self._bettor.see(_mean(self._block[Side.INCUMBENT]) - _mean(self._block[Side.CANDIDATE]))
            self._block = {side: [] for side in Side}


class _Dealt:
    """One number per session, weighed by the chance of the side that it was dealt to, and bet upon.

    Args:
        margin: How much less, in the mean, counts as no harm.
    """

    def __init__(self, margin: float = 0.0) -> None:
        self._bettor, self._margin = Bettor(), margin
        self._sum, self._count = 0.5, 1
        """Of the incumbent's, with one imagined before any was seen: the baseline is known before the coin is tossed."""

    @property
    def e_value(self) -> float:
        return self._bettor.value

    def see(self, side: Side, value: float, share: float) -> None:
        above = value - self._sum / self._count
        weighed = above / (1 - share) if side is Side.INCUMBENT else -above / share
        # Within [−1, 1] but for the last bit of a float.
        bet = min(share, 1 - share) * (weighed - self._margin) / (1 + self._margin)
        self._bettor.see(max(-1.0, min(1.0, bet)))
        if side is Side.INCUMBENT:
            self._sum, self._count = self._sum + value, self._count + 1


def rule_on_canary(config: CanaryConfig, outcomes: Sequence[SessionOutcome], share: float) -> CanaryRuling:
    """What follows for a release at ``share`` from all outcomes of it, in the order in which they came.

    The same outcomes always give the same word, so that nothing but they need be kept. A stage ends with the registered number
    of sessions that the loop played: how many customers come, and when, is not for it to wait for.
    """
    e_value, seen = _highest(config, outcomes)
    evidence: dict[str, Any] = {"e_value": e_value, "threshold": 1 / config.alpha, "share": share}
    own, customers = ([each for each in outcomes[:seen] if each.by_customer is by] for by in (False, True))
    evidence |= _by_side(own)
    if customers:
        evidence["customers"] = _by_side(customers)
    told = _told(evidence)
    if e_value >= 1 / config.alpha:
        return CanaryRuling(CanaryStep.ROLL_BACK, f"harm at {share:.4g} of the sessions: {told}", evidence)
    here = [each for each in outcomes if each.side is Side.CANDIDATE and each.share == share and not each.by_customer]
    scored = sum(each.score is not None for each in here)
    if len(here) - scored > config.outcomes:
        reason = f"{len(here) - scored} of {len(here)} sessions of the candidate could not be scored: {told}"
        return CanaryRuling(CanaryStep.ROLL_BACK, reason, evidence)
    if scored >= config.outcomes:
        return CanaryRuling(CanaryStep.WIDEN, f"no harm in {scored} sessions at {share:.4g} of all: {told}", evidence)
    return CanaryRuling(CanaryStep.HOLD, f"{scored} of {config.outcomes} sessions at {share:.4g} of all: {told}", evidence)


def _highest(config: CanaryConfig, outcomes: Sequence[SessionOutcome]) -> tuple[float, int]:
    """The e-value where it first crosses 1/α, else where it stands now, and how many outcomes that took."""
    test, value = HarmTest(config.margin), 1.0
    for count, outcome in enumerate(outcomes, start=1):
        value = test.see(outcome)
        if value >= 1 / config.alpha:
            return value, count
    return value, len(outcomes)


def _by_side(outcomes: Sequence[SessionOutcome]) -> dict[str, Any]:
    return {side.value: _summary(each for each in outcomes if each.side is side) for side in Side}


def _summary(outcomes: Iterable[SessionOutcome]) -> dict[str, Any]:
    scores = [each.score for each in outcomes]
    scored = [score for score in scores if score is not None]
    return {"sessions": len(scores), "scored": len(scored), "mean": _mean(scored) if scored else None}


def _told(evidence: dict[str, Any]) -> str:
    customers = f"; customers: {_sides(evidence['customers'])}" if "customers" in evidence else ""
    return f"{_sides(evidence)}{customers}; e = {evidence['e_value']:.3g}, harm from {evidence['threshold']:.4g}"


def _sides(found_by_side: dict[str, Any]) -> str:
    parts = []
    for side in (Side.CANDIDATE, Side.INCUMBENT):
        found = found_by_side[side.value]
        mean = "no score" if found["mean"] is None else f"mean {found['mean']:.3f}"
        lost = found["sessions"] - found["scored"]
        parts.append(f"{side.value} {mean} of {found['sessions']}{f', {lost} not scored' if lost else ''}")
    return "; ".join(parts)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
