"""What happens inside a transaction of the registry: versions are found, verdicts are kept, an alias moves."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from evergrad.config import nearest
from evergrad.registry._tables import ALIASES, EVENTS, VERDICTS, VERSIONS
from evergrad.types import InputError, ModelVersion, Verdict, strict_json


class RegistryError(InputError):
    """A version or alias that is unknown, or a move that the registry refuses."""


@dataclass(frozen=True, slots=True)
class AliasEvent:
    """One move of an alias; the audit is the list of these.

    >>> AliasEvent(1, "production", "bootstrap", "v1", None, "2026-01-01T00:00:00+00:00").action
    'bootstrap'
    """

    event_id: int
    alias: str
    action: str
    """``bootstrap``, ``promote`` or ``rollback``."""
    version_id: str
    """What the alias served afterwards."""
    from_version_id: str | None
    """What it served before; ``None`` if nothing."""
    at: str
    """UTC, ISO 8601."""
    reason: str = ""
    verdict: Mapping[str, Any] = field(default_factory=dict)
    """The verdict that a promotion rests on, as JSON values; empty without one."""
    actor: str = ""
    """Who moved it: ``loop`` (to a first version), ``gate``, ``canary``, or the name of a user."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What it rests on besides the verdict, as JSON values: the live outcomes of a canary."""


VERSION_FIELDS = (
    *("version_id", "parent_id", "policy_version", "weights_uri", "base_model", "recipe_hash", "created_at"),
    *("system_prompt", "merged_id"),
)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def find_version(connection: sa.Connection, version_id: str) -> ModelVersion | None:
    row = connection.execute(sa.select(VERSIONS).where(VERSIONS.c.version_id == version_id)).one_or_none()
    return to_version(row) if row else None


def require_version(connection: sa.Connection, version_id: str, where: str) -> ModelVersion:
    """
    Raises:
        RegistryError: unknown; names the nearest that exists.
    """
    version = find_version(connection, version_id)
    if version is None:
        known = connection.execute(sa.select(VERSIONS.c.version_id)).scalars().all()
        hint = nearest(version_id, known) if known else "no version is registered yet"
        raise RegistryError(f"no version '{version_id}'", where=where, hint=hint)
    return version


def current_promotion(connection: sa.Connection, alias: str) -> sa.Row[Any] | None:
    """The promotion that ``alias`` points at."""
    query = sa.select(EVENTS).join(ALIASES, ALIASES.c.event_id == EVENTS.c.event_id).where(ALIASES.c.alias == alias)
    return connection.execute(query).one_or_none()


def require_ruling(alias: str, version_id: str, verdict: Verdict) -> None:
    """
    Raises:
        RegistryError: the verdict does not promote, or is about another version.
    """
    # The boolean itself: a truthy string out of a JSON file is no ruling.
    if verdict.promote is not True:
        raise RegistryError(f"the verdict refuses {version_id}: {'; '.join(verdict.reasons) or 'no reason given'}", where=alias)
    if verdict.candidate_id != version_id:
        raise RegistryError(f"the verdict is about {verdict.candidate_id or 'no version'}, not {version_id}", where=alias)


def require_incumbent(alias: str, serving: str | None, verdict: Verdict) -> None:
    """
    Raises:
        RegistryError: the verdict compares with another version than the one that ``alias`` serves.
    """
    if verdict.incumbent_id != serving:
        raise RegistryError(
            f"the verdict compares {verdict.candidate_id} with {verdict.incumbent_id}, but {alias} serves {serving} now",
            hint="evaluate against what is served and pass the new verdict",
        )


def move(
    connection: sa.Connection,
    alias: str,
    action: str,
    version_id: str,
    before: sa.Row[Any] | None,
    *,
    reason: str,
    actor: str,
    evidence: Mapping[str, Any] | None = None,
    verdict_number: int | None = None,
    pointer: int | None = None,
) -> AliasEvent:
    """Writes the event and moves the alias to it, or to ``pointer``; ``before`` is what the alias points at until then."""
    values = {
        "alias": alias,
        "action": action,
        "version_id": version_id,
        "from_version_id": before.version_id if before else None,
        "predecessor": before.event_id if before and pointer is None else None,
        "verdict_number": verdict_number,
        "reason": reason,
        "at": now(),
        "actor": actor,
        "evidence": strict_json(evidence or {}),
    }
    event_id = connection.execute(EVENTS.insert().values(values).returning(EVENTS.c.event_id)).scalar_one()
    target = event_id if pointer is None else pointer
    if before is None:
        connection.execute(ALIASES.insert().values(alias=alias, event_id=target))
    else:
        connection.execute(ALIASES.update().where(ALIASES.c.alias == alias).values(event_id=target))
    row = connection.execute(sa.select(EVENTS).where(EVENTS.c.event_id == event_id)).one()
    return to_event(row, verdict_text(connection, verdict_number))


def insert_verdict(connection: sa.Connection, verdict: Verdict) -> int:
    values = {"candidate_id": verdict.candidate_id, "promote": verdict.promote, "verdict": strict_json(verdict), "at": now()}
    return int(connection.execute(VERDICTS.insert().values(values).returning(VERDICTS.c.number)).scalar_one())


def verdict_text(connection: sa.Connection, number: int | None) -> str | None:
    return connection.execute(sa.select(VERDICTS.c.verdict).where(VERDICTS.c.number == number)).scalar()


def to_version(row: sa.Row[Any]) -> ModelVersion:
    values = {name: getattr(row, name) for name in VERSION_FIELDS}
    return ModelVersion(**values, metadata=json.loads(row.metadata))


def to_event(row: sa.Row[Any], verdict: str | None) -> AliasEvent:
    return AliasEvent(
        event_id=row.event_id,
        alias=row.alias,
        action=row.action,
        version_id=row.version_id,
        from_version_id=row.from_version_id,
        at=row.at,
        reason=row.reason,
        verdict=json.loads(verdict) if verdict else {},
        actor=row.actor,
        evidence=json.loads(row.evidence),
    )


def to_verdict(data: dict[str, Any]) -> Verdict:
    return Verdict(**{**data, "reasons": tuple(data["reasons"])})
