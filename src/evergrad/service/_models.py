"""``evergrad model``: versions, their lineage, and where aliases point."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from evergrad.registry import AliasEvent, Registry
from evergrad.service._runs import REGISTRY
from evergrad.service._screen import cell, console, print_json, table
from evergrad.types import InputError, ModelVersion, Verdict

_FOR_PROGRAMS = ("probe",)
"""Metadata of a version that says nothing to a person; ``--json`` shows it."""


@contextmanager
def open_registry(run: Path) -> Iterator[Registry]:
    """The run's registry; several processes may have it open at once."""
    with Registry(run / REGISTRY) as registry:
        yield registry


def list_versions(run: Path, *, as_json: bool = False) -> None:
    """Prints the versions of a run in the order in which they were made."""
    with open_registry(run) as registry:
        versions, aliases = registry.list(), registry.aliases()
    if as_json:
        print_json([{**_public(version), "aliases": _names(aliases, version)} for version in versions])
        return
    if not versions:
        console().print(f"No version yet in {run}.")
        return
    rows = [
        (
            cell(version.version_id, "bold" if _names(aliases, version) else ""),
            version.parent_id,
            version.policy_version,
            version.created_at,
            cell(", ".join(_names(aliases, version)), "green"),
        )
        for version in versions
    ]
    console().print(table(("version", "parent", "policy version", "made", "aliases"), rows, right=("policy version",)))


def show_version(run: Path, name: str, *, as_json: bool = False) -> None:
    """Prints all that is known of one version, and how aliases came to it.

    Raises:
        EvergradError: no version or alias of that name; names the nearest.
    """
    with open_registry(run) as registry:
        version = registry.find(name)
        aliases = registry.aliases()
        lineage = registry.lineage(version.version_id)
        verdicts = registry.verdicts(version.version_id)
        moves = [event for alias in aliases for event in registry.history(alias) if event.version_id == version.version_id]
    if as_json:
        print_json(
            {
                **_public(version),
                "aliases": _names(aliases, version),
                "lineage": [each.version_id for each in lineage],
                "verdicts": verdicts,
                "moves": moves,
            }
        )
        return
    screen = console()
    facts = {
        "version": version.version_id,
        "aliases": ", ".join(_names(aliases, version)) or None,
        "lineage": " ← ".join(each.version_id for each in lineage),
        "policy version": version.policy_version,
        "weights": run / version.weights_uri,
        "base model": version.base_model,
        "recipe": version.recipe_hash,
        "made": version.created_at,
        **{key.replace("_", " "): _flat(value) for key, value in version.metadata.items() if key not in _FOR_PROGRAMS},
    }
    screen.print(table(("", ""), [(cell(name, "dim"), value) for name, value in facts.items()]))
    for verdict in verdicts:
        word = cell("promote", "bold green") if verdict.promote else cell("refuse", "bold red")
        against = f"against {verdict.incumbent_id}: " if verdict.incumbent_id else ""
        screen.print(cell("verdict: "), word, cell(f"{against}{'; '.join(verdict.reasons)}"))
    for move in moves:
        screen.print(cell(_move_line(move)))


def promote_by_hand(run: Path, name: str, alias: str, reason: str) -> None:
    """Points ``alias`` at a version. The gate's own verdict is used where it fits; else the record says that a person did it.

    Raises:
        EvergradError: no such version, or the alias serves it already.
    """
    with open_registry(run) as registry:
        version_id = registry.find(name).version_id
        serving = registry.resolve(alias)
        ruled = [
            each
            for each in registry.verdicts(version_id)
            if each.promote and each.incumbent_id == serving and not each.evidence.get("by_hand")
        ]
        by_hand = Verdict(
            True,
            (f"by hand, without the gate: {reason or 'no reason given'}",),
            {"by_hand": True, "user": _user()},
            candidate_id=version_id,
            incumbent_id=serving,
        )
        note = f"by hand: {reason}" if ruled and reason else ""
        event = registry.promote(alias, version_id, ruled[-1] if ruled else by_hand, note=note)
    screen = console()
    screen.print(cell(_move_line(event)))
    if not ruled:
        screen.print(
            cell("No verdict of the gate stands behind this.", "yellow"),
            cell(f"Undo: {shlex.join(['evergrad', 'model', 'rollback', alias, '--run', str(run)])}"),
        )


def roll_back(run: Path, alias: str, reason: str) -> None:
    """Points ``alias`` at its predecessor.

    Raises:
        EvergradError: the alias serves nothing, or its first version.
    """
    with open_registry(run) as registry:
        event = registry.rollback(alias, reason or f"by hand, {_user()}")
    back = ["evergrad", "model", "promote", str(event.from_version_id), "--alias", alias, "--run", str(run)]
    screen = console()
    screen.print(cell(f"{alias}: {event.from_version_id} → {event.version_id}"))
    screen.print(cell(f"Undo: {shlex.join(back)}"))


def find_served(run: Path, alias: str) -> ModelVersion:
    """The version that ``alias`` serves.

    Raises:
        InputError: nothing is promoted to it.
    """
    with open_registry(run) as registry:
        version_id = registry.resolve(alias)
        if version_id is not None:
            return registry.get(version_id)
        known = ", ".join(registry.aliases())
    hint = f"aliases there: {known}" if known else "let the run promote a version, or 'evergrad model promote VERSION'"
    raise InputError(f"nothing is promoted to '{alias}'", where=str(run), hint=hint)


def _flat(value: object) -> object:
    return ", ".join(f"{name} {inner}" for name, inner in value.items()) if isinstance(value, Mapping) else value


def _move_line(event: AliasEvent) -> str:
    return (
        f"{event.at}  {event.alias}: {event.from_version_id or 'nothing'} → {event.version_id} ({event.action}: {event.reason})"
    )


def _names(aliases: dict[str, str], version: ModelVersion) -> list[str]:
    return [alias for alias, version_id in aliases.items() if version_id == version.version_id]


def _public(version: ModelVersion) -> dict[str, object]:
    return {name: getattr(version, name) for name in ModelVersion.__dataclass_fields__}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown user"
