"""Customers' sessions in a canary: who was dealt to which side, and with what chance; reached as ``store.canary``.

Only sessions of customers who agreed to be kept are here. A session is known again by a digest, so that a gateway that was
killed deals it as before; when its release has ended, the digest goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from evergrad.database import Database
from evergrad.loop.traffic._tables import CANARY_SESSIONS
from evergrad.types import Side


@dataclass(frozen=True, slots=True)
class DealtSession:
    """A session that began in a canary.

    >>> DealtSession(1, "8a5c", "default", None, Side.CANDIDATE, 0.05).failed
    False
    """

    release_id: int
    session: str
    """A digest."""
    tenant: str
    user: str | None
    side: Side
    share: float
    """With what chance it could have come to the candidate."""
    failed: bool = False
    """Its side could not answer it."""
    number: int = 0
    """In the order in which sessions were put down."""


class CanarySessions:
    """The sessions of one store of traffic."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put_down(self, dealt: DealtSession) -> int:
        """Keeps a session, or that one which is there has failed; returns its number."""
        mine = (CANARY_SESSIONS.c.release_id == dealt.release_id) & (CANARY_SESSIONS.c.session == dealt.session)
        with self._database.write() as connection:
            known = connection.execute(sa.select(CANARY_SESSIONS.c.number, CANARY_SESSIONS.c.failed).where(mine)).first()
            if known is None:
                values = {
                    "release_id": dealt.release_id,
                    "session": dealt.session,
                    "tenant": dealt.tenant,
                    "user": dealt.user,
                    "side": dealt.side.value,
                    "share": dealt.share,
                    "failed": dealt.failed,
                }
                insert = CANARY_SESSIONS.insert().values(values).returning(CANARY_SESSIONS.c.number)
                return int(connection.execute(insert).scalar_one())
            if dealt.failed and not known.failed:
                connection.execute(CANARY_SESSIONS.update().where(mine).values(failed=True))
            return int(known.number)

    def of_release(self, release_id: int) -> list[DealtSession]:
        """All sessions of a release, in the order in which they were put down."""
        query = sa.select(CANARY_SESSIONS).where(CANARY_SESSIONS.c.release_id == release_id)
        with self._database.read() as connection:
            return [_to_session(row) for row in connection.execute(query.order_by(CANARY_SESSIONS.c.number))]

    def end_but(self, release_id: int | None) -> None:
        """All releases but this one are over: no session of theirs need be known again, nor can be."""
        others = sa.true() if release_id is None else CANARY_SESSIONS.c.release_id != release_id
        number = sa.cast(CANARY_SESSIONS.c.number, sa.String)
        with self._database.write() as connection:
            connection.execute(CANARY_SESSIONS.update().where(others).values(session=number))


def _to_session(row: sa.Row[Any]) -> DealtSession:
    return DealtSession(
        row.release_id, row.session, row.tenant, row.user, Side(row.side), row.share, bool(row.failed), row.number
    )
