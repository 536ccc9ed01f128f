"""The gold audit as the loop makes it: which tries are judged by gold, and what follows for the verifier.

Of training, a share of the rollouts on the deployed contract; an alarm ends the RL of the cycle, for what it teaches is not
what was meant. Of evaluations, a share of each suite's tasks; the gate refuses by it, and convicts the verifier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from evergrad.evals import audited_tasks, is_audited, overstatement
from evergrad.loop._session import Session
from evergrad.types import RolloutGroup, Task, Verdict


def audits_training(session: Session, settings: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Which rollouts of a training group are judged, by id; earlier contracts have had their audits."""
    audit = session.config.audit
    if audit is None or settings != session.state.deployed:
        return None
    share = audit.training_share
    return lambda rollout_id: is_audited(rollout_id, share)


def keep_audited(session: Session, group: RolloutGroup) -> None:
    """Holds the judged rollouts of a group until its step is put down."""
    session.audited += [each for each in group.rollouts if each.gold is not None]


def audited_figures(session: Session) -> dict[str, float]:
    """What gold says of the step that ends; its pairs go into the state, in an order that does not depend on timing."""
    judged = sorted(session.audited, key=lambda rollout: rollout.rollout_id)
    session.audited = []
    pairs = [[float(each.reward or 0.0), float(each.gold or 0.0)] for each in judged]
    session.state.audited += pairs
    if not pairs:
        return {}
    rewards, golds = zip(*pairs, strict=True)
    n = len(pairs)
    return {"audited": n, "audited_reward": math.fsum(rewards) / n, "audited_gold": math.fsum(golds) / n}


def distrusted_by_training(session: Session) -> str | None:
    """Why the training of this cycle must end: its audited rollouts convict the verifier. ``None`` while they do not."""
    audit, state = session.config.audit, session.state
    if audit is None or not state.audited:
        return None
    found = overstatement([(reward, gold) for reward, gold in state.audited], audit)
    if not found.alarm:
        return None
    session.convict(state.deployed, f"in training, {found.told}")
    return f"the verifier overstates what is being learned ({found.told})"


def audits_task(session: Session, tasks: tuple[Task, ...]) -> Callable[[Task], bool]:
    """Which tasks of an evaluation are judged by gold."""
    audit = session.config.audit
    chosen = audited_tasks([task.task_id for task in tasks], audit.share) if audit else frozenset[str]()
    return lambda task: task.task_id in chosen


def convict_by_verdict(session: Session, verdict: Verdict) -> None:
    """Trusts the verifier of the deployed suite no more, where the gate's audit says so."""
    found = verdict.evidence.get("integrity", {})
    if found.get("alarm"):
        told = f"reward {found['reward']:.3f}, gold {found['gold']:.3f} on {found['audited']} audited tries"
        session.convict(session.state.deployed, f"of {verdict.candidate_id}, {told}, e = {found['e_value']:.3g}")
