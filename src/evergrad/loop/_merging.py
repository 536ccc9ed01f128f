"""MERGE: weights that exist already become a candidate, and nothing is trained.

Consumes two versions and a share, which DECIDE chose; waits for nothing; unblocks MEASURE by publishing what lies between them.

One of the two serves; the other was trained from its weights, scored higher and was refused all the same (``_choosing.py``).
Between them lie weights that may have much of its gain and little of what it was refused for.
"""

from __future__ import annotations

import asyncio

from evergrad.loop._choosing import MergePlan
from evergrad.loop._folder import Stage
from evergrad.loop._registering import register_merge
from evergrad.loop._session import Session
from evergrad.loop.decisions import Decision


async def merge(session: Session) -> Decision:
    """Writes the merged weights, publishes them to the rollout engine, and registers them with both parents."""
    state, plan = session.state, MergePlan(**session.state.merge)
    uri = f"versions/{session.version_id('merge')}"
    if state.step == 0:
        await _write(session, plan, uri)
        with session.clock.phase("setup"):
            await session.trainer.reset(str(session.folder.path / uri))
        await session.publish()
        state.step = 1
        await session.checkpoint()
    version = await register_merge(session, plan, uri)
    return Decision(Stage.MEASURE, "merged", f"{version.version_id} lies {plan.told}", dict(state.merge))


async def _write(session: Session, plan: MergePlan, uri: str) -> None:
    from evergrad.training.merging import merge_exports  # torch

    root = session.folder.path
    ours, other = (root / session.registry.get(each).weights_uri for each in (plan.parent, plan.other))
    with session.clock.phase("merge"):
        lost = await asyncio.to_thread(merge_exports, ours, other, plan.share, root / uri)
    if lost:
        session.event(f"of the merged adapter, {lost:.2%} finds no room in its rank")
