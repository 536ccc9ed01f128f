"""Which way of getting better a cycle tries, or none: arms compete for the money by what their tries have gained so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.evals import Aim
from evergrad.ledger import NOTHING, Choice, Try, choose_arm
from evergrad.loop._figures import count, usd
from evergrad.loop._folder import LoopState, Stage
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._spending import budget_left
from evergrad.loop.config import MergeConfig, RunConfig
from evergrad.loop.triggers import URGENT
from evergrad.registry import Registry, base_model, parameter_count
from evergrad.types import ModelVersion


@dataclass(frozen=True, slots=True)
class MergePlan:
    """A merge to try: weights ``share`` of the way from those of ``parent`` to those of ``other``.

    >>> MergePlan("t-c1-rl", "t-c2-rl", 0.5).told
    '50% of the way from t-c1-rl to t-c2-rl'
    """

    parent: str
    """Id of the version that serves."""
    other: str
    """Id of a candidate that was trained from its weights, scored higher, and was refused."""
    share: float

    @property
    def told(self) -> str:
        return f"{self.share:.0%} of the way from {self.parent} to {self.other}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What an arm would try next; none of these for one that trains what serves."""

    prompt: str = ""
    merge: MergePlan | None = None
    base_model: str = ""
    """A smaller one, on which the candidate is trained from its beginning."""

    @property
    def aim(self) -> Aim:
        """What its candidate is promoted for."""
        return "cost" if self.base_model else "score"


def tries_on(state: LoopState, suite: str, since: int = 0, *, usd_per_success: float = 0.0) -> list[Try]:
    """What later cycles have gained on a suite, and for how much; what was not promoted has gained nothing.

    Args:
        since: The first cycle that counts.
        usd_per_success: What a success is worth. Dollars that an attempt costs less are a gain in score of as many successes as
            they are worth: value per attempt is ``V · score − cost``.
    """
    return [
        Try(row["arm"], max(0.0, _gained(row, usd_per_success)), row["usd"])
        for row in state.cycles
        if row.get("arm") is not None and row["usd"] is not None and row["suite"].partition("#")[0] == suite
        if row["cycle"] >= since
    ]


def _gained(row: Mapping[str, Any], usd_per_success: float) -> float:
    """Of one cycle, in score."""
    if row["verdict"] != "promoted":
        return 0.0
    saved = row.get("saved_usd_per_attempt")
    worth = saved / usd_per_success if saved is not None and usd_per_success > 0 else 0.0
    return float(row["score_after"] - row["score_before"] + worth)


def _alarmed_since(state: LoopState) -> int:
    """The cycle from which on the world has said that the service fails, and nothing was promoted against that."""
    urgent = {
        each["cycle"] + 1
        for each in state.decisions
        if each["stage"] == Stage.WATCH and URGENT & set(each["evidence"].get("fired", ()))
    }
    promoted = {row["cycle"] for row in state.cycles if row["verdict"] == "promoted"}
    since = state.cycle
    while since - 1 in urgent - promoted:
        since -= 1
    return since


def open_arms(config: RunConfig, state: LoopState, registry: Registry, suite: str, run: Path) -> dict[str, Proposal]:
    """The arms that have something left to try, in their order, with what each would try.

    A text is tried once over the weights that serve, and a merge once over the same two versions, on any draw of ``suite``.
    Other weights may make more of it, so their promotion opens all again. A base model is tried as often as it pays, while what
    serves is on a larger one.

    Args:
        run: The run folder, in which the weights of versions lie.
    """
    serves = registry.resolve(PRODUCTION)
    served = None if serves is None else registry.get(serves)
    rows = [] if served is None else [row for row in state.cycles if row["suite"].partition("#")[0] == suite]
    found: dict[str, Proposal] = {}
    for arm in config.ways:
        if arm.base_model is not None:
            if served is not None and _is_smaller(arm.base_model, served.base_model):
                found[arm.name] = Proposal(base_model=arm.base_model)
        elif not arm.prompts and arm.merge is None:
            found[arm.name] = Proposal()
        elif served is not None:
            left = (
                _merges_left(arm.merge, rows, registry, served, run)
                if arm.merge is not None
                else _prompts_left(arm.prompts, rows, registry, served)
            )
            if left:
                found[arm.name] = left[0]
    return found


def _is_smaller(base: str, served: str) -> bool:
    """Whether one base model has fewer parameters than another."""
    return base != served and parameter_count(base_model(base)) < parameter_count(base_model(served))


def _prompts_left(
    texts: Sequence[str], rows: Sequence[Mapping[str, Any]], registry: Registry, served: ModelVersion
) -> list[Proposal]:
    candidates = [registry.get(row["candidate"]) for row in rows]
    tried = {each.system_prompt for each in (served, *candidates) if each.weights_uri == served.weights_uri}
    return [Proposal(prompt=text) for text in texts if text not in tried]


def _merges_left(
    config: MergeConfig, rows: Sequence[Mapping[str, Any]], registry: Registry, served: ModelVersion, run: Path
) -> list[Proposal]:
    """The candidate that gained most comes first.

    Refused though it scored higher: it learned something, but forgot or costs too much, or showed too little. Of one whose
    verifier was convicted nobody knows what it learned.
    """
    merged = [row["merge"] for row in rows if row.get("merge")]
    tried = {
        (each["other"], each["share"]) for each in merged if registry.get(each["parent"]).weights_uri == served.weights_uri
    }
    gains = {
        str(row["candidate"]): (row["score_after"] or 0.0) - (row["score_before"] or 0.0)
        for row in rows
        if row["verdict"] == "refused" and not row["evidence"].get("integrity", {}).get("alarm")
    }
    better = sorted((name for name, gain in gains.items() if gain > 0), key=lambda name: -gains[name])
    others = [each for each in better if _was_trained_from(served, registry.get(each), registry, run)]
    return [
        Proposal(merge=MergePlan(served.version_id, other, share))
        for other in others
        for share in config.shares
        if (other, share) not in tried
    ]


def _was_trained_from(served: ModelVersion, candidate: ModelVersion, registry: Registry, run: Path) -> bool:
    """Whether training, and no other merge, lies between the two, and the weights of both are still there."""
    if candidate.weights_uri == served.weights_uri or candidate.base_model != served.base_model:
        return False
    if not all((run / each.weights_uri).is_dir() for each in (served, candidate)):
        return False  # somebody needed the room
    for version in registry.lineage(candidate.version_id):
        if version.weights_uri == served.weights_uri:
            return True
        if version.merged_id is not None:
            return False
    return False


def choose(
    config: RunConfig,
    state: LoopState,
    suite: str,
    spent: float | None,
    arms: Sequence[str],
    *,
    urgent: bool = False,
) -> Choice:
    """The arm of the next cycle.

    Args:
        config: With its arms, worth and hurdle.
        state: With the cycles so far.
        suite: What is deployed now; only tries on it count.
        spent: Dollars of the whole run.
        arms: Those that have something left to try.
        urgent: The world says that the service fails: what arms gained before it began to says nothing of what they would gain
            now.
    """
    usd_per_success = 0.0 if config.worth is None else config.worth.usd_per_success
    tries = tries_on(state, suite, _alarmed_since(state) if urgent else 0, usd_per_success=usd_per_success)
    worth = None if config.worth is None else config.worth.usd_per_score
    left = budget_left(config, spent)
    if not arms:
        return Choice(NOTHING, (), 0.0)
    return choose_arm(arms, tries, usd_per_score=worth, hurdle=config.budget.hurdle, budget_left=left)


def told(choice: Choice, *, urgent: bool = False) -> str:
    """The choice in a sentence."""
    if not choice.values:
        return "no arm has anything left to try over these weights: no prompt, and no merge"
    best = choice.values[0]
    if not best.tries:
        untried = f"{choice.arm} was not tried {'since this began' if urgent else 'on this suite yet'}"
        return untried if choice.arm != NOTHING else "no arm can be paid for"
    promised = f"{best.arm} may gain {best.gain_bound:.3f} at most for {usd(best.usd_bound)} at least"
    if choice.arm == NOTHING:
        return (
            f"doing nothing is worth most: {promised}, {count(best.value)} where more than {count(choice.needs)} is asked for"
        )
    return f"{promised}, the best of {len(choice.values)} and nothing"


def evidence(choice: Choice) -> dict[str, Any]:
    """The figures of a choice, for the record; JSON has no infinity, so what was never tried has no value."""
    values = [
        {**dataclasses.asdict(each), **({} if each.tries else {"gain_bound": None, "value": None})} for each in choice.values
    ]
    return {"arm": choice.arm, "arms": values, "needs": choice.needs}
