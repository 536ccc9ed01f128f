"""One way to open a SQL store: SQLite in a file by default, PostgreSQL by URL.

On both, readers never wait for a writer and see one consistent state; writers of a room exclude each other from the moment
they begin, so what a transaction has read cannot change before it writes; and what has committed is on disk.
"""

from __future__ import annotations

import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from evergrad.types import EvergradError

_BUSY_TIMEOUT_MS = 30_000

Upgrade = Callable[[sa.Connection, int], None]
"""Brings tables of an earlier schema version, which it is told, to the present one, within one transaction."""


class DatabaseError(EvergradError):
    """A store that cannot be opened, read or written."""


class Database:
    """Tables of one room at one place.

    Args:
        location: A file path, or an SQLAlchemy URL such as ``postgresql+psycopg://user@host/name``.
        tables: The room's tables; created when absent.
        room: Name under which the schema's version is kept and writers exclude each other; rooms may share a database.
        schema_version: Raised by the room whenever its tables change.
        upgrade: For tables that an earlier version wrote; without it they are refused.

    Raises:
        DatabaseError: not a database, not reachable, or written by a later schema version.
    """

    def __init__(
        self,
        location: str | Path,
        tables: sa.MetaData,
        *,
        room: str,
        schema_version: int,
        upgrade: Upgrade | None = None,
    ) -> None:
        text = str(location)
        if "://" in text:
            self.where = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", text)
        else:
            Path(text).parent.mkdir(parents=True, exist_ok=True)
            self.where, text = text, f"sqlite:///{text}"
        self._tables, self._room, self._schema_version, self._upgrade = tables, room, schema_version, upgrade
        try:
            backend = sa.make_url(text).get_backend_name()
            if backend not in ("sqlite", "postgresql"):
                raise DatabaseError(
                    f"{backend} is not supported", where=self.where, hint="use a file path or a postgresql:// URL"
                )
            self.engine = sa.create_engine(text)
            if backend == "sqlite":
                _prepare_sqlite(self.engine)
            self._ensure_schema()
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            cause = str(getattr(error, "orig", error))
            raise DatabaseError(
                f"cannot open the {room} database: {cause}", where=self.where, hint="check the path or URL"
            ) from error

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view; sees all that had committed when it began.

        Raises:
            DatabaseError: the database cannot be read: gone, damaged, or out of file descriptors.
        """
        try:
            with self._view() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            raise DatabaseError(
                f"cannot read the {self._room} database: {error.orig}",
                where=self.where,
                hint="see whether the file is there and whole, and how many files are open",
            ) from error

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction: all of it is kept, or none of it when the block raises or the process dies.

        Raises:
            DatabaseError: the database cannot be written: disk full, read-only, gone, or locked for too long.
        """
        try:
            with self.engine.connect().execution_options(evergrad_write=True) as connection, connection.begin():
                if self.engine.dialect.name == "postgresql":
                    lock = zlib.crc32(f"evergrad/{self._room}".encode())
                    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": lock})
                yield connection
        except sa.exc.OperationalError as error:
            hint = "free space, or see who holds it; nothing of this transaction was kept"
            raise DatabaseError(
                f"cannot write to the {self._room} database: {error.orig}", where=self.where, hint=hint
            ) from error

    @contextmanager
    def _view(self) -> Iterator[sa.Connection]:
        postgres = self.engine.dialect.name == "postgresql"
        options = {"isolation_level": "REPEATABLE READ"} if postgres else {}
        with self.engine.connect().execution_options(**options) as connection, connection.begin():
            yield connection

    def _ensure_schema(self) -> None:
        schemas = sa.Table(
            "evergrad_schemas",
            sa.MetaData(),
            sa.Column("room", sa.String, primary_key=True),
            sa.Column("version", sa.Integer, nullable=False),
        )
        if self._stored_version(schemas) is None:
            with self.write() as connection:
                schemas.create(connection, checkfirst=True)
                known = connection.execute(sa.select(schemas.c.version).where(schemas.c.room == self._room)).scalar()
                if known is None:
                    self._tables.create_all(connection)
                    connection.execute(schemas.insert().values(room=self._room, version=self._schema_version))
        stored = self._stored_version(schemas)
        if stored is not None and stored < self._schema_version and self._upgrade is not None:
            self._bring_up(schemas, self._upgrade)
            stored = self._stored_version(schemas)
        if stored != self._schema_version:
            newer = stored is not None and stored > self._schema_version
            raise DatabaseError(
                f"the {self._room} tables have schema version {stored}, this Evergrad knows {self._schema_version}",
                where=self.where,
                hint="upgrade Evergrad" if newer else "use the Evergrad that wrote it, or start a new database",
            )

    def _bring_up(self, schemas: sa.Table, upgrade: Upgrade) -> None:
        mine = schemas.c.room == self._room
        with self.write() as connection:
            # Asked again now that no other process can write: it may have done this meanwhile.
            stored = connection.execute(sa.select(schemas.c.version).where(mine)).scalar_one()
            if stored < self._schema_version:
                upgrade(connection, stored)
                connection.execute(schemas.update().where(mine).values(version=self._schema_version))

    def _stored_version(self, schemas: sa.Table) -> int | None:
        with self._view() as connection:
            if not sa.inspect(connection).has_table(schemas.name):
                return None
            return connection.execute(sa.select(schemas.c.version).where(schemas.c.room == self._room)).scalar()


def _switch_to_wal(cursor: sqlite3.Cursor) -> None:
    """Puts a database into WAL mode; first openings at once wait for each other here.

    Where two that switch would wait for each other, SQLite tells one of them "locked" at once, whatever the busy timeout.
    """
    deadline = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _prepare_sqlite(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        # SQLAlchemy, not the driver, says when a transaction begins; the driver's own way would begin it too late.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
        _switch_to_wal(cursor)
        for pragma in ("synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def _on_begin(connection: sa.Connection) -> None:
        writes = connection.get_execution_options().get("evergrad_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
