"""A request to be forgotten: what is stored goes at once; what was learned is named, with the price of learning it anew.

A version is tainted when it was trained on a task of the traffic that is forgotten, or descends from one that was. No weights
are touched: which of them still serve, and until when, is for whoever runs them to decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from evergrad.ledger import Ledger
from evergrad.loop._folder import lock_folder, read_state, write_text
from evergrad.loop.traffic.store import TrafficError, TrafficStore, digest, traffic_path
from evergrad.registry import Registry
from evergrad.types import ModelVersion


@dataclass(frozen=True, slots=True)
class Tainted:
    """One version that learned from what was forgotten."""

    version_id: str
    tasks: int
    """Forgotten tasks that it was trained on itself; 0 for one that only descends from such a version."""
    serves: tuple[str, ...]
    """Aliases that point at it."""
    clean_ancestor: str | None
    """The nearest version before it that is not tainted; ``None`` where only the base model is."""
    cycles: tuple[int, ...]
    """Cycles to run again from there."""
    rebuild_usd: Decimal | None
    """What those cycles cost; ``None`` where something in them has no price."""
    registered: bool = True
    """``False`` for a version that a cycle under way was making: what there is of it are its checkpoints."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a deletion removed, and what it cannot remove."""

    traces: int
    tasks: int
    rollouts: int
    """Rollouts on those tasks, taken out of ``rollouts/``."""
    tainted: tuple[Tainted, ...]
    cycles: tuple[int, ...]
    """All that would have to be run again."""
    rebuild_usd: Decimal | None
    checkpoints: tuple[str, ...]
    """Folders under ``checkpoints/`` of a cycle that was trained on those tasks."""


def forget(run: Path, tenant: str, user: str | None = None) -> Forgotten:
    """Removes all that is stored of a tenant, or of one of its users, and names what learned from it.

    Raises:
        TrafficError: the run has no traffic, or none of theirs and never had.
        EvergradError: the run is going on.
    """
    if not traffic_path(run).is_file():
        raise TrafficError("no traffic is stored", where=str(run), hint="'evergrad serve --record presidio' stores it")
    lock = lock_folder(run)
    try:
        with TrafficStore(traffic_path(run)) as store:
            who = None if user is None else digest(tenant, user)
            uses, task_ids = store.uses(tenant, who), store.task_ids(tenant, who)
            if not uses and not any(each.tenant == tenant and who in (None, each.user) for each in store.traces()):
                known = ", ".join(sorted({each.tenant for each in store.traces()})) or "nobody"
                raise TrafficError(
                    f"nothing is stored of '{tenant}'{f' and user {user!r}' if user else ''}",
                    where=str(traffic_path(run)),
                    hint=f"traffic is stored of: {known}",
                )
            tainted = tainted_versions(run, uses)
            rollouts = _remove_rollouts(run, task_ids)
            traces, tasks = store.delete(tenant, who, [each.version_id for each in tainted])
    finally:
        lock.close()
    cycles = tuple(sorted({cycle for each in tainted for cycle in each.cycles}))
    checkpoints = _checkpoints(run, {cycle for each in tainted for cycle in each.cycles})
    return Forgotten(traces, tasks, rollouts, tainted, cycles, _usd(_cycle_costs(run), cycles), checkpoints)


def tainted_versions(run: Path, uses: Mapping[str, int]) -> tuple[Tainted, ...]:
    """The versions that learned from tasks, and their descendants, in the order in which they were registered.

    Args:
        run: The run folder.
        uses: Version id to how many of the tasks it was trained on.
    """
    costs, found = _cycle_costs(run), list[Tainted]()
    with Registry(run / "registry.sqlite") as registry:
        versions = {each.version_id: each for each in registry.list()}
        aliases = registry.aliases()
    dirty: dict[str, ModelVersion] = {}
    for version in versions.values():  # a parent is registered before its child
        if version.version_id in uses or any(parent in dirty for parent in version.parents):
            dirty[version.version_id] = version
    for name in dirty:
        clean, to_rebuild = _back_to_clean(name, dirty)
        cycles = tuple(sorted({_cycle(each) for each in to_rebuild}))
        serves = tuple(sorted(alias for alias, version_id in aliases.items() if version_id == name))
        found.append(Tainted(name, uses.get(name, 0), serves, clean, cycles, _usd(costs, cycles)))
    for name in sorted(uses.keys() - versions.keys()):
        cycles = (read_state(run / "state.json").cycle,) if (run / "state.json").is_file() else ()
        found.append(Tainted(name, uses[name], (), aliases.get("production"), cycles, _usd(costs, cycles), registered=False))
    return tuple(found)


def _back_to_clean(name: str, dirty: Mapping[str, ModelVersion]) -> tuple[str | None, list[ModelVersion]]:
    """The nearest ancestor that is not among the ``dirty``, and the dirty versions that would have to be made again from there;
    of a merge, those on both sides."""
    clean, found = None, [dirty[name]]
    for version in found:  # which grows meanwhile, nearest first
        for parent in version.parents:
            if parent not in dirty:
                clean = clean or parent
            elif dirty[parent] not in found:
                found.append(dirty[parent])
    return clean, found


def _cycle(version: ModelVersion) -> int:
    return int(version.metadata.get("cycle", 0))


def _cycle_costs(run: Path) -> Mapping[str, Decimal | None]:
    """The ledger's subjects, among them each cycle, and what they cost."""
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        return ledger.summary().by_subject


def _usd(costs: Mapping[str, Decimal | None], cycles: tuple[int, ...]) -> Decimal | None:
    parts = [costs.get(f"cycle-{cycle}") for cycle in cycles]
    return sum((part for part in parts if part is not None), Decimal(0)) if None not in parts else None


def _checkpoints(run: Path, cycles: set[int]) -> tuple[str, ...]:
    """Trainer checkpoints of tainted cycles; a run keeps its last two."""
    names = [path.name for path in (run / "checkpoints").glob("c*") if path.is_dir()]
    return tuple(sorted(name for name in names if int(name[1:].split("-")[0]) in cycles))


def _remove_rollouts(run: Path, task_ids: set[str]) -> int:
    """Takes the rollouts on these tasks out of the run's files; how many there were. Each file is whole before and after."""
    removed = 0
    for path in sorted((run / "rollouts").glob("*.jsonl*")) if task_ids else ():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _task_of(line) not in task_ids]
        if len(kept) < len(lines):
            write_text(path, "".join(kept))
            removed += len(lines) - len(kept)
    return removed


def _task_of(line: str) -> str | None:
    try:
        return str(json.loads(line)["task_id"])
    except (ValueError, LookupError, TypeError):
        return None  # the last line of a file that a killed run left
