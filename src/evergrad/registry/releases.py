"""Releases: candidates on their way from the gate to an alias, each stage of it durable.

A release is one row that never changes and a list of events, of which the last says where it stands::

    begin ─▶ shadow ─▶ canary 1% ─▶ canary 5% ─▶ canary 25% ─▶ promoted      the alias moves with this event, or not at all
                │           │           │            │
                └───────────┴───────────┴────────────┴───────▶ rolled_back   the alias was never moved

Who changes it says where he believes it to stand, so that of two who change it at once one is refused. Outcomes of live
sessions are kept with it, each once, in the order in which they were judged: whoever judges them again finds the same.

A gateway in another process reads here where the candidate's engine answers, and says here that it sends requests there::

    run ── offer ──▶ url ──▶ gateway ── enter ──▶ pid        the run ends that engine only when it has withdrawn the offer
    run ── offer "" ───────▶ gateway ── leave ──▶            and every gateway has left
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from evergrad.database import Database
from evergrad.registry._moves import (
    AliasEvent,
    RegistryError,
    current_promotion,
    insert_verdict,
    move,
    now,
    require_incumbent,
    require_ruling,
    require_version,
)
from evergrad.registry._tables import GATEWAYS, OFFERS, OUTCOMES, RELEASE_EVENTS, RELEASES, VERDICTS
from evergrad.types import Release, ReleaseState, SessionOutcome, Side, Verdict, strict_json


@dataclass(frozen=True, slots=True)
class ReleaseEvent:
    """One step of a release; the audit of it is the list of these.

    >>> ReleaseEvent(ReleaseState.ROLLED_BACK, 0.05, "canary", "harm", {"e_value": 23.1}, "").state.is_open
    False
    """

    state: ReleaseState
    share: float
    """Of the sessions that the candidate answers from here on."""
    actor: str
    """Who took it: ``gate``, ``canary``, or the name of a user."""
    reason: str
    evidence: Mapping[str, Any]
    """JSON values."""
    at: str
    """UTC, ISO 8601."""


class Releases:
    """The releases of one registry; reached as ``registry.releases``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(
        self, alias: str, verdict: Verdict, plan: Mapping[str, Any], *, state: ReleaseState, share: float, actor: str = ""
    ) -> Release:
        """Keeps the verdict, and begins the release of the version that it promotes. ``plan`` is registered with it.

        Beginning again with the same verdict, as after a crash, changes nothing and returns that release, wherever it stands.

        Raises:
            RegistryError: the verdict does not promote, or compares with another version than the one that ``alias`` serves;
                or another release of ``alias`` is under way.
        """
        candidate = verdict.candidate_id
        require_ruling(alias, candidate, verdict)
        with self._database.write() as connection:
            require_version(connection, candidate, self._database.where)
            known = _of_verdict(connection, alias, verdict)
            if known is not None:
                return known
            serving = current_promotion(connection, alias)
            require_incumbent(alias, serving.version_id if serving else None, verdict)
            if serving is None:
                raise RegistryError(f"{alias} serves nothing", hint="a first version needs no canary: bootstrap it")
            under_way = _open(connection, alias)
            if under_way is not None:
                raise RegistryError(
                    f"the release of {under_way.candidate_id} is under way on {alias}",
                    hint="let it end, or end it: evergrad model rollback",
                )
            values = {
                "alias": alias,
                "candidate_id": candidate,
                "incumbent_id": serving.version_id,
                "verdict_number": insert_verdict(connection, verdict),
                "plan": strict_json(plan),
            }
            release_id = connection.execute(RELEASES.insert().values(values).returning(RELEASES.c.release_id)).scalar_one()
            _add_event(connection, release_id, state, share, actor, "; ".join(verdict.reasons))
            return _require(connection, release_id)

    def get(self, release_id: int) -> Release:
        """
        Raises:
            RegistryError: there is none of this number.
        """
        with self._database.read() as connection:
            return _require(connection, release_id)

    def last(self, alias: str) -> Release | None:
        """The one that is under way on ``alias``, or else the one that ended last; ``None`` if there was never one."""
        query = sa.select(sa.func.max(RELEASES.c.release_id)).where(RELEASES.c.alias == alias)
        with self._database.read() as connection:
            number = connection.execute(query).scalar()
            return None if number is None else _require(connection, number)

    def of_version(self, version_id: str) -> tuple[Release, ...]:
        """All releases of a version, oldest first."""
        query = sa.select(RELEASES.c.release_id).where(RELEASES.c.candidate_id == version_id).order_by(RELEASES.c.release_id)
        with self._database.read() as connection:
            return tuple(_require(connection, number) for number in connection.execute(query).scalars())

    def events(self, release_id: int) -> tuple[ReleaseEvent, ...]:
        """Every step of a release, oldest first."""
        query = sa.select(RELEASE_EVENTS).where(RELEASE_EVENTS.c.release_id == release_id).order_by(RELEASE_EVENTS.c.event_id)
        with self._database.read() as connection:
            return tuple(_to_release_event(row) for row in connection.execute(query))

    # -- its way ---------------------------------------------------------------------------------------------------------

    def observe(self, release: Release, outcomes: Sequence[SessionOutcome]) -> None:
        """Keeps what came of live sessions, in this order, all or none; a session that is known already is passed over."""
        with self._database.write() as connection:
            query = sa.select(OUTCOMES.c.session_id).where(OUTCOMES.c.release_id == release.release_id)
            known = set(connection.execute(query).scalars())
            rows = [
                {
                    "release_id": release.release_id,
                    "session_id": each.session_id,
                    "side": each.side.value,
                    "score": each.score,
                    "share": each.share,
                    "at": now(),
                    "by_customer": each.by_customer,
                }
                for each in outcomes
                if each.session_id not in known
            ]
            if rows:
                connection.execute(OUTCOMES.insert(), rows)

    def outcomes(self, release: Release) -> tuple[SessionOutcome, ...]:
        """What came of its live sessions so far, in the order in which they were put down."""
        query = sa.select(OUTCOMES).where(OUTCOMES.c.release_id == release.release_id).order_by(OUTCOMES.c.number)
        with self._database.read() as connection:
            rows = connection.execute(query)
            return tuple(_to_outcome(row) for row in rows)

    def widen(
        self, release: Release, share: float, *, reason: str, evidence: Mapping[str, Any] | None = None, actor: str = ""
    ) -> Release:
        """Lets the candidate answer ``share`` of the sessions.

        Raises:
            RegistryError: the release stands elsewhere than ``release`` says, or the share is none or not a larger one.
        """
        if not release.share < share < 1:
            raise RegistryError(
                f"a canary cannot go from {release.share:g} of the sessions to {share:g}",
                where=release.alias,
                hint="shares grow and stay below 1; promote() gives it all of them",
            )
        with self._database.write() as connection:
            _require_standing(connection, release)
            _add_event(connection, release.release_id, ReleaseState.CANARY, share, actor, reason, evidence)
            return _require(connection, release.release_id)

    def promote(
        self, release: Release, *, reason: str, evidence: Mapping[str, Any] | None = None, actor: str = ""
    ) -> AliasEvent:
        """Ends the release well: in one transaction with it, the alias moves to the candidate.

        Raises:
            RegistryError: the release stands elsewhere than ``release`` says.
        """
        with self._database.write() as connection:
            number = _require_standing(connection, release)
            before = current_promotion(connection, release.alias)
            _add_event(connection, release.release_id, ReleaseState.PROMOTED, 1.0, actor, reason, evidence)
            return move(
                connection,
                release.alias,
                "promote",
                release.candidate_id,
                before,
                reason=reason,
                actor=actor,
                evidence=evidence,
                verdict_number=number,
            )

    def roll_back(
        self, release: Release, *, reason: str, evidence: Mapping[str, Any] | None = None, actor: str = ""
    ) -> Release:
        """Ends the release: the candidate answers nobody any more, and the alias stays where it is.

        Raises:
            RegistryError: the release stands elsewhere than ``release`` says.
        """
        with self._database.write() as connection:
            _require_standing(connection, release)
            _add_event(connection, release.release_id, ReleaseState.ROLLED_BACK, 0.0, actor, reason, evidence)
            return _require(connection, release.release_id)

    # -- who meets the candidate -----------------------------------------------------------------------------------------

    def offer(self, release: Release, url: str) -> None:
        """Says where the candidate's engine answers; the empty text says that it does so no more."""
        with self._database.write() as connection:
            connection.execute(OFFERS.delete().where(OFFERS.c.release_id == release.release_id))
            connection.execute(OFFERS.insert().values(release_id=release.release_id, url=url))

    def offered(self, release: Release) -> str:
        """Where the candidate's engine answers; empty while the release has ended, is in the shadow, or nobody carries it out.

        After a kill of the run this is the address of an engine that is gone, until the run goes on.
        """
        with self._database.read() as connection:
            found = _require(connection, release.release_id)
            if found.state is not ReleaseState.CANARY:
                return ""
            query = sa.select(OFFERS.c.url).where(OFFERS.c.release_id == release.release_id)
            return connection.execute(query).scalar() or ""

    def enter(self, release: Release, pid: int) -> None:
        """A gateway of this process id may send requests to the candidate from here on."""
        mine = {"release_id": release.release_id, "pid": pid}
        with self._database.write() as connection:
            if connection.execute(sa.select(GATEWAYS).filter_by(**mine)).first() is None:
                connection.execute(GATEWAYS.insert().values(mine))

    def leave(self, release: Release, pid: int) -> None:
        """That gateway has no request under way there, and sends none."""
        with self._database.write() as connection:
            mine = (GATEWAYS.c.release_id == release.release_id) & (GATEWAYS.c.pid == pid)
            connection.execute(GATEWAYS.delete().where(mine))

    def gateways(self, release: Release) -> tuple[int, ...]:
        """Process ids of those that have entered and not left."""
        query = sa.select(GATEWAYS.c.pid).where(GATEWAYS.c.release_id == release.release_id).order_by(GATEWAYS.c.pid)
        with self._database.read() as connection:
            return tuple(connection.execute(query).scalars())


def close_open_release(connection: sa.Connection, alias: str, version_id: str, actor: str) -> None:
    """Ends the release that is under way on ``alias``, if any, because the alias moves to ``version_id`` otherwise."""
    under_way = _open(connection, alias)
    if under_way is None:
        return
    promoted = under_way.candidate_id == version_id
    state, share = (ReleaseState.PROMOTED, 1.0) if promoted else (ReleaseState.ROLLED_BACK, 0.0)
    _add_event(connection, under_way.release_id, state, share, actor, f"{alias} was moved to {version_id} meanwhile")


def _open(connection: sa.Connection, alias: str) -> Release | None:
    query = sa.select(sa.func.max(RELEASES.c.release_id)).where(RELEASES.c.alias == alias)
    number = connection.execute(query).scalar()
    release = None if number is None else _require(connection, number)
    return release if release is not None and release.state.is_open else None


def _of_verdict(connection: sa.Connection, alias: str, verdict: Verdict) -> Release | None:
    query = (
        sa.select(RELEASES.c.release_id)
        .join(VERDICTS, RELEASES.c.verdict_number == VERDICTS.c.number)
        .where(RELEASES.c.alias == alias, RELEASES.c.candidate_id == verdict.candidate_id)
        .where(VERDICTS.c.verdict == strict_json(verdict))
        .order_by(RELEASES.c.release_id.desc())
    )
    number = connection.execute(query).scalar()
    return None if number is None else _require(connection, number)


def _require(connection: sa.Connection, release_id: int) -> Release:
    row = connection.execute(sa.select(RELEASES).where(RELEASES.c.release_id == release_id)).one_or_none()
    if row is None:
        raise RegistryError(f"there is no release {release_id}", hint="see evergrad model show VERSION")
    steps = sa.select(RELEASE_EVENTS).where(RELEASE_EVENTS.c.release_id == release_id)
    step = connection.execute(steps.order_by(RELEASE_EVENTS.c.event_id.desc()).limit(1)).one()
    return Release(
        release_id=row.release_id,
        alias=row.alias,
        candidate_id=row.candidate_id,
        incumbent_id=row.incumbent_id,
        plan=json.loads(row.plan),
        state=ReleaseState(step.state),
        share=step.share,
        since=step.at,
    )


def _require_standing(connection: sa.Connection, release: Release) -> int:
    """The number of the release's verdict.

    Raises:
        RegistryError: the release has moved on, or has ended.
    """
    found = _require(connection, release.release_id)
    if not found.state.is_open or (found.state, found.share) != (release.state, release.share):
        stands, believed = (f"{each.state} {each.share:g}" for each in (found, release))
        raise RegistryError(
            f"the release of {found.candidate_id} is at {stands}, not at {believed}",
            where=release.alias,
            hint="somebody moved it meanwhile; look again: evergrad model show",
        )
    query = sa.select(RELEASES.c.verdict_number).where(RELEASES.c.release_id == release.release_id)
    return int(connection.execute(query).scalar_one())


def _add_event(
    connection: sa.Connection,
    release_id: int,
    state: ReleaseState,
    share: float,
    actor: str,
    reason: str,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    values = {
        "release_id": release_id,
        "state": state.value,
        "share": share,
        "actor": actor,
        "reason": reason,
        "evidence": strict_json(evidence or {}),
        "at": now(),
    }
    connection.execute(RELEASE_EVENTS.insert().values(values))


def _to_outcome(row: sa.Row[Any]) -> SessionOutcome:
    return SessionOutcome(row.session_id, Side(row.side), row.score, row.share, bool(row.by_customer))


def _to_release_event(row: sa.Row[Any]) -> ReleaseEvent:
    return ReleaseEvent(ReleaseState(row.state), row.share, row.actor, row.reason, json.loads(row.evidence), row.at)
