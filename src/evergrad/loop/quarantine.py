"""Quarantine: live rollouts made under a contract that no longer holds teach calls that no longer work.

Each rollout names the hash of the contract that it was made under. A change is *breaking* when somebody who knows the old
contract alone would call wrongly: a tool or a parameter is gone, has another type, or is required now. Words in descriptions
and instructions may change without that. A breaking change quarantines all that was made under the old contract; should the
world go back to it, it is lifted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evergrad.envs import Taskset
from evergrad.loop._folder import LoopState, read_state
from evergrad.rollouts import read_rollouts

_WORDS = frozenset({"description", "instructions"})


def breaking_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What an agent that knows the contract ``before`` would do wrong under ``after``; empty for a change of words.

    >>> order = {"name": "order", "description": "", "parameters": {"id": "str"}, "required": ["id"]}
    >>> breaking_changes({"tools": [order]}, {"tools": [order | {"description": "of a customer"}]})
    []
    >>> breaking_changes({"tools": [order]}, {"tools": [order | {"parameters": {"id": "int"}}, order | {"name": "refund"}]})
    ["order: parameter 'id' is int, was str"]
    """
    ours, theirs = ({tool["name"]: tool for tool in each.get("tools", ())} for each in (before, after))
    found = [f"{name} is gone" for name in ours if name not in theirs]
    for name in ours.keys() & theirs.keys():
        found += _broken(name, ours[name], theirs[name])
    rest = sorted((before.keys() | after.keys()) - _WORDS - {"tools", "environment"})
    return sorted(found) + [f"{key} has changed" for key in rest if before.get(key) != after.get(key)]


def quarantine_older(state: LoopState, before: Taskset, after: Taskset) -> list[str]:
    """Puts what was made under ``before`` into quarantine where the change to ``after`` breaks it; what broke."""
    state.quarantined.pop(after.contract_hash, None)
    broken = breaking_changes(before.contract(), after.contract())
    if broken:
        state.quarantined[before.contract_hash] = {"suite": before.suite, "why": "; ".join(broken)}
    return broken


def usable_traces(run: Path) -> Iterator[dict[str, Any]]:
    """The run's live rollouts that may become tasks or demonstrations, oldest first: those in quarantine are left out.

    Raises:
        EvergradError: the state or a file of rollouts is broken.
    """
    quarantined = read_state(run / "state.json").quarantined
    for path in sorted((run / "rollouts").glob("live-*.jsonl")):
        for record in read_rollouts(path):
            if record.get("contract") and record["contract"] not in quarantined:
                yield record


def _broken(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    ours, theirs = before["parameters"], after["parameters"]
    found = [f"{name}: parameter '{key}' is gone" for key in ours if key not in theirs]
    found += [
        f"{name}: parameter '{key}' is {theirs[key]}, was {kind}" for key, kind in ours.items() if theirs.get(key, kind) != kind
    ]
    required = set(after["required"]) - set(before["required"])
    return found + [f"{name}: parameter '{key}' is required now" for key in sorted(required)]
