"""``evergrad model``: versions, their lineage, and where aliases point."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from evergrad.registry import AliasEvent, Registry, ReleaseEvent
from evergrad.service._runs import REGISTRY
from evergrad.service._screen import cell, console, print_json, table
from evergrad.types import InputError, ModelVersion, Release, ReleaseState, Verdict

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
        under_way = {each.candidate_id: each for alias in aliases if (each := _open_release(registry, alias))}
    if as_json:
        print_json(
            [
                {**_public(each), "aliases": _names(aliases, each), "release": under_way.get(each.version_id)}
                for each in versions
            ]
        )
        return
    if not versions:
        console().print(f"No version yet in {run}.")
        return
    rows = [
        (
            cell(version.version_id, "bold" if _names(aliases, version) else ""),
            " + ".join(version.parents) or None,
            version.policy_version,
            version.created_at,
            cell(", ".join((*_names(aliases, version), *_on_its_way(under_way.get(version.version_id)))), "green"),
        )
        for version in versions
    ]
    console().print(table(("version", "parent", "policy version", "made", "aliases"), rows, right=("policy version",)))


def show_version(run: Path, name: str, *, as_json: bool = False) -> None:
    """Prints all that is known of one version, and how aliases came to it and left it.

    Raises:
        EvergradError: no version or alias of that name; names the nearest.
    """
    with open_registry(run) as registry:
        version = registry.find(name)
        aliases = registry.aliases()
        lineage = registry.lineage(version.version_id)
        verdicts = registry.verdicts(version.version_id)
        events = [event for alias in aliases for event in registry.history(alias)]
        moves = [event for event in events if version.version_id in (event.version_id, event.from_version_id)]
        releases = registry.releases.of_version(version.version_id)
        steps = {each.release_id: registry.releases.events(each.release_id) for each in releases}
    if as_json:
        print_json(
            {
                **_public(version),
                "aliases": _names(aliases, version),
                "lineage": [each.version_id for each in lineage],
                "verdicts": verdicts,
                "moves": moves,
                "releases": [{**_public(each), "events": steps[each.release_id]} for each in releases],
            }
        )
        return
    screen = console()
    facts = {
        "version": version.version_id,
        "aliases": ", ".join(_names(aliases, version)) or None,
        "lineage": " ← ".join(each.version_id for each in lineage),
        "merged with": version.merged_id,
        "policy version": version.policy_version,
        "weights": run / version.weights_uri,
        "base model": version.base_model,
        "recipe": version.recipe_hash,
        "system prompt": version.system_prompt or None,
        "made": version.created_at,
        **{key.replace("_", " "): _flat(value) for key, value in version.metadata.items() if key not in _FOR_PROGRAMS},
    }
    screen.print(table(("", ""), [(cell(name, "dim"), value) for name, value in facts.items()]))
    for verdict in verdicts:
        word = cell("promote", "bold green") if verdict.promote else cell("refuse", "bold red")
        against = f"against {verdict.incumbent_id}: " if verdict.incumbent_id else ""
        screen.print(cell("verdict: "), word, cell(f"{against}{'; '.join(verdict.reasons)}"))
    for release in releases:
        plan = ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in release.plan.items())
        screen.print(cell(f"release {release.release_id} to {release.alias}, against {release.incumbent_id}: {plan}"))
        for step in steps[release.release_id]:
            screen.print(cell(_release_line(step)))
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
        under_way = _open_release(registry, alias)
        event = registry.promote(alias, version_id, ruled[-1] if ruled else by_hand, note=note, actor=_user())
    screen = console()
    screen.print(cell(_move_line(event)))
    if under_way is not None:
        screen.print(cell(f"The release of {under_way.candidate_id}, which was under way, has ended with this."))
    if not ruled:
        screen.print(
            cell("No verdict of the gate stands behind this.", "yellow"),
            cell(f"Undo: {shlex.join(['evergrad', 'model', 'rollback', alias, '--run', str(run)])}"),
        )


def roll_back(run: Path, alias: str, reason: str) -> None:
    """Ends the release that is under way on ``alias``; if none is, points ``alias`` at its predecessor.

    Raises:
        EvergradError: the alias serves nothing, or its first version.
    """
    reason = reason or "by hand"
    with open_registry(run) as registry:
        under_way = _open_release(registry, alias)
        if under_way is not None:
            registry.releases.roll_back(under_way, reason=reason, actor=_user())
            told = f"{alias} stays with {under_way.incumbent_id}; the release of {under_way.candidate_id} has ended"
            undo = under_way.candidate_id
        else:
            event = registry.rollback(alias, reason, actor=_user())
            told = f"{alias}: {event.from_version_id} → {event.version_id}"
            undo = str(event.from_version_id)
    back = ["evergrad", "model", "promote", undo, "--alias", alias, "--run", str(run)]
    screen = console()
    screen.print(cell(told))
    screen.print(cell(f"Undo: {shlex.join(back)}"))


def _open_release(registry: Registry, alias: str) -> Release | None:
    release = registry.releases.last(alias)
    return release if release is not None and release.state.is_open else None


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
    moved = f"{event.alias}: {event.from_version_id or 'nothing'} → {event.version_id}"
    return f"{event.at}  {moved} ({event.action}{_by(event.actor)}: {event.reason})"


def _release_line(event: ReleaseEvent) -> str:
    share = f" {event.share:.4g} of the sessions" if event.state is ReleaseState.CANARY else ""
    return f"{event.at}  {event.state.replace('_', ' ')}{share}{_by(event.actor)}: {event.reason}"


def _by(actor: str) -> str:
    return f" by {actor}" if actor else ""


def _on_its_way(release: Release | None) -> tuple[str, ...]:
    """Where a version stands that owns no alias yet."""
    if release is None:
        return ()
    share = f" {release.share:.4g}" if release.state is ReleaseState.CANARY else ""
    return (f"{release.state}{share} of {release.alias}",)


def _short(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _names(aliases: dict[str, str], version: ModelVersion) -> list[str]:
    return [alias for alias, version_id in aliases.items() if version_id == version.version_id]


def _public(noun: ModelVersion | Release) -> dict[str, object]:
    return {name: getattr(noun, name) for name in type(noun).__dataclass_fields__}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown user"
