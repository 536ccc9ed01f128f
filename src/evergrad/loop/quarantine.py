"""Quarantine: what customers asked under a contract that no longer holds teaches calls that no longer work.

A change is *breaking* when somebody who knows the old contract alone would call wrongly: a tool or a parameter is gone, has
another type, or is required now. Words in descriptions and instructions may change without that. The conversion of traffic
into tasks leaves out what was asked under a contract that the deployed one breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def _broken(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    ours, theirs = before["parameters"], after["parameters"]
    found = [f"{name}: parameter '{key}' is gone" for key in ours if key not in theirs]
    found += [
        f"{name}: parameter '{key}' is {theirs[key]}, was {kind}" for key, kind in ours.items() if theirs.get(key, kind) != kind
    ]
    required = set(after["required"]) - set(before["required"])
    return found + [f"{name}: parameter '{key}' is required now" for key in sorted(required)]
