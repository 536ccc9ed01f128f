"""RELEASE: a candidate that passed the gate meets live traffic, a share at a time, before it owns the alias.

One release, begun by MEASURE with the verdict::

    shadow ─▶ canary at the first share ─▶ … ─▶ canary at the last share ─▶ the serving engine loads it, the alias moves
              │ each check: live sessions ─▶ outcomes on record ─▶ the canary's word: hold, widen or roll back
              └─ harm ─▶ the predecessor, which was loaded all along, answers everyone again

Consumes live sessions; waits for ``watch.requests`` of them per check; its end unblocks WATCH. Where a gateway serves customers
(``evergrad serve --record``), their sessions are dealt as these are: the gateway finds the candidate's engine in the registry,
what became of customers is read with each check, and the engine is ended only when the gateway has left it.

Where the release stands and every outcome that it is judged by are in the registry before anything follows from them: a run
that was killed goes on at the same share, with the same word and the same check. Whoever moves the alias by hand meanwhile
ends the release.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from evergrad.config import parse_config
from evergrad.evals import CanaryConfig, CanaryStep, rule_on_canary
from evergrad.inference import Completes, Front, Shadow, Split
from evergrad.loop._folder import Stage
from evergrad.loop._playing import drawn_tasks, play
from evergrad.loop._serving import PRODUCTION, Standby
from evergrad.loop._session import Session
from evergrad.loop.decisions import Decision
from evergrad.loop.placement import WorkerDied
from evergrad.registry import RegistryError
from evergrad.types import (
    Completion,
    EvergradError,
    Release,
    ReleaseState,
    Rollout,
    Sampling,
    SessionOutcome,
    Side,
    Verdict,
)

ACTOR = "canary"
"""Who moves a release, in the audit."""
LEFT_WITHIN_S = 30.0
"""How long the engine of a release that is over waits for customers who are under way; then the predecessor answers them."""


def begin_release(session: Session, config: CanaryConfig, verdict: Verdict) -> Release:
    """Registers the release with its plan; entering it again after a crash gives the same one."""
    state, share = (ReleaseState.SHADOW, 0.0) if config.shadow else (ReleaseState.CANARY, config.shares[0])
    plan = config.model_dump(mode="json")
    return session.registry.releases.begin(PRODUCTION, verdict, plan, state=state, share=share, actor="gate")


def announce_release(session: Session) -> str:
    """What is about to happen to the release that is under way; empty when none is."""
    found = session.registry.releases.last(PRODUCTION)
    if found is None or not found.state.is_open:
        return ""
    requests, shares = session.config.watch.requests, ", ".join(f"{share:.4g}" for share in found.plan["shares"])
    return f"release of {found.candidate_id}: {requests} requests a check; it answers {shares} of the sessions, then all"


async def release(session: Session) -> Decision:
    """Carries out the release that the registry knows of, from where it stands to its end."""
    found = session.registry.releases.last(PRODUCTION)
    assert found is not None, "MEASURE begins one before this stage"
    await session.follow()
    if found.state.is_open:
        found = await _carry_out(session, found)
    return _record_end(session, found)


async def _carry_out(session: Session, found: Release) -> Release:
    try:
        with session.clock.phase("weight_sync"):
            standby = await session.serving.stand_by(session.registry.get(found.candidate_id))
    except WorkerDied:
        raise  # as any worker's death: the run goes on from its last saved state, which is here
    except EvergradError as error:
        return session.registry.releases.roll_back(found, reason=f"the candidate cannot serve: {error}", actor=ACTOR)
    plan = parse_config(CanaryConfig, found.plan, where=f"the plan of release {found.release_id}")
    stages = _Stages(session, plan, standby, found)
    try:
        session.registry.releases.offer(found, standby.base_url)
        while found.state.is_open:
            session.safe_point()
            found = await stages.check(found)
    finally:
        await stages.shadow.close()
        session.registry.releases.offer(found, "")
        await _customers_left(session, found)
        await session.serving.end_standby()
    return found


async def _customers_left(session: Session, found: Release) -> None:
    """Waits until no gateway has a request under way at the candidate's engine; at once where no gateway has asked it."""
    deadline = time.monotonic() + LEFT_WITHIN_S
    # One that was killed has nothing under way, and cannot say so.
    while any(map(psutil.pid_exists, session.registry.releases.gateways(found))):
        if time.monotonic() > deadline:
            session.console.note(f"  customers are under way at {found.candidate_id} for more than {LEFT_WITHIN_S:g} s")
            return
        await asyncio.sleep(0.1)


@dataclass
class _Stages:
    """One release under way in this process: its two engines and who is answered by which."""

    session: Session
    plan: CanaryConfig
    standby: Standby
    begun_at: Release
    front: Front = field(init=False)
    shadow: Shadow = field(init=False)
    prompts: dict[Side, str] = field(init=False)
    """The system prompt of each version."""
    shadow_checks: int = 0
    _as_candidate: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """How conversations of the shadow begin, and how the candidate is asked the same, where its system prompt differs."""

    def __post_init__(self) -> None:
        live, candidate = self.session.serving.client, self.standby.client
        incumbent = self.session.registry.get(self.begun_at.incumbent_id)
        self.prompts = {Side.INCUMBENT: incumbent.system_prompt, Side.CANDIDATE: self.standby.version.system_prompt}
        self.front = Front(live, candidate, Split(self.begun_at.salt, self.begun_at.share))
        self.shadow = Shadow(live, self._copied)

    async def check(self, found: Release) -> Release:
        """What follows from the outcomes so far, or else one more check of live traffic; where the release stands by then."""
        releases = self.session.registry.releases
        found = releases.get(found.release_id)
        if not found.state.is_open:
            return found  # by hand
        if found.state is ReleaseState.CANARY:
            await self._hear_customers(found)
        try:
            moved = await (self._judge_shadow(found) if found.state is ReleaseState.SHADOW else self._judge_canary(found))
            if moved is not None:
                return moved
            spent = self.session.out_of_budget()
            if spent:
                hint = f"to promote it all the same: evergrad model promote {found.candidate_id}"
                return self._roll_back(found, f"{spent} before the canary was through; {hint}")
        except RegistryError:
            now = releases.get(found.release_id)
            if now == found:
                raise
            return now  # by hand, in this very moment
        await (self._play_shadow() if found.state is ReleaseState.SHADOW else self._play_canary(found))
        return found

    async def _play_shadow(self) -> None:
        name = f"shadow-{self.session.state.cycle:03d}-{self.shadow_checks:03d}"
        self._render_copies(name)
        with self.session.clock.phase("shadow"):
            await self._play(name, self.shadow, lambda session_id: self.prompts[Side.INCUMBENT])
            await self.shadow.settle()
        self.shadow_checks += 1

    def _render_copies(self, name: str) -> None:
        """Renders the tasks of a check under both system prompts; nothing where both versions have the same."""
        session, (live, candidate) = self.session, (self.prompts[Side.INCUMBENT], self.prompts[Side.CANDIDATE])
        if live == candidate:
            return
        for task in drawn_tasks(session, self._asked, session.config.watch.requests, name=name, source="live"):
            before, after = (session.renderer.prompt(task.with_system_prompt(each).prompt) for each in (live, candidate))
            self._as_candidate[before] = after

    async def _copied(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """The candidate's answer to a copy of a request, which begins as the candidate's conversations do."""
        ids = tuple(prompt_token_ids)
        beginning = next((each for each in self._as_candidate if ids[: len(each)] == each), ())
        asked = (*self._as_candidate.get(beginning, ()), *ids[len(beginning) :])
        return await self.standby.client(asked, sampling, session_id=session_id)

    async def _judge_shadow(self, found: Release) -> Release | None:
        shadow = self.shadow
        evidence = {"answered": shadow.answered, "equal": shadow.equal, "failures": shadow.failures[:3]}
        told = f"{shadow.answered} copies answered in the shadow, {shadow.equal} of them as the incumbent did"
        if self.standby.death or shadow.failures:
            return self._roll_back(found, f"{self.standby.death or shadow.failures[0]}; {told}", evidence)
        return None if shadow.answered < self.plan.shadow else self._widen(found, told, evidence)

    async def _play_canary(self, found: Release) -> None:
        releases = self.session.registry.releases
        # Every session of a check is put down with it, so the number of outcomes says which check comes next.
        played = sum(not each.by_customer for each in releases.outcomes(found))
        number = played // self.session.config.watch.requests
        with self.session.clock.phase("serve"):
            rollouts = await self._play(
                f"canary-{self.session.state.cycle:03d}-{number:03d}",
                self.front,
                lambda session_id: self.prompts[self.front.side(session_id)],
            )
        releases.observe(found, [self._outcome(each, found.share) for each in rollouts])

    async def _hear_customers(self, found: Release) -> None:
        """Puts down what has become of customers' sessions since the last check."""
        session, releases = self.session, self.session.registry.releases
        if session.served_traffic is None:
            return
        known = {each.session_id for each in releases.outcomes(found) if each.by_customer}
        with session.clock.phase("serve"):
            taskset = session.taskset(session.state.deployed)
            releases.observe(found, await session.served_traffic.of_canary(taskset, found.release_id, known))

    async def _judge_canary(self, found: Release) -> Release | None:
        ruling = rule_on_canary(self.plan, self.session.registry.releases.outcomes(found), found.share)
        if self.standby.death:
            return self._roll_back(found, f"{self.standby.death}; {ruling.reason}", ruling.evidence)
        if ruling.step is CanaryStep.ROLL_BACK:
            return self._roll_back(found, ruling.reason, ruling.evidence)
        if ruling.step is CanaryStep.HOLD:
            return None
        if self.plan.after(found.share) is None:
            return await self._promote(found, ruling.reason, ruling.evidence)
        return self._widen(found, ruling.reason, ruling.evidence)

    @property
    def _asked(self) -> dict[str, Any]:
        return {**self.session.state.deployed, **self.session.state.customers}

    async def _play(self, name: str, client: Completes, system_prompt: Callable[[str], str]) -> list[Rollout]:
        session, requests = self.session, self.session.config.watch.requests
        return await play(session, self._asked, requests, client, name=name, source="live", system_prompt=system_prompt)

    def _outcome(self, rollout: Rollout, share: float) -> SessionOutcome:
        session_id = rollout.rollout_id
        scored = rollout.reward is not None and rollout.outcome.trainable and session_id not in self.front.failed
        score = min(1.0, max(0.0, rollout.reward)) if scored and rollout.reward is not None else None
        return SessionOutcome(session_id, self.front.side(session_id), score, share)

    def _widen(self, found: Release, reason: str, evidence: dict[str, Any]) -> Release:
        share = self.plan.after(found.share)
        assert share is not None
        wider = self.session.registry.releases.widen(found, share, reason=reason, evidence=evidence, actor=ACTOR)
        self.front.split.widen(share)
        self.session.event(f"{found.candidate_id} answers {share:.4g} of the sessions: {reason}")
        return wider

    async def _promote(self, found: Release, reason: str, evidence: dict[str, Any]) -> Release:
        session = self.session
        with session.clock.phase("weight_sync"):
            await session.serving.load(self.standby.version)
        session.registry.releases.promote(found, reason=reason, evidence=evidence, actor=ACTOR)
        session.state.serving = found.candidate_id
        return session.registry.releases.get(found.release_id)

    def _roll_back(self, found: Release, reason: str, evidence: dict[str, Any] | None = None) -> Release:
        self.front.roll_back()
        return self.session.registry.releases.roll_back(found, reason=reason, evidence=evidence, actor=ACTOR)


def _record_end(session: Session, found: Release) -> Decision:
    """The end of a release as an event, and in the cycle's line of the report."""
    *before, last = session.registry.releases.events(found.release_id)
    word = "promoted" if found.state is ReleaseState.PROMOTED else "rolled back"
    by = "" if last.actor == ACTOR else f" by {last.actor or 'hand'}"
    session.event(f"{word} {found.candidate_id}{by}: {last.reason}")
    cycle = session.state.cycles[-1] if session.state.cycles else {}
    if cycle.get("candidate") == found.candidate_id:
        cycle["verdict"] = word
        cycle["release"] = {
            "share": before[-1].share if before else 0.0,
            "actor": last.actor,
            "reason": last.reason,
            "evidence": dict(last.evidence),
        }
    return Decision(Stage.WATCH, word, f"{word} {found.candidate_id}{by}: {last.reason}", dict(last.evidence))
