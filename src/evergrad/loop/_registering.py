"""What a cycle made becomes a version: trained weights, a system prompt over those that serve, or a merge.

Each can be asked for again after a crash, and then gives the version that is there. How the trainer scores a probe is kept with
the weights, so that whoever loads them can prove that it did.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Mapping
from typing import Any

from evergrad.envs import content_hash
from evergrad.loop._choosing import MergePlan
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.types import ModelVersion


async def register_trained(session: Session, note: str) -> ModelVersion:
    """The trainer's weights, exported, as the version ``note`` of this cycle: ``sft`` or ``rl``."""
    version_id = session.version_id(note)
    if known := session.registry.look_up(version_id):
        return known
    uri = f"versions/{version_id}"
    if not (session.folder.path / uri).exists():
        with session.clock.phase("store"):
            await session.trainer.export(str(session.folder.path / uri))
    version = ModelVersion(
        version_id=version_id,
        parent_id=session.version_id("sft") if note != "sft" else _learned_from(session),
        policy_version=session.state.policy_version,
        weights_uri=uri,
        base_model=session.base,
        recipe_hash=hashlib.sha256(session.recipe.model_dump_json().encode()).hexdigest()[:16],
        created_at=_now(),
        metadata=_metadata(session, await session.probe()),
        system_prompt=session.state.system_prompt,
    )
    return session.registry.register(version)


def _learned_from(session: Session) -> str | None:
    """What a cycle's first version was trained from: what serves. On another base model it begins anew, and has in it at most
    what a version of the run teaches it."""
    serves = session.registry.resolve(PRODUCTION)
    if serves is None or session.registry.get(serves).base_model == session.base:
        return serves
    distill = session.recipe.rl.distill if session.recipe.rl.steps else None
    return distill.version if distill is not None else None


def register_prompt(session: Session) -> ModelVersion:
    """The weights that serve, with this cycle's system prompt."""
    version_id = session.version_id("prompt")
    if known := session.registry.look_up(version_id):
        return known
    parent = session.registry.find(PRODUCTION)
    prompted = dataclasses.replace(
        parent,
        version_id=version_id,
        parent_id=parent.version_id,
        merged_id=None,
        recipe_hash=content_hash({"weights": parent.recipe_hash, "system_prompt": session.state.system_prompt}),
        created_at=_now(),
        metadata=_metadata(session, parent.metadata.get("probe")),
        system_prompt=session.state.system_prompt,
    )
    return session.registry.register(prompted)


async def register_merge(session: Session, plan: MergePlan, uri: str) -> ModelVersion:
    """The merged weights in ``uri``, which the trainer holds."""
    version_id = session.version_id("merge")
    if known := session.registry.look_up(version_id):
        return known
    parent, other = session.registry.get(plan.parent), session.registry.get(plan.other)
    merged = dataclasses.replace(
        parent,
        version_id=version_id,
        parent_id=parent.version_id,
        merged_id=other.version_id,
        policy_version=session.state.policy_version,
        weights_uri=uri,
        recipe_hash=content_hash({"merged": [parent.recipe_hash, other.recipe_hash], "share": plan.share}),
        created_at=_now(),
        metadata={**_metadata(session, await session.probe()), "merged_share": plan.share},
        system_prompt=session.state.system_prompt,
    )
    return session.registry.register(merged)


def _metadata(session: Session, probe: Mapping[str, Any] | None) -> dict[str, Any]:
    state = session.state
    return {
        "contracts": session.contracts(),
        "suite": session.suite(state.deployed),
        "cycle": state.cycle,
        "trigger": state.trigger,
        "probe": probe,
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
