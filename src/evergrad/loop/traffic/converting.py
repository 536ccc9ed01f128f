"""Traces into tasks: what was kept of live traffic becomes what the environment would have asked.

In this order, each step only with what the one before has left::

    whole? ─▶ same tools? ─▶ which split (by customer)? ─▶ from_trace ─▶ new? ─▶ far from all that measures? ─▶ verify

The split comes before the conversion and belongs to the customer, so that no two requests of one lie on both sides.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from evergrad.envs import SPLITS, EnvironmentFault, TaskRow, Taskset, VerifierFault, play
from evergrad.envs import content_hash as hash_of
from evergrad.evals import Overlaps
from evergrad.loop.quarantine import breaking_changes
from evergrad.loop.traffic.store import StoredTrace, TrafficStore
from evergrad.types import Task

KEPT_ASIDE = "traffic"
"""Split of the live tasks that nothing is trained on."""


@dataclass
class Converted:
    """How many traces became what."""

    traces: int = 0
    known: int = 0
    """Converted before, under the same tools."""
    continued: int = 0
    """The beginning of another trace."""
    quarantined: int = 0
    """Of tools that are not deployed any more, or of a system message that the environment does not know."""
    no_task: int = 0
    """The environment makes none of it."""
    duplicates: int = 0
    """Of a task that is there."""
    contaminated: Counter[str] = field(default_factory=Counter)
    """Left out of training, because the same, or nearly the same, is measured on; by kind."""
    unverified: int = 0
    """The environment failed when the replies were played again."""
    train: int = 0
    kept_aside: int = 0
    succeeded: int = 0
    """Of the new tasks: the replies in the trace earn the full reward."""


async def convert(store: TrafficStore, taskset: Taskset, tenants: Sequence[str], measured: Iterable[Task]) -> Converted:
    """Makes tasks of the traces of ``tenants``, and keeps them.

    Args:
        store: Where both are.
        taskset: The environment as it is deployed; it defines ``from_trace``.
        tenants: Whose traffic may be learned from.
        measured: Tasks that versions are or will be measured on.
    """
    traces, found = store.traces(tenants), Converted()
    usable = usable_prompts(taskset)
    earlier = store.tasks(environment=taskset.name, contract_hash=taskset.contract_hash)
    known = store.converted(taskset.contract_hash)
    contents = {_content(taskset.task(each.row)) for each in earlier}
    continued = beginnings(traces)
    fresh: list[tuple[StoredTrace, TaskRow, Task]] = []
    for each in traces:
        found.traces += 1
        if each.trace.trace_id in known:
            found.known += 1
        elif conversation_key(each, len(each.trace.messages)) in continued:
            found.continued += 1
        elif each.system_hash not in usable:
            found.quarantined += 1
        elif (row := taskset.from_trace(each.trace)) is None:
            found.no_task += 1
        else:
            task = taskset.task(row)
            if _content(task) in contents:
                found.duplicates += 1
                continue
            contents.add(_content(task))
            fresh.append((each, row, task))
    aside = [task for each, _, task in fresh if split_of_trace(each) == KEPT_ASIDE]
    aside += [taskset.task(each.row) for each in earlier if each.split == KEPT_ASIDE]
    overlaps = Overlaps({task.task_id: request_of(task) for task in (*measured, *aside)})
    for each, row, task in fresh:
        split = split_of_trace(each)
        if split == "train" and (overlap := overlaps.find(request_of(task))) is not None:
            found.contaminated[overlap.kind] += 1
        else:
            await _keep(store, taskset, each, row, task, split, found)
    return found


async def _keep(
    store: TrafficStore, taskset: Taskset, stored: StoredTrace, row: TaskRow, task: Task, split: str, found: Converted
) -> None:
    """Keeps one new task with what the verifier says of the replies in its trace, played again in a fresh instance."""
    try:
        reward = (await play(taskset, task, stored.trace.replies)).reward
    except (EnvironmentFault, VerifierFault):
        found.unverified += 1
        return
    store.add_task(
        stored.trace.trace_id,
        row,
        environment=taskset.name,
        contract_hash=taskset.contract_hash,
        content_hash=_content(task),
        task_id=task.task_id,
        split=split,
        reward=reward,
    )
    found.train += split == "train"
    found.kept_aside += split == KEPT_ASIDE
    found.succeeded += reward >= 1.0


def usable_prompts(taskset: Taskset) -> set[str]:
    """Hashes of the system messages under which an agent could call as it must now: those of the deployed contract, and of
    others that the deployed one breaks nothing of (:func:`~evergrad.loop.quarantine.breaking_changes`)."""
    environment, now = taskset.environment_class, taskset.contract()
    names = [each for each in environment.contracts() if not breaking_changes(environment.contract(each), now)]
    return {hash_of(environment.system_prompt(each)) for each in {taskset.config.contract, *names}}


def split_of_trace(stored: StoredTrace) -> str:
    """``train`` or ``traffic``, by the customer, or by the conversation where the client named nobody."""
    cluster = f"{stored.tenant}/{stored.user or stored.trace.trace_id}"
    place = int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:7], "big") / 2**56
    return "train" if place < SPLITS["train"][1] else KEPT_ASIDE


def request_of(task: Task) -> str:
    """What the user says in a task: the part of it that can overlap with another's."""
    return "\n".join(each.content for each in task.prompt if each.role == "user")


def _content(task: Task) -> str:
    """Names what a task asks and what it rests on, whatever the case and spacing of its words."""
    return hash_of([" ".join(request_of(task).casefold().split()), dict(task.metadata)])


def beginnings(traces: Sequence[StoredTrace]) -> set[str]:
    """What each conversation was before its last reply: a trace that is no more than that goes on in another."""
    found = set()
    for each in traces:
        for index, message in enumerate(each.trace.messages[:-1]):
            if message.role == "assistant":
                found.add(conversation_key(each, index + 1))
    return found


def conversation_key(stored: StoredTrace, length: int) -> str:
    """Names the first ``length`` messages of a conversation, and whose they are."""
    return hash_of([stored.tenant, stored.user, [each.as_dict() for each in stored.trace.messages[:length]]])
