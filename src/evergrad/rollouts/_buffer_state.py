"""Where a buffer stands, on disk, so that a resumed run goes on with what was rolled out and not yet trained.

One JSON object a line: the first is the buffer, each of the others a queued group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from evergrad.rollouts._writer import rollout_json
from evergrad.types import EvergradError, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class BufferState:
    """What a buffer hands on to the one that takes its place.

    >>> BufferState(next_index=9, unfinished=(6, 8)).next_index
    9
    """

    next_index: int = 0
    """Of the first group that has not begun."""
    unfinished: tuple[int, ...] = ()
    """Groups that had begun and not ended, ascending. They begin anew, before any other, so that no task is left out."""
    queued: Mapping[int, RolloutGroup] = field(default_factory=dict)
    """Groups that had ended and wait for a batch, by index."""
    flat_batches: int = 0
    """Batches in a row without any advantage."""
    faults: tuple[bool, ...] = ()
    """Of the last rollouts, oldest first, which failed for reasons that are not the model's."""


def write_buffer_state(path: Path, state: BufferState) -> None:
    """Writes a new file; whoever needs it whole or absent names it only afterwards.

    Raises:
        EvergradError: the disk refuses.
    """
    head = {
        "next_index": state.next_index,
        "unfinished": list(state.unfinished),
        "flat_batches": state.flat_batches,
        "faults": [int(fault) for fault in state.faults],
    }
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(head) + "\n")
            for index, group in sorted(state.queued.items()):
                file.write(_group_json(index, group) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        what = f"the rollouts that wait for a batch cannot be written: {error.strerror or error}"
        raise EvergradError(what, where=str(path), hint="free disk space, then resume") from error


def read_buffer_state(path: Path) -> BufferState:
    """
    Raises:
        EvergradError: no such file, or one that cannot be read.
    """
    try:
        head, *groups = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return BufferState(
            next_index=int(head["next_index"]),
            unfinished=tuple(int(index) for index in head["unfinished"]),
            queued={int(record["index"]): _group(record) for record in groups},
            flat_batches=int(head["flat_batches"]),
            faults=tuple(bool(fault) for fault in head["faults"]),
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        what = f"the rollouts that wait for a batch cannot be read: {error}"
        raise EvergradError(what, where=str(path), hint="put back a copy of the checkpoint, or start anew") from error


def _group_json(index: int, group: RolloutGroup) -> str:
    rollouts = ",".join(rollout_json(rollout) for rollout in group.rollouts)
    # JSON has no keys that are lists of ids.
    prompts = json.dumps([[list(read), list(taught)] for read, taught in group.teacher_prompts.items()])
    return f'{{"index":{index},"group_id":{json.dumps(group.group_id)},"teacher_prompts":{prompts},"rollouts":[{rollouts}]}}'


def _group(record: Mapping[str, Any]) -> RolloutGroup:
    return RolloutGroup(
        group_id=str(record["group_id"]),
        rollouts=tuple(_ROLLOUTS.validate_python(record["rollouts"])),
        teacher_prompts={tuple(read): tuple(taught) for read, taught in record["teacher_prompts"]},
    )


_ROLLOUTS: TypeAdapter[list[Rollout]] = TypeAdapter(list[Rollout])
