"""The registry's tables, and how those of an earlier version become these."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA_VERSION = 5

TABLES = sa.MetaData()
VERSIONS = sa.Table(
    "versions",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("version_id", sa.String, nullable=False, unique=True),
    sa.Column("parent_id", sa.String, sa.ForeignKey("versions.version_id")),
    sa.Column("policy_version", sa.Integer, nullable=False),
    sa.Column("weights_uri", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("recipe_hash", sa.String, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("system_prompt", sa.Text, nullable=False, server_default=""),
    sa.Column("merged_id", sa.String, sa.ForeignKey("versions.version_id")),
)
EVENTS = sa.Table(
    "alias_events",
    TABLES,
    sa.Column("event_id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("alias", sa.String, nullable=False, index=True),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("version_id", sa.String, sa.ForeignKey("versions.version_id"), nullable=False),
    sa.Column("from_version_id", sa.String, sa.ForeignKey("versions.version_id")),
    sa.Column("predecessor", sa.Integer, sa.ForeignKey("alias_events.event_id")),
    sa.Column("verdict_number", sa.Integer, sa.ForeignKey("verdicts.number")),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("at", sa.String, nullable=False),
    sa.Column("actor", sa.String, nullable=False, server_default=""),
    sa.Column("evidence", sa.Text, nullable=False, server_default="{}"),
)
ALIASES = sa.Table(
    "aliases",
    TABLES,
    sa.Column("alias", sa.String, primary_key=True),
    sa.Column("event_id", sa.Integer, sa.ForeignKey("alias_events.event_id"), nullable=False),
)
VERDICTS = sa.Table(
    "verdicts",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("candidate_id", sa.String, nullable=False, index=True),
    sa.Column("promote", sa.Boolean, nullable=False),
    sa.Column("verdict", sa.Text, nullable=False),
    sa.Column("at", sa.String, nullable=False),
)
RELEASES = sa.Table(
    "releases",
    TABLES,
    sa.Column("release_id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("alias", sa.String, nullable=False, index=True),
    sa.Column("candidate_id", sa.String, sa.ForeignKey("versions.version_id"), nullable=False),
    sa.Column("incumbent_id", sa.String, sa.ForeignKey("versions.version_id"), nullable=False),
    sa.Column("verdict_number", sa.Integer, sa.ForeignKey("verdicts.number"), nullable=False),
    sa.Column("plan", sa.Text, nullable=False),
)
RELEASE_EVENTS = sa.Table(
    "release_events",
    TABLES,
    sa.Column("event_id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("release_id", sa.Integer, sa.ForeignKey("releases.release_id"), nullable=False, index=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("share", sa.Float, nullable=False),
    sa.Column("actor", sa.String, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("evidence", sa.Text, nullable=False),
    sa.Column("at", sa.String, nullable=False),
)
OUTCOMES = sa.Table(
    "release_outcomes",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("release_id", sa.Integer, sa.ForeignKey("releases.release_id"), nullable=False),
    sa.Column("session_id", sa.String, nullable=False),
    sa.Column("side", sa.String, nullable=False),
    sa.Column("score", sa.Float),
    sa.Column("share", sa.Float, nullable=False),
    sa.Column("at", sa.String, nullable=False),
    sa.Column("by_customer", sa.Boolean, nullable=False, server_default="0"),
    sa.UniqueConstraint("release_id", "session_id"),
)
OFFERS = sa.Table(
    "release_offers",
    TABLES,
    sa.Column("release_id", sa.Integer, sa.ForeignKey("releases.release_id"), primary_key=True),
    sa.Column("url", sa.String, nullable=False),
)
"""Where the candidate's engine answers now; what process that is changes with every start of the run."""
GATEWAYS = sa.Table(
    "release_gateways",
    TABLES,
    sa.Column("release_id", sa.Integer, sa.ForeignKey("releases.release_id"), primary_key=True),
    sa.Column("pid", sa.Integer, primary_key=True),
)
"""Who may have requests under way at that engine."""


def upgrade(connection: sa.Connection, stored: int) -> None:
    """From schema 1, which knew no releases and did not say who moved an alias, and on what evidence beside a verdict; from
    schema 2, whose versions were their weights alone; from schema 3, where no customer met a candidate; from schema 4, whose
    versions had one parent at most."""
    if stored < 2:
        _add_columns(connection, EVENTS, "actor", "evidence")
        for table in (RELEASES, RELEASE_EVENTS, OUTCOMES):
            table.create(connection)
    if stored < 3:
        _add_columns(connection, VERSIONS, "system_prompt")
    if stored < 4:
        if stored >= 2:  # else it was made just now
            _add_columns(connection, OUTCOMES, "by_customer")
        for table in (OFFERS, GATEWAYS):
            table.create(connection)
    if stored < 5:
        _add_columns(connection, VERSIONS, "merged_id")


def _add_columns(connection: sa.Connection, table: sa.Table, *names: str) -> None:
    for column in (table.c[name] for name in names):
        kind = column.type.compile(connection.dialect)
        default = str(column.server_default.arg) if isinstance(column.server_default, sa.DefaultClause) else ""
        filled = "" if column.nullable else f" NOT NULL DEFAULT '{default}'"
        connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {kind}{filled}"))
