"""``evergrad traffic``: what is kept of live traffic, the tasks that are made of it, and how it is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evergrad.envs import Taskset
from evergrad.loop.report import usd
from evergrad.loop.status import state_of
from evergrad.loop.traffic import (
    Converted,
    Forgotten,
    Tainted,
    TrafficError,
    TrafficStore,
    convert,
    forget,
    traffic_path,
)
from evergrad.service._runs import run_config
from evergrad.service._screen import console, print_json, table
from evergrad.types import EvergradError, InputError, Task

_MOST_MEASURED = 10_000
"""Gate tasks that live ones are held against; a run of more cycles checks again when it rules."""


def list_traffic(run: Path, *, as_json: bool = False) -> None:
    """Prints each trace with its feedback, newest last."""
    with _store(run) as store:
        traces, tasks = store.traces(), store.task_of_trace()
    if as_json:
        print_json(
            [
                {
                    "trace_id": each.trace.trace_id,
                    "tenant": each.tenant,
                    "user": each.user,
                    "version_id": each.trace.version_id,
                    "at": each.at,
                    "messages": [message.as_dict() for message in each.trace.messages],
                    "metadata": dict(each.trace.metadata),
                    "score": each.trace.score,
                    "outcome": dict(each.trace.outcome),
                    "task": tasks.get(each.trace.trace_id),
                }
                for each in traces
            ]
        )
        return
    rows = [
        (
            each.trace.trace_id,
            each.at,
            each.tenant,
            each.trace.version_id,
            len(each.trace.replies),
            each.trace.score,
            ", ".join(f"{key}={value}" for key, value in each.trace.outcome.items()) or None,
            tasks.get(each.trace.trace_id),
            each.trace.request[:60],
        )
        for each in traces
    ]
    heads = ("trace", "at", "tenant", "version", "turns", "score", "outcome", "task", "request")
    console().print(table(heads, rows, right=("turns", "score"), title=_count(len(rows), "conversation")))


def make_tasks(run: Path, tenants: Sequence[str], *, as_json: bool = False) -> None:
    """Makes tasks of traces, and says what became of each.

    Raises:
        InputError: the environment makes none, or it is not said whose traffic may be learned from.
    """
    taskset = _deployed(run)
    if not taskset.learns_from_traffic:
        raise InputError(
            f"environment '{taskset.name}' makes no tasks of traffic",
            where=taskset.environment,
            hint="define the classmethod from_trace(cls, trace, config) in it, which returns a TaskRow or None",
        )
    with _store(run) as store:
        chosen = _tenants(store, tenants)
        found = asyncio.run(convert(store, taskset, chosen, _measured(run, taskset)))
    if as_json:
        print_json(found)
        return
    _print_converted(found, run, chosen)


def add_tenant_key(run: Path, tenant: str, *, revoke: bool) -> None:
    """Prints a new key of a tenant, or takes back all that it has."""
    with TrafficStore(traffic_path(run)) as store:
        if revoke:
            print(f"{_count(store.revoke_keys(tenant), 'key')} of {tenant} revoked")
            return
        key = store.add_key(tenant)
    print(key)
    note = "the key of {}, told this once; from now on 'evergrad serve --record' answers nobody without a key"
    console(stderr=True).print(note.format(tenant))


def forget_tenant(run: Path, tenant: str, user: str | None, *, as_json: bool = False) -> None:
    """Removes what is stored, and names what learned from it, with the price of learning it anew."""
    found = forget(run, tenant, user)
    if as_json:
        print_json(found)
        return
    removed = (_count(found.traces, "conversation"), _count(found.tasks, "task"), _count(found.rollouts, "rollout"))
    print(f"forgotten: {', '.join(removed)}")
    if not found.tainted:
        print("no version has learned from them")
        return
    rows = [
        (
            each.version_id if each.registered else f"{each.version_id} (not finished)",
            each.tasks or "by descent",
            ", ".join(each.serves) or None,
            each.clean_ancestor or "the base model",
            ", ".join(map(str, each.cycles)),
            usd(None if each.rebuild_usd is None else float(each.rebuild_usd)),
        )
        for each in found.tainted
    ]
    heads = ("version", "live tasks", "serves", "clean before it", "cycles again", "for")
    console().print(table(heads, rows, right=("live tasks", "for"), title="what has learned from them"))
    _print_next(run, found)


def _print_next(run: Path, found: Forgotten) -> None:
    money = usd(None if found.rebuild_usd is None else float(found.rebuild_usd))
    print(f"all of it again, cycle {', '.join(map(str, found.cycles))}: {money}")
    if found.checkpoints:
        print(f"checkpoints of them: {', '.join(found.checkpoints)} in {run / 'checkpoints'}")
    for each in found.tainted:
        for alias in each.serves:
            print(f"{alias} serves {each.version_id}{_way_back(run, alias, each)}")


def _way_back(run: Path, alias: str, tainted: Tainted) -> str:
    if tainted.clean_ancestor is None:
        return ", and no version before it is clean"
    return f"; to serve the last clean one: evergrad model promote {tainted.clean_ancestor} --alias {alias} --run {run}"


def _print_converted(found: Converted, run: Path, tenants: Sequence[str]) -> None:
    lines = [
        (found.known, "were made into tasks before"),
        (found.continued, "are the beginning of another conversation"),
        (found.quarantined, "are in quarantine: of tools that are not deployed any more, or of another system message"),
        (found.no_task, "the environment makes no task of"),
        (found.duplicates, "ask what another one asks"),
        *((count, f"overlap with what versions are measured on ({kind})") for kind, count in found.contaminated.items()),
        (found.unverified, "could not be played again by the environment"),
        (found.train, "are tasks to train on now"),
        (found.kept_aside, "are kept aside to measure on: evergrad eval --split traffic"),
    ]
    print(f"{_count(found.traces, 'conversation')} of {', '.join(tenants)}:")
    for count, what in lines:
        if count:
            print(f"{count:6d} {what}")
    new = found.train + found.kept_aside
    if new:
        print(f"in {found.succeeded} of the {new} new ones, what the agent said earns the full reward")
        print(f"the next cycle trains on them: evergrad run {run / 'config.toml'} --run-dir {run}")


def _count(number: int, what: str) -> str:
    """
    >>> _count(1, "task"), _count(2, "task")
    ('1 task', '2 tasks')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def live_tasks(run: Path, taskset: Taskset) -> list[Task]:
    """The tasks of live traffic that are kept aside, under the tools of ``taskset``.

    Raises:
        TrafficError: no traffic is stored.
    """
    with _store(run) as store:
        kept = store.tasks(environment=taskset.name, contract_hash=taskset.contract_hash, split="traffic")
    return [taskset.task(each.row) for each in kept]


def _store(run: Path) -> TrafficStore:
    if not traffic_path(run).is_file():
        raise TrafficError("no traffic is stored", where=str(run), hint=f"evergrad serve --run {run} --record presidio")
    return TrafficStore(traffic_path(run))


def _tenants(store: TrafficStore, named: Sequence[str]) -> list[str]:
    """Whose traffic may become tasks. More than one tenant's in one run only where all are named.

    Raises:
        TrafficError: they are not, or one has no traffic.
    """
    there = sorted({each.tenant for each in store.traces()})
    unknown = sorted(set(named) - set(there))
    if unknown or not there:
        what = f"no traffic is stored of '{unknown[0]}'" if unknown else "no traffic is stored yet"
        raise TrafficError(what, hint=f"traffic is stored of: {', '.join(there) or 'nobody'}")
    chosen = sorted(set(named)) or there
    mixed = sorted({*chosen, *store.task_tenants()})
    if len(mixed) > 1 and set(mixed) != set(named):
        raise TrafficError(
            f"tasks of {' and '.join(mixed)} would train one model",
            hint=f"give each a run of its own, or name all: {' '.join(f'--tenant {each}' for each in mixed)}",
        )
    return chosen


def _deployed(run: Path) -> Taskset:
    environment = run_config(run)["environment"]
    settings: dict[str, Any] = environment.get("settings", {})
    if (run / "state.json").is_file():
        settings = state_of(run).deployed or settings
    return Taskset(environment["name"], settings)


def _measured(run: Path, taskset: Taskset) -> list[Task]:
    """The gate's tasks of the deployed contract, those of the cycles to come included."""
    config = run_config(run)
    n, cycles = config.get("eval", {}).get("n", 96), config.get("budget", {}).get("cycles", 1)
    wanted, tasks = min(_MOST_MEASURED, n * (cycles + 1)), list[Task]()
    for task in taskset.stream("gate", config.get("seed", 0)):
        tasks.append(task)
        if len(tasks) == wanted:
            break
    if not tasks:
        raise EvergradError(f"environment '{taskset.name}' has no gate tasks", where=taskset.suite)
    return tasks
