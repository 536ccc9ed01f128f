"""The tables of ``traffic.sqlite``. No text in them was stored before it was redacted."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA_VERSION = 2

TABLES = sa.MetaData()
TENANT_KEYS = sa.Table(
    "tenant_keys",
    TABLES,
    sa.Column("key_hash", sa.String, primary_key=True),
    sa.Column("tenant", sa.String, nullable=False, index=True),
    sa.Column("at", sa.String, nullable=False),
)
TRACES = sa.Table(
    "traces",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("trace_id", sa.String, nullable=False, unique=True),
    sa.Column("tenant", sa.String, nullable=False, index=True),
    sa.Column("user", sa.String),  # a digest, see store.digest
    sa.Column("version_id", sa.String, nullable=False),
    sa.Column("messages", sa.Text, nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("system_hash", sa.String, nullable=False),
    sa.Column("at", sa.String, nullable=False),
    sa.Column("changed", sa.Integer, nullable=False, server_default="0", index=True),  # the larger, the later
    sa.Column("session", sa.Integer),  # in canary_sessions, where the conversation began in a canary
)
COMPLETIONS = sa.Table(
    "completions",
    TABLES,
    sa.Column("completion_id", sa.String, primary_key=True),
    sa.Column("trace_id", sa.String, sa.ForeignKey("traces.trace_id", ondelete="CASCADE"), nullable=False, index=True),
)
REFERENCES = sa.Table(
    "trace_references",
    TABLES,
    sa.Column("trace_id", sa.String, sa.ForeignKey("traces.trace_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("digest", sa.String, primary_key=True, index=True),
)
"""Digests of the entries of ``metadata``, by which feedback finds a trace: a redacted entry could stand for several."""
FEEDBACK = sa.Table(
    "feedback",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("trace_id", sa.String, sa.ForeignKey("traces.trace_id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("score", sa.Float),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("at", sa.String, nullable=False),
)
CANARY_SESSIONS = sa.Table(
    "canary_sessions",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("release_id", sa.Integer, nullable=False),
    sa.Column("session", sa.String, nullable=False),  # a digest; once the release has ended, the number
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("user", sa.String),
    sa.Column("side", sa.String, nullable=False),
    sa.Column("share", sa.Float, nullable=False),
    sa.Column("failed", sa.Boolean, nullable=False),
    sa.UniqueConstraint("release_id", "session"),
    sqlite_autoincrement=True,  # an outcome in the registry bears the number: it never comes again
)
"""Sessions of customers who agreed, by the side that they were dealt to."""
TASKS = sa.Table(
    "tasks",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("content_hash", sa.String, nullable=False),
    sa.Column("trace_id", sa.String, sa.ForeignKey("traces.trace_id", ondelete="CASCADE"), nullable=False),
    sa.Column("environment", sa.String, nullable=False),
    sa.Column("contract_hash", sa.String, nullable=False),
    sa.Column("task_id", sa.String, nullable=False),
    sa.Column("split", sa.String, nullable=False),
    sa.Column("row", sa.Text, nullable=False),
    sa.Column("reward", sa.Float),
    sa.Column("at", sa.String, nullable=False),
    sa.UniqueConstraint("content_hash", "contract_hash"),
    sa.UniqueConstraint("trace_id", "contract_hash"),
    sqlite_autoincrement=True,  # the number of a forgotten task never comes again
)
USES = sa.Table(
    "uses",
    TABLES,
    sa.Column("version_id", sa.String, primary_key=True),
    sa.Column("task_number", sa.Integer, primary_key=True),
    sa.Column("tenant", sa.String, nullable=False, index=True),
    sa.Column("user", sa.String),
)
"""What was trained on what. Stays when a task is forgotten, for the weights do."""
DELETIONS = sa.Table(
    "deletions",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("user", sa.String),
    sa.Column("traces", sa.Integer, nullable=False),
    sa.Column("tasks", sa.Integer, nullable=False),
    sa.Column("versions", sa.Text, nullable=False),
    sa.Column("at", sa.String, nullable=False),
)


def upgrade(connection: sa.Connection, stored: int) -> None:
    """From schema 1, whose conversations knew of no canary."""
    connection.execute(sa.text("ALTER TABLE traces ADD COLUMN changed INTEGER NOT NULL DEFAULT 0"))
    connection.execute(sa.text("ALTER TABLE traces ADD COLUMN session INTEGER"))
    for index in TRACES.indexes:
        if "changed" in index.columns:
            index.create(connection)
    CANARY_SESSIONS.create(connection)
