"""MEASURE: what will be ruled is announced, candidate and incumbent are measured, the gate rules, the alias moves.

Consumes the weights that LEARN or MERGE left; waits for paired evaluations on every suite (``_evaluating.py``; where a lower
cost is the aim, by turns: ``_turns.py``); a promotion unblocks serving. With a canary the alias does not move here: the verdict
begins a release, which RELEASE carries out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from evergrad.evals import GIVEN_UP, Aim, Costs, Latencies, Plan, gate
from evergrad.loop._announcing import (
    GateSuite,
    anchor_reports,
    gate_suites,
    verdict_on_record,
    verdicts_before,
    write_plan,
)
from evergrad.loop._certifying import certify
from evergrad.loop._evaluating import report_for
from evergrad.loop._folder import Stage, write_json
from evergrad.loop._gold_audit import convict_by_verdict
from evergrad.loop._registering import register_prompt, register_trained
from evergrad.loop._releasing import begin_release
from evergrad.loop._scores import task_costs, task_seconds
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.loop._turns import measure_by_turns, saved_per_attempt, turns_on_record
from evergrad.loop.decisions import Decision
from evergrad.types import EvalReport, ModelVersion, Verdict, plain, strict_json


async def measure(session: Session) -> Decision:
    """Registers, announces, evaluates, rules, promotes. What is on record is reused, so a crash repeats nothing."""
    state = session.state
    session.writer.discard()
    await session.follow()
    candidate = await _candidate(session)
    if _serves_already(session, candidate):
        told = f"no RL step was done, so there is nothing to measure: {candidate.version_id} serves already"
        session.event(told)
        return Decision(Stage.WATCH, "nothing new", told)
    incumbent = _incumbent(session, candidate)
    if _tries_prompt(session) and candidate.weights_uri != incumbent.weights_uri:
        told = f"{candidate.version_id} is a prompt over weights that serve no more: {incumbent.version_id} took their place"
        session.event(told)
        return Decision(Stage.WATCH, "nothing new", told)
    history = verdicts_before(session.registry, candidate.version_id, incumbent.version_id)
    suites = gate_suites(session, history)
    anchors = anchor_reports(session, suites, candidate, incumbent)
    plan = write_plan(session, candidate, incumbent, suites, anchors, history, aim=_aim(session))
    await session.begin_precision()
    try:
        compare = measure_by_turns if plan.aim == "cost" else _one_after_the_other
        before, after = await compare(session, candidate, incumbent, suites)
        verdict = verdict_on_record(session.registry, candidate.version_id, incumbent.version_id)
        if verdict is None:
            with session.clock.phase("gate"):
                verdict = _verdict(session, plan, after, before, anchors, history)
        begun = await _rule(session, candidate, verdict)
    finally:
        await session.serving.end_standby()
    convict_by_verdict(session, verdict)
    _record_cycle(session, verdict, before, after, begun)
    certify(session, verdict, plan, suites)
    state.incumbent = None
    word = ("passed" if begun else "promoted") if verdict.promote else "refused"
    text = f"{word} {candidate.version_id} against {incumbent.version_id}: {'; '.join(verdict.reasons)}"
    return Decision(Stage.RELEASE if begun else Stage.WATCH, word, text, plain(verdict.evidence, "null"))


async def _one_after_the_other(
    session: Session, candidate: ModelVersion, incumbent: ModelVersion, suites: Sequence[GateSuite]
) -> tuple[dict[str, EvalReport], dict[str, EvalReport]]:
    """Reports of incumbent and candidate on all suites, the primary one first."""
    # The engine that serves has the weights of both where only the prompt differs.
    holder = session.serving.client if candidate.weights_uri == incumbent.weights_uri else session.engine
    before, after = dict[str, EvalReport](), dict[str, EvalReport]()
    for each in suites:
        session.safe_point()
        before[each.name] = await report_for(session, incumbent, each.settings, session.serving.client, each.draw)
        rival = before[each.name] if each is suites[0] else None
        session.safe_point()
        after[each.name] = await report_for(session, candidate, each.settings, holder, each.draw, rival)
        if rival is not None and GIVEN_UP in after[each.name].outcomes:
            break  # refused already, whatever the guards say
    return before, after


def _verdict(
    session: Session,
    plan: Plan,
    after: Mapping[str, EvalReport],
    before: Mapping[str, EvalReport],
    anchors: Mapping[str, EvalReport],
    history: Sequence[Verdict],
) -> Verdict:
    """The gate's word on what was measured, by what was announced."""
    state, primary, versions = session.state, plan.primary, (plan.candidate_id, plan.incumbent_id)
    return gate(
        after,
        before,
        session.config.gate,
        primary=primary,
        anchor=anchors,
        costs=Costs(*(task_costs(state, each, primary) for each in versions)),
        latencies=Latencies(*(task_seconds(state, each, primary) for each in versions)),
        aim=plan.aim,
        turns=turns_on_record(session.folder.path, *versions, primary) if plan.aim == "cost" else None,
        history=history,
        plan=plan,
        audit=session.config.audit,
    )


async def _candidate(session: Session) -> ModelVersion:
    """What this cycle has made: a system prompt over the weights that serve, or what MERGE or LEARN left."""
    state = session.state
    if _tries_prompt(session):
        return register_prompt(session)
    if state.merge:
        return session.registry.get(session.version_id("merge"))
    learned = any(step["kind"] == "rl" and step["cycle"] == state.cycle for step in state.steps)
    return await register_trained(session, "rl" if learned else "sft")


def _tries_prompt(session: Session) -> bool:
    return any(arm.prompts for arm in session.config.arms if arm.name == session.state.arm)


def _aim(session: Session) -> Aim:
    smaller = any(arm.base_model is not None for arm in session.config.arms if arm.name == session.state.arm)
    return "cost" if smaller else "score"


def _serves_already(session: Session, candidate: ModelVersion) -> bool:
    """Whether the candidate is what serves and was so before this stage: then it was the warm start's, and met no RL."""
    return (
        candidate.version_id == session.version_id("sft")
        and session.registry.resolve(PRODUCTION) == candidate.version_id
        and session.state.incumbent in (None, candidate.version_id)
    )


def _incumbent(session: Session, candidate: ModelVersion) -> ModelVersion:
    """The version to beat: what serves now, or what served before a crash between the promotion and the end of the stage."""
    state, serves = session.state, session.registry.resolve(PRODUCTION)
    assert serves is not None, "the first cycle introduces a version before it measures"
    if state.incumbent is None or serves not in (state.incumbent, candidate.version_id):
        # Somebody moved the alias meanwhile: evidence against a version that serves no longer would promote nothing.
        state.incumbent = serves
        session.save_state()
    return session.registry.get(state.incumbent)


async def introduce(session: Session, version: ModelVersion) -> None:
    """Serves the first version, which has no incumbent to beat, and measures it."""
    with session.clock.phase("weight_sync"):
        await session.serving.load(version)
    session.registry.promote(PRODUCTION, version.version_id, bootstrap=True, actor="loop")
    session.state.serving = version.version_id
    session.event(f"{version.version_id} serves as the first version")
    await report_for(session, version, session.state.deployed, session.serving.client)


async def _rule(session: Session, candidate: ModelVersion, verdict: Verdict) -> bool:
    """Moves the alias when the verdict says so, as soon as the serving engine has proved that it holds the version.

    Returns:
        Whether a release has begun instead.
    """
    write_json(session.folder.path / "verdicts" / f"{candidate.version_id}.json", dataclasses.asdict(verdict))
    told = "; ".join(verdict.reasons)
    if not verdict.promote:
        if strict_json(verdict) not in map(strict_json, session.registry.verdicts(candidate.version_id)):
            session.registry.record_verdict(verdict)
        session.event(f"refused {candidate.version_id}: {told}")
        return False
    plan = session.config.release_plan
    if plan is not None and session.registry.resolve(PRODUCTION) != candidate.version_id:
        begin_release(session, plan, verdict)
        session.event(f"passed {candidate.version_id}: {told}")
        return True
    with session.clock.phase("weight_sync"):
        await session.serving.load(candidate)
    if session.registry.resolve(PRODUCTION) != candidate.version_id:
        session.registry.promote(PRODUCTION, candidate.version_id, verdict, actor="gate")
    session.state.serving = candidate.version_id
    session.event(f"promoted {candidate.version_id}: {told}")
    return False


def _record_cycle(
    session: Session, verdict: Verdict, before: Mapping[str, EvalReport], after: Mapping[str, EvalReport], begun: bool
) -> None:
    """The cycle's line in the report: what it gained, on what evidence, for how much. The end of a release that has begun is
    added to it."""
    state, suite = session.state, str(verdict.evidence["primary"])
    usd, started = session.spent_usd(), state.cycle_started
    others = {name: {"before": before[name].mean, "after": after[name].mean} for name in after if name != suite}
    state.cycles.append(
        {
            "cycle": state.cycle,
            "trigger": state.trigger,
            "arm": state.arm,
            "system_prompt": state.system_prompt,
            "merge": dict(state.merge) or None,
            "aim": verdict.evidence.get("aim", "score"),
            "base_model": session.base,
            "saved_usd_per_attempt": saved_per_attempt(
                session.folder.path, verdict.candidate_id, str(verdict.incumbent_id), suite
            ),
            "suite": suite,
            "score_before": before[suite].mean,
            "score_after": after[suite].mean,
            "slices_before": before[suite].slice_means(),
            "slices_after": after[suite].slice_means(),
            "other_suites": others,
            "ci95": verdict.evidence.get("ci95"),
            "n": len(after[suite].scores),
            "verdict": ("passed" if begun else "promoted") if verdict.promote else "refused",
            "reasons": list(verdict.reasons),
            "candidate": verdict.candidate_id,
            "incumbent": verdict.incumbent_id,
            "evidence": dict(verdict.evidence),
            "usd": None if usd is None or started["usd"] is None else usd - started["usd"],
            "wall_s": session.wall_s() - (started["wall_s"] or 0.0),
        }
    )
