"""The registry: versions with their parents, aliases, and the audit of every move of an alias.

An alias points at the promotion that made it what it is; each promotion remembers the one before. A rollback moves the
pointer back along that chain, so rolling back twice goes two promotions back. Nothing is ever changed or deleted but the
pointer itself, and each of its moves leaves an event in the same transaction.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from evergrad.config import nearest
from evergrad.database import Database
from evergrad.types import InputError, ModelVersion, Verdict, plain, strict_json

SCHEMA_VERSION = 1

_tables = sa.MetaData()
_versions = sa.Table(
    "versions",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("version_id", sa.String, nullable=False, unique=True),
    sa.Column("parent_id", sa.String, sa.ForeignKey("versions.version_id")),
    sa.Column("policy_version", sa.Integer, nullable=False),
    sa.Column("weights_uri", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("recipe_hash", sa.String, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
)
_events = sa.Table(
    "alias_events",
    _tables,
    sa.Column("event_id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("alias", sa.String, nullable=False, index=True),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("version_id", sa.String, sa.ForeignKey("versions.version_id"), nullable=False),
    sa.Column("from_version_id", sa.String, sa.ForeignKey("versions.version_id")),
    sa.Column("predecessor", sa.Integer, sa.ForeignKey("alias_events.event_id")),
    sa.Column("verdict_number", sa.Integer, sa.ForeignKey("verdicts.number")),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("at", sa.String, nullable=False),
)
_aliases = sa.Table(
    "aliases",
    _tables,
    sa.Column("alias", sa.String, primary_key=True),
    sa.Column("event_id", sa.Integer, sa.ForeignKey("alias_events.event_id"), nullable=False),
)
_verdicts = sa.Table(
    "verdicts",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("candidate_id", sa.String, nullable=False, index=True),
    sa.Column("promote", sa.Boolean, nullable=False),
    sa.Column("verdict", sa.Text, nullable=False),
    sa.Column("at", sa.String, nullable=False),
)


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


class Registry:
    """Versions and aliases in one database; any number of processes and threads may use it at once.

    Args:
        location: An SQLite file or an SQLAlchemy URL.

    Raises:
        DatabaseError: the database cannot be opened, or another schema version wrote it.
    """

    def __init__(self, location: str | Path) -> None:
        self._database = Database(location, _tables, room="registry", schema_version=SCHEMA_VERSION)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- versions --------------------------------------------------------------------------------------------------------

    def register(self, version: ModelVersion) -> ModelVersion:
        """Remembers ``version`` and returns it as stored.

        Registering the same version again, as after a crash, changes nothing and returns the first entry, whatever
        ``created_at`` and ``metadata`` say this time.

        Raises:
            RegistryError: the id belongs to another version or to an alias, or the parent is unknown.
        """
        if not version.version_id:
            raise RegistryError("a version needs a version_id", where=self._database.where)
        if not version.created_at:
            version = replace(version, created_at=_now())
        with self._database.write() as connection:
            known = _find_version(connection, version.version_id)
            if known is not None:
                self._require_same(known, version)
                return known
            if _current(connection, version.version_id) is not None:
                raise RegistryError(
                    f"'{version.version_id}' is an alias, and would be hidden by it",
                    where=self._database.where,
                    hint="give the version another id",
                )
            if version.parent_id is not None:
                self._require_version(connection, version.parent_id)
            row = {item: getattr(version, item) for item in _VERSION_FIELDS} | {"metadata": strict_json(version.metadata)}
            connection.execute(_versions.insert().values(row))
            return replace(version, metadata=plain(version.metadata))

    def get(self, version_id: str) -> ModelVersion:
        """The version with this id.

        Raises:
            RegistryError: unknown; names the nearest that exists.
        """
        with self._database.read() as connection:
            return self._require_version(connection, version_id)

    def find(self, name: str) -> ModelVersion:
        """The version that an alias serves, or else the version with this id.

        Raises:
            RegistryError: neither exists.
        """
        with self._database.read() as connection:
            current = _current(connection, name)
            return self._require_version(connection, current.version_id if current else name)

    def list(self) -> tuple[ModelVersion, ...]:
        """All versions, in the order in which they were registered."""
        with self._database.read() as connection:
            return tuple(_to_version(row) for row in connection.execute(sa.select(_versions).order_by(_versions.c.number)))

    def lineage(self, version_id: str) -> tuple[ModelVersion, ...]:
        """The version, its parent, and so on to the root. Ends always: a parent is registered before its child."""
        with self._database.read() as connection:
            chain = [self._require_version(connection, version_id)]
            while chain[-1].parent_id is not None:
                chain.append(self._require_version(connection, chain[-1].parent_id))
            return tuple(chain)

    # -- aliases ---------------------------------------------------------------------------------------------------------

    def resolve(self, alias: str) -> str | None:
        """The id of the version that ``alias`` serves; ``None`` while nothing was promoted to it."""
        with self._database.read() as connection:
            current = _current(connection, alias)
            return current.version_id if current else None

    def promotion(self, alias: str) -> AliasEvent | None:
        """The promotion that ``alias`` rests on: the last, or after a rollback an earlier one; ``None`` while there is none."""
        with self._database.read() as connection:
            current = _current(connection, alias)
            return _to_event(current, _verdict_text(connection, current.verdict_number)) if current else None

    def aliases(self) -> dict[str, str]:
        """Each alias and the id of the version that it serves."""
        query = sa.select(_aliases.c.alias, _events.c.version_id).join(_events, _aliases.c.event_id == _events.c.event_id)
        with self._database.read() as connection:
            return {row.alias: row.version_id for row in connection.execute(query.order_by(_aliases.c.alias))}

    def promote(
        self, alias: str, version_id: str, verdict: Verdict | None = None, *, bootstrap: bool = False, note: str = ""
    ) -> AliasEvent:
        """Lets ``alias`` serve ``version_id``, on the evidence of ``verdict``; ``note`` goes on record beside its reasons.

        ``bootstrap`` is the one way without evidence, for an alias that serves nothing yet. Promoting again with the same
        verdict, or bootstrapping the same version again, as after a crash, changes nothing and returns the first event.

        Raises:
            RegistryError: the verdict does not promote, rules on other versions than these, or compares with an incumbent
                that the alias no longer serves; a bootstrap of an alias that serves something; or an alias that is no
                plain name, or the id of a version.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", alias):
            raise RegistryError(
                f"{alias!r} is not an alias", hint="use letters, digits, '.', '_' and '-', as in 'production'; 64 at most"
            )
        if verdict is None and not bootstrap:
            raise RegistryError(
                "a promotion needs a verdict", where=alias, hint="run the gate, or bootstrap=True for the first"
            )
        if verdict is not None:
            _require_ruling(alias, version_id, verdict)
        with self._database.write() as connection:
            self._require_version(connection, version_id)
            current = _current(connection, alias)
            if current is None and _find_version(connection, alias) is not None:
                raise RegistryError(f"'{alias}' is a version, which the alias would hide", hint="choose another --alias")
            serving = current.version_id if current else None
            if current is not None and serving == version_id:
                text = _verdict_text(connection, current.verdict_number)
                if text == (strict_json(verdict) if verdict else None):
                    return _to_event(current, text)
                raise RegistryError(f"{alias} serves {version_id} already", hint="nothing to do")
            if verdict is None and current is not None:
                raise RegistryError(
                    f"{alias} serves {serving}; only the first promotion may go without evidence",
                    hint="evaluate both versions and pass the gate's verdict, or use another alias",
                )
            if verdict is not None and verdict.incumbent_id != serving:
                raise RegistryError(
                    f"the verdict compares {version_id} with {verdict.incumbent_id}, but {alias} serves {serving} now",
                    hint="evaluate against what is served and pass the new verdict",
                )
            number = _insert_verdict(connection, verdict) if verdict else None
            reason = "; ".join(verdict.reasons) if verdict else "first version, promoted without evidence"
            reason = "; ".join(each for each in (reason, note) if each)
            action = "bootstrap" if current is None else "promote"
            return self._move(connection, alias, action, version_id, current, number, reason)

    def rollback(self, alias: str, reason: str = "") -> AliasEvent:
        """Lets ``alias`` serve again what it served before its current promotion.

        Raises:
            RegistryError: the alias serves nothing, or its current version has no predecessor.
        """
        with self._database.write() as connection:
            current = _current(connection, alias)
            if current is None:
                known = [row.alias for row in connection.execute(sa.select(_aliases.c.alias))]
                hint = nearest(alias, known) if known else "promote a version first"
                raise RegistryError(f"nothing is promoted to '{alias}'", hint=hint)
            if current.predecessor is None:
                raise RegistryError(
                    f"{alias} serves {current.version_id}, its first version: there is no predecessor",
                    hint="evergrad model promote VERSION; 'evergrad model list' names the versions",
                )
            before = connection.execute(sa.select(_events).where(_events.c.event_id == current.predecessor)).one()
            return self._move(connection, alias, "rollback", before.version_id, current, None, reason, pointer=before.event_id)

    def history(self, alias: str) -> tuple[AliasEvent, ...]:
        """Every move of ``alias``, oldest first; empty for one that never moved."""
        query = (
            sa.select(_events, _verdicts.c.verdict)
            .outerjoin(_verdicts, _events.c.verdict_number == _verdicts.c.number)
            .where(_events.c.alias == alias)
            .order_by(_events.c.event_id)
        )
        with self._database.read() as connection:
            return tuple(_to_event(row, row.verdict) for row in connection.execute(query))

    # -- verdicts --------------------------------------------------------------------------------------------------------

    def record_verdict(self, verdict: Verdict) -> None:
        """Keeps a verdict, refusals above all; a promotion keeps its own."""
        with self._database.write() as connection:
            _insert_verdict(connection, verdict)

    def verdicts(self, candidate_id: str | None = None) -> tuple[Verdict, ...]:
        """All verdicts, or those on one version, oldest first."""
        query = sa.select(_verdicts.c.verdict).order_by(_verdicts.c.number)
        if candidate_id is not None:
            query = query.where(_verdicts.c.candidate_id == candidate_id)
        with self._database.read() as connection:
            return tuple(_to_verdict(json.loads(text)) for text in connection.execute(query).scalars())

    # -- inside a transaction --------------------------------------------------------------------------------------------

    def _move(
        self,
        connection: sa.Connection,
        alias: str,
        action: str,
        version_id: str,
        current: sa.Row[Any] | None,
        verdict_number: int | None,
        reason: str,
        pointer: int | None = None,
    ) -> AliasEvent:
        """Writes the event and moves the pointer to it, or to ``pointer``."""
        values = {
            "alias": alias,
            "action": action,
            "version_id": version_id,
            "from_version_id": current.version_id if current else None,
            "predecessor": current.event_id if current and pointer is None else None,
            "verdict_number": verdict_number,
            "reason": reason,
            "at": _now(),
        }
        event_id = connection.execute(_events.insert().values(values).returning(_events.c.event_id)).scalar_one()
        target = event_id if pointer is None else pointer
        if current is None:
            connection.execute(_aliases.insert().values(alias=alias, event_id=target))
        else:
            connection.execute(_aliases.update().where(_aliases.c.alias == alias).values(event_id=target))
        row = connection.execute(sa.select(_events).where(_events.c.event_id == event_id)).one()
        return _to_event(row, _verdict_text(connection, verdict_number))

    def _require_version(self, connection: sa.Connection, version_id: str) -> ModelVersion:
        version = _find_version(connection, version_id)
        if version is None:
            known = connection.execute(sa.select(_versions.c.version_id)).scalars().all()
            hint = nearest(version_id, known) if known else "no version is registered yet"
            raise RegistryError(f"no version '{version_id}'", where=self._database.where, hint=hint)
        return version

    def _require_same(self, known: ModelVersion, version: ModelVersion) -> None:
        differing = [
            name for name in _VERSION_FIELDS if name != "created_at" and getattr(known, name) != getattr(version, name)
        ]
        if differing:
            raise RegistryError(
                f"version '{version.version_id}' exists already and differs in {', '.join(differing)}",
                where=self._database.where,
                hint="give the new version an id of its own",
            )


_VERSION_FIELDS = ("version_id", "parent_id", "policy_version", "weights_uri", "base_model", "recipe_hash", "created_at")


def _require_ruling(alias: str, version_id: str, verdict: Verdict) -> None:
    """``promote`` must be the boolean itself: a truthy string out of a JSON file is no ruling."""
    if verdict.promote is not True:
        raise RegistryError(f"the verdict refuses {version_id}: {'; '.join(verdict.reasons) or 'no reason given'}", where=alias)
    if verdict.candidate_id != version_id:
        raise RegistryError(f"the verdict is about {verdict.candidate_id or 'no version'}, not {version_id}", where=alias)


def _insert_verdict(connection: sa.Connection, verdict: Verdict) -> int:
    values = {"candidate_id": verdict.candidate_id, "promote": verdict.promote, "verdict": strict_json(verdict), "at": _now()}
    return int(connection.execute(_verdicts.insert().values(values).returning(_verdicts.c.number)).scalar_one())


def _verdict_text(connection: sa.Connection, number: int | None) -> str | None:
    return connection.execute(sa.select(_verdicts.c.verdict).where(_verdicts.c.number == number)).scalar()


def _find_version(connection: sa.Connection, version_id: str) -> ModelVersion | None:
    row = connection.execute(sa.select(_versions).where(_versions.c.version_id == version_id)).one_or_none()
    return _to_version(row) if row else None


def _current(connection: sa.Connection, alias: str) -> sa.Row[Any] | None:
    """The promotion that ``alias`` points at."""
    query = sa.select(_events).join(_aliases, _aliases.c.event_id == _events.c.event_id).where(_aliases.c.alias == alias)
    return connection.execute(query).one_or_none()


def _to_version(row: sa.Row[Any]) -> ModelVersion:
    values = {name: getattr(row, name) for name in _VERSION_FIELDS}
    return ModelVersion(**values, metadata=json.loads(row.metadata))


def _to_event(row: sa.Row[Any], verdict: str | None) -> AliasEvent:
    return AliasEvent(
        event_id=row.event_id,
        alias=row.alias,
        action=row.action,
        version_id=row.version_id,
        from_version_id=row.from_version_id,
        at=row.at,
        reason=row.reason,
        verdict=json.loads(verdict) if verdict else {},
    )


def _to_verdict(data: dict[str, Any]) -> Verdict:
    return Verdict(**{**data, "reasons": tuple(data["reasons"])})


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
