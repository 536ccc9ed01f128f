"""``traffic.sqlite``: redacted conversations of those who agreed, what became of them, and which version learned from which.

The gateway, the loop and the commands open it at once; see :mod:`evergrad.database` for what that promises.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from evergrad.database import Database
from evergrad.envs import TaskRow
from evergrad.loop.traffic._tables import (
    CANARY_SESSIONS,
    COMPLETIONS,
    DELETIONS,
    FEEDBACK,
    REFERENCES,
    SCHEMA_VERSION,
    TABLES,
    TASKS,
    TENANT_KEYS,
    TRACES,
    USES,
    upgrade,
)
from evergrad.loop.traffic.sessions import CanarySessions
from evergrad.types import InputError, Message, Trace, plain

DEFAULT_TENANT = "default"
"""Whose requests are where no tenant has a key."""


class TrafficError(InputError):
    """A request to the store that cannot be met."""


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A trace, and whose it is."""

    trace: Trace
    tenant: str
    user: str | None
    """A digest; ``None`` where the client named nobody."""
    system_hash: str
    """Of the system message before it was redacted: which tools and instructions the conversation had."""
    at: str
    """UTC, ISO 8601: of the last turn."""
    number: int = 0
    """In the order in which conversations began."""
    changed: int = 0
    """Grows with each turn and each word of feedback in the whole store, so that what is new can be told."""
    session: int | None = None
    """Number of the canary's session that it began in."""


@dataclass(frozen=True, slots=True)
class LiveTask:
    """A task that was made of a trace."""

    number: int
    row: TaskRow
    task_id: str
    split: str
    """``train``, or ``traffic`` for what is kept aside to measure on."""
    tenant: str
    user: str | None
    reward: float | None
    """What the verifier gives for the replies in the trace; ``None`` where it cannot tell."""


@dataclass(frozen=True, slots=True)
class Redacted:
    """What the gateway hands over: one completion, with the whole conversation before it."""

    completion_id: str
    tenant: str
    user: str | None
    version_id: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    system_hash: str = ""
    session: int | None = None
    """Number of the canary's session that it is a turn of."""


def traffic_path(run: Path) -> Path:
    return run / "traffic.sqlite"


def digest(*parts: str) -> str:
    """Stands for a text that is not kept, such as a user's name. Whoever guesses the text can tell that it is this one.

    >>> digest("acme", "customer-7") == digest("acme", "customer-7") != digest("other", "customer-7")
    True
    """
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class TrafficStore:
    """Use as a context manager.

    Args:
        location: A file path or an SQLAlchemy URL.
    """

    def __init__(self, location: str | Path) -> None:
        self._database = Database(location, TABLES, room="traffic", schema_version=SCHEMA_VERSION, upgrade=upgrade)
        self.canary = CanarySessions(self._database)

    def __enter__(self) -> TrafficStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._database.close()

    # -- tenants ---------------------------------------------------------------------------------------------------------

    def add_key(self, tenant: str) -> str:
        """A new key of ``tenant``, of which only a hash is kept: it is told once.

        Raises:
            TrafficError: no plain name.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", tenant):
            raise TrafficError(f"{tenant!r} is not a tenant", hint="use letters, digits, '.', '_' and '-'; 64 at most")
        key = f"evg-{secrets.token_urlsafe(32)}"
        with self._database.write() as connection:
            connection.execute(TENANT_KEYS.insert().values(key_hash=digest(key), tenant=tenant, at=_now()))
        return key

    def revoke_keys(self, tenant: str) -> int:
        """Takes all keys of ``tenant`` back; how many there were."""
        with self._database.write() as connection:
            return connection.execute(TENANT_KEYS.delete().where(TENANT_KEYS.c.tenant == tenant)).rowcount

    def tenant_of(self, key: str) -> str | None:
        """Whose key it is; while nobody has one, everybody is the default tenant. ``None`` for a key of nobody."""
        with self._database.read() as connection:
            if connection.execute(sa.select(sa.func.count()).select_from(TENANT_KEYS)).scalar_one() == 0:
                return DEFAULT_TENANT
            return connection.execute(sa.select(TENANT_KEYS.c.tenant).where(TENANT_KEYS.c.key_hash == digest(key))).scalar()

    # -- traces ----------------------------------------------------------------------------------------------------------

    def keep(self, turn: Redacted, continues: str | None = None) -> str:
        """Stores a conversation as it stands after one more completion; returns its trace's id.

        Args:
            turn: All of it redacted.
            continues: Trace that it is the continuation of, and replaces.
        """
        values = {
            "tenant": turn.tenant,
            "user": turn.user,
            "version_id": turn.version_id,
            "messages": _json([each.as_dict() for each in turn.messages]),
            "metadata": _json(dict(turn.metadata)),
            "system_hash": turn.system_hash,
            "at": _now(),
            "session": turn.session,
        }
        with self._database.write() as connection:
            values["changed"] = _next_change(connection)
            trace_id = continues
            changed = connection.execute(TRACES.update().where(TRACES.c.trace_id == continues).values(values)).rowcount
            if trace_id is None or not changed:  # the trace was forgotten while the conversation went on
                trace_id = turn.completion_id
                connection.execute(TRACES.insert().values(trace_id=trace_id, **values))
            connection.execute(COMPLETIONS.insert().values(completion_id=turn.completion_id, trace_id=trace_id))
            known = set(connection.execute(sa.select(REFERENCES.c.digest).where(REFERENCES.c.trace_id == trace_id)).scalars())
            for each in dict.fromkeys(turn.references):
                if each not in known:
                    connection.execute(REFERENCES.insert().values(trace_id=trace_id, digest=each))
        return trace_id

    def add_feedback(
        self,
        tenant: str,
        *,
        completion_id: str | None = None,
        references: Sequence[str] = (),
        score: float | None = None,
        outcome: Mapping[str, Any] | None = None,
    ) -> int:
        """Joins feedback to the traces of ``tenant`` with this completion, or with all of these references; how many."""
        found = sa.select(TRACES.c.trace_id).where(TRACES.c.tenant == tenant)
        if completion_id is not None:
            mine = sa.select(COMPLETIONS.c.trace_id).where(COMPLETIONS.c.completion_id == completion_id)
            found = found.where(TRACES.c.trace_id.in_(mine))
        for each in references:
            found = found.where(TRACES.c.trace_id.in_(sa.select(REFERENCES.c.trace_id).where(REFERENCES.c.digest == each)))
        if completion_id is None and not references:
            return 0
        with self._database.write() as connection:
            trace_ids = connection.execute(found).scalars().all()
            if trace_ids:
                changed = {"changed": _next_change(connection)}
                connection.execute(TRACES.update().where(TRACES.c.trace_id.in_(trace_ids)).values(changed))
            for trace_id in trace_ids:
                row = {"trace_id": trace_id, "score": score, "outcome": _json(dict(outcome or {})), "at": _now()}
                connection.execute(FEEDBACK.insert().values(row))
        return len(trace_ids)

    def traces(
        self, tenants: Iterable[str] | None = None, *, trace_id: str | None = None, after: int | None = None
    ) -> list[StoredTrace]:
        """Traces in the order in which they began, with their feedback joined.

        Args:
            tenants: Only theirs.
            trace_id: Only this one.
            after: Only what has changed since the change of this number.
        """
        chosen: sa.ColumnElement[bool] = sa.true()
        if tenants is not None:
            chosen &= TRACES.c.tenant.in_(list(tenants))
        if trace_id is not None:
            chosen &= TRACES.c.trace_id == trace_id
        if after is not None:
            chosen &= TRACES.c.changed > after
        theirs = sa.select(FEEDBACK).join(TRACES, TRACES.c.trace_id == FEEDBACK.c.trace_id).where(chosen)
        with self._database.read() as connection:
            rows = connection.execute(sa.select(TRACES).where(chosen).order_by(TRACES.c.number)).all()
            told: dict[str, list[Any]] = {}
            for each in connection.execute(theirs.order_by(FEEDBACK.c.number)):
                told.setdefault(each.trace_id, []).append(each)
        return [_to_stored(row, told.get(row.trace_id, ())) for row in rows]

    def size(self) -> int:
        """How many traces there are."""
        with self._database.read() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(TRACES)).scalar_one()

    # -- tasks -----------------------------------------------------------------------------------------------------------

    def add_task(
        self,
        trace_id: str,
        row: TaskRow,
        *,
        environment: str,
        contract_hash: str,
        content_hash: str,
        task_id: str,
        split: str,
        reward: float | None,
    ) -> None:
        """Keeps the task of a trace; one that is there already stays."""
        values = {
            "trace_id": trace_id,
            "row": _json(row.as_dict()),
            "environment": environment,
            "contract_hash": contract_hash,
            "content_hash": content_hash,
            "task_id": task_id,
            "split": split,
            "reward": reward,
            "at": _now(),
        }
        there = sa.or_(TASKS.c.content_hash == content_hash, TASKS.c.trace_id == trace_id)
        with self._database.write() as connection:
            known = connection.execute(sa.select(TASKS.c.number).where(TASKS.c.contract_hash == contract_hash, there)).first()
            if known is None:
                connection.execute(TASKS.insert().values(values))

    def tasks(
        self,
        *,
        environment: str | None = None,
        contract_hash: str | None = None,
        split: str | None = None,
        up_to: int | None = None,
        used_by: Sequence[str] | None = None,
    ) -> list[LiveTask]:
        """Tasks in the order in which they were made.

        Args:
            environment, contract_hash, split: Only those of it.
            up_to: Highest number.
            used_by: Only those that one of these versions was trained on.
        """
        query = sa.select(TASKS, TRACES.c.tenant, TRACES.c.user).join(TRACES, TASKS.c.trace_id == TRACES.c.trace_id)
        for column, value in (
            (TASKS.c.environment, environment),
            (TASKS.c.contract_hash, contract_hash),
            (TASKS.c.split, split),
        ):
            if value is not None:
                query = query.where(column == value)
        if up_to is not None:
            query = query.where(TASKS.c.number <= up_to)
        if used_by is not None:
            query = query.where(TASKS.c.number.in_(sa.select(USES.c.task_number).where(USES.c.version_id.in_(list(used_by)))))
        with self._database.read() as connection:
            return [_to_task(row) for row in connection.execute(query.order_by(TASKS.c.number))]

    def converted(self, contract_hash: str) -> set[str]:
        """Ids of the traces that were made into tasks under a contract."""
        with self._database.read() as connection:
            return set(connection.execute(sa.select(TASKS.c.trace_id).where(TASKS.c.contract_hash == contract_hash)).scalars())

    def last_task(self) -> int:
        """Number of the newest task; 0 where there is none."""
        with self._database.read() as connection:
            return connection.execute(sa.select(sa.func.max(TASKS.c.number))).scalar() or 0

    def task_of_trace(self) -> dict[str, str]:
        """Trace id to the split of its last task."""
        with self._database.read() as connection:
            query = sa.select(TASKS.c.trace_id, TASKS.c.split).order_by(TASKS.c.number)
            return {row.trace_id: row.split for row in connection.execute(query)}

    def task_tenants(self) -> set[str]:
        """Tenants whose traffic has become tasks."""
        query = sa.select(TRACES.c.tenant).distinct().join(TASKS, TASKS.c.trace_id == TRACES.c.trace_id)
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())

    def record_use(self, version_id: str, task: LiveTask) -> None:
        """Puts down that a version is being trained on a task; by then the version need not be registered."""
        mine = {"version_id": version_id, "task_number": task.number}
        with self._database.write() as connection:
            if connection.execute(sa.select(USES).filter_by(**mine)).first() is None:
                connection.execute(USES.insert().values(**mine, tenant=task.tenant, user=task.user))

    def uses(self, tenant: str, user: str | None = None) -> dict[str, int]:
        """Version id to how many tasks of a tenant, or of one of its users, it was trained on; forgotten ones included."""
        query = sa.select(USES.c.version_id, sa.func.count()).where(USES.c.tenant == tenant).group_by(USES.c.version_id)
        if user is not None:
            query = query.where(USES.c.user == user)
        with self._database.read() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    # -- forgetting ------------------------------------------------------------------------------------------------------

    def task_ids(self, tenant: str, user: str | None = None) -> set[str]:
        """Ids of the tasks that were made of a tenant's, or a user's, traffic."""
        query = sa.select(TASKS.c.task_id).where(TASKS.c.trace_id.in_(_whose(tenant, user)))
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())

    def delete(self, tenant: str, user: str | None, versions: Sequence[str]) -> tuple[int, int]:
        """Removes traces, feedback and tasks, and puts the removal down; how many traces and tasks there were.

        Afterwards no page of the file holds a removed text any more.
        """
        with self._database.write() as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("PRAGMA secure_delete=ON")
            mine = _whose(tenant, user)
            tasks = connection.execute(TASKS.delete().where(TASKS.c.trace_id.in_(mine))).rowcount
            for table in (FEEDBACK, REFERENCES, COMPLETIONS):
                connection.execute(table.delete().where(table.c.trace_id.in_(mine)))
            theirs = CANARY_SESSIONS.c.tenant == tenant
            if user is not None:
                theirs &= CANARY_SESSIONS.c.user == user
            connection.execute(CANARY_SESSIONS.delete().where(theirs))
            traces = connection.execute(TRACES.delete().where(TRACES.c.trace_id.in_(mine))).rowcount
            row = {"tenant": tenant, "user": user, "traces": traces, "tasks": tasks, "versions": _json(list(versions))}
            connection.execute(DELETIONS.insert().values(**row, at=_now()))
        if self._database.engine.dialect.name == "sqlite":
            with self._database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        return traces, tasks


def _whose(tenant: str, user: str | None) -> sa.Select[Any]:
    query = sa.select(TRACES.c.trace_id).where(TRACES.c.tenant == tenant)
    return query if user is None else query.where(TRACES.c.user == user)


def _to_stored(row: Any, feedback: Sequence[Any]) -> StoredTrace:
    scores = [each.score for each in feedback if each.score is not None]
    outcome: dict[str, Any] = {}
    for each in feedback:
        outcome |= json.loads(each.outcome)
    messages = tuple(Message(**each) for each in json.loads(row.messages))
    metadata = json.loads(row.metadata)
    trace = Trace(row.trace_id, messages, metadata, outcome, scores[-1] if scores else None, row.version_id)
    return StoredTrace(trace, row.tenant, row.user, row.system_hash, row.at, row.number, row.changed, row.session)


def _next_change(connection: sa.Connection) -> int:
    """Within a transaction that writes, so that no two changes have one number."""
    return (connection.execute(sa.select(sa.func.max(TRACES.c.changed))).scalar() or 0) + 1


def _to_task(row: Any) -> LiveTask:
    task = TaskRow.from_dict(json.loads(row.row))
    return LiveTask(row.number, task, row.task_id, row.split, row.tenant, row.user, row.reward)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _json(value: Any) -> str:
    """In ASCII: half of a surrogate pair, quoted from a request, has no place in a database's text."""
    return json.dumps(plain(value), allow_nan=False, sort_keys=True)
