"""The registry: versions with their parents, aliases, and the audit of every move of an alias.

An alias points at the promotion that made it what it is; each promotion remembers the one before. A rollback moves the
pointer back along that chain, so rolling back twice goes two promotions back. Nothing is ever changed or deleted but the
pointer itself, and each of its moves leaves an event in the same transaction. The way of a candidate through a canary, which
ends in such a move or in none, is in ``releases.py``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from evergrad.config import nearest
from evergrad.database import Database
from evergrad.registry._moves import (
    VERSION_FIELDS,
    AliasEvent,
    RegistryError,
    current_promotion,
    find_version,
    insert_verdict,
    move,
    now,
    require_incumbent,
    require_ruling,
    require_version,
    to_event,
    to_verdict,
    to_version,
    verdict_text,
)
from evergrad.registry._tables import ALIASES, EVENTS, SCHEMA_VERSION, TABLES, VERDICTS, VERSIONS, upgrade
from evergrad.registry.releases import Releases, close_open_release
from evergrad.types import ModelVersion, Verdict, plain, strict_json


class Registry:
    """Versions and aliases in one database; any number of processes and threads may use it at once.

    Args:
        location: An SQLite file or an SQLAlchemy URL.

    Raises:
        DatabaseError: the database cannot be opened, or another schema version wrote it.
    """

    def __init__(self, location: str | Path) -> None:
        self._database = Database(location, TABLES, room="registry", schema_version=SCHEMA_VERSION, upgrade=upgrade)
        self.releases = Releases(self._database)
        """Candidates on their way to an alias."""

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
            version = replace(version, created_at=now())
        with self._database.write() as connection:
            known = find_version(connection, version.version_id)
            if known is not None:
                self._require_same(known, version)
                return known
            if current_promotion(connection, version.version_id) is not None:
                raise RegistryError(
                    f"'{version.version_id}' is an alias, and would be hidden by it",
                    where=self._database.where,
                    hint="give the version another id",
                )
            for parent in version.parents:
                require_version(connection, parent, self._database.where)
            row = {item: getattr(version, item) for item in VERSION_FIELDS} | {"metadata": strict_json(version.metadata)}
            connection.execute(VERSIONS.insert().values(row))
            return replace(version, metadata=plain(version.metadata))

    def get(self, version_id: str) -> ModelVersion:
        """The version with this id.

        Raises:
            RegistryError: unknown; names the nearest that exists.
        """
        with self._database.read() as connection:
            return require_version(connection, version_id, self._database.where)

    def look_up(self, version_id: str) -> ModelVersion | None:
        """The version with this id; ``None`` while there is none."""
        with self._database.read() as connection:
            return find_version(connection, version_id)

    def find(self, name: str) -> ModelVersion:
        """The version that an alias serves, or else the version with this id.

        Raises:
            RegistryError: neither exists.
        """
        with self._database.read() as connection:
            serving = current_promotion(connection, name)
            return require_version(connection, serving.version_id if serving else name, self._database.where)

    def list(self) -> tuple[ModelVersion, ...]:
        """All versions, in the order in which they were registered."""
        with self._database.read() as connection:
            return tuple(to_version(row) for row in connection.execute(sa.select(VERSIONS).order_by(VERSIONS.c.number)))

    def lineage(self, version_id: str) -> tuple[ModelVersion, ...]:
        """The version, its parent, and so on to the root. Ends always: a parent is registered before its child."""
        with self._database.read() as connection:
            chain = [require_version(connection, version_id, self._database.where)]
            while chain[-1].parent_id is not None:
                chain.append(require_version(connection, chain[-1].parent_id, self._database.where))
            return tuple(chain)

    def ancestors(self, version_id: str) -> tuple[ModelVersion, ...]:
        """The version and all that it descends from, over both parents of each merge; each once, the latest registered first.

        Raises:
            RegistryError: unknown; names the nearest that exists.
        """
        wanted = set(self.get(version_id).parents) | {version_id}
        found: list[ModelVersion] = []
        for version in reversed(self.list()):  # a parent is registered before its child
            if version.version_id in wanted:
                found.append(version)
                wanted |= set(version.parents)
        return tuple(found)

    # -- aliases ---------------------------------------------------------------------------------------------------------

    def resolve(self, alias: str) -> str | None:
        """The id of the version that ``alias`` serves; ``None`` while nothing was promoted to it."""
        with self._database.read() as connection:
            serving = current_promotion(connection, alias)
            return serving.version_id if serving else None

    def promotion(self, alias: str) -> AliasEvent | None:
        """The promotion that ``alias`` rests on: the last, or after a rollback an earlier one; ``None`` while there is none."""
        with self._database.read() as connection:
            current = current_promotion(connection, alias)
            return to_event(current, verdict_text(connection, current.verdict_number)) if current else None

    def aliases(self) -> dict[str, str]:
        """Each alias and the id of the version that it serves."""
        query = sa.select(ALIASES.c.alias, EVENTS.c.version_id).join(EVENTS, ALIASES.c.event_id == EVENTS.c.event_id)
        with self._database.read() as connection:
            return {row.alias: row.version_id for row in connection.execute(query.order_by(ALIASES.c.alias))}

    def promote(
        self,
        alias: str,
        version_id: str,
        verdict: Verdict | None = None,
        *,
        bootstrap: bool = False,
        note: str = "",
        actor: str = "",
    ) -> AliasEvent:
        """Lets ``alias`` serve ``version_id``, on the evidence of ``verdict``; ``note`` goes on record beside its reasons.

        ``bootstrap`` is the one way without evidence, for an alias that serves nothing yet. Promoting again with the same
        verdict, or bootstrapping the same version again, as after a crash, changes nothing and returns the first event. A
        release of ``alias`` that is under way ends with this: well for its own candidate, else rolled back.

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
            require_ruling(alias, version_id, verdict)
        with self._database.write() as connection:
            require_version(connection, version_id, self._database.where)
            before = current_promotion(connection, alias)
            if before is None and find_version(connection, alias) is not None:
                raise RegistryError(f"'{alias}' is a version, which the alias would hide", hint="choose another --alias")
            serving = before.version_id if before else None
            if before is not None and serving == version_id:
                text = verdict_text(connection, before.verdict_number)
                if text == (strict_json(verdict) if verdict else None):
                    return to_event(before, text)
                raise RegistryError(f"{alias} serves {version_id} already", hint="nothing to do")
            if verdict is None and before is not None:
                raise RegistryError(
                    f"{alias} serves {serving}; only the first promotion may go without evidence",
                    hint="evaluate both versions and pass the gate's verdict, or use another alias",
                )
            if verdict is not None:
                require_incumbent(alias, serving, verdict)
            number = insert_verdict(connection, verdict) if verdict else None
            reason = "; ".join(verdict.reasons) if verdict else "first version, promoted without evidence"
            reason = "; ".join(each for each in (reason, note) if each)
            action = "bootstrap" if before is None else "promote"
            close_open_release(connection, alias, version_id, actor)
            return move(connection, alias, action, version_id, before, reason=reason, actor=actor, verdict_number=number)

    def rollback(self, alias: str, reason: str = "", *, actor: str = "") -> AliasEvent:
        """Lets ``alias`` serve again what it served before its current promotion; a release that is under way ends with this.

        Raises:
            RegistryError: the alias serves nothing, or its current version has no predecessor.
        """
        with self._database.write() as connection:
            promotion = current_promotion(connection, alias)
            if promotion is None:
                known = [row.alias for row in connection.execute(sa.select(ALIASES.c.alias))]
                hint = nearest(alias, known) if known else "promote a version first"
                raise RegistryError(f"nothing is promoted to '{alias}'", hint=hint)
            if promotion.predecessor is None:
                raise RegistryError(
                    f"{alias} serves {promotion.version_id}, its first version: there is no predecessor",
                    hint="evergrad model promote VERSION; 'evergrad model list' names the versions",
                )
            before = connection.execute(sa.select(EVENTS).where(EVENTS.c.event_id == promotion.predecessor)).one()
            close_open_release(connection, alias, before.version_id, actor)
            return move(
                connection,
                alias,
                "rollback",
                before.version_id,
                promotion,
                reason=reason,
                actor=actor,
                pointer=before.event_id,
            )

    def history(self, alias: str) -> tuple[AliasEvent, ...]:
        """Every move of ``alias``, oldest first; empty for one that never moved."""
        query = (
            sa.select(EVENTS, VERDICTS.c.verdict)
            .outerjoin(VERDICTS, EVENTS.c.verdict_number == VERDICTS.c.number)
            .where(EVENTS.c.alias == alias)
            .order_by(EVENTS.c.event_id)
        )
        with self._database.read() as connection:
            return tuple(to_event(row, row.verdict) for row in connection.execute(query))

    # -- verdicts --------------------------------------------------------------------------------------------------------

    def record_verdict(self, verdict: Verdict) -> None:
        """Keeps a verdict, refusals above all; a promotion keeps its own."""
        with self._database.write() as connection:
            insert_verdict(connection, verdict)

    def verdicts(self, candidate_id: str | None = None) -> tuple[Verdict, ...]:
        """All verdicts, or those on one version, oldest first."""
        query = sa.select(VERDICTS.c.verdict).order_by(VERDICTS.c.number)
        if candidate_id is not None:
            query = query.where(VERDICTS.c.candidate_id == candidate_id)
        with self._database.read() as connection:
            return tuple(to_verdict(json.loads(text)) for text in connection.execute(query).scalars())

    def _require_same(self, known: ModelVersion, version: ModelVersion) -> None:
        differing = [name for name in VERSION_FIELDS if name != "created_at" and getattr(known, name) != getattr(version, name)]
        if differing:
            raise RegistryError(
                f"version '{version.version_id}' exists already and differs in {', '.join(differing)}",
                where=self._database.where,
                hint="give the new version an id of its own",
            )
