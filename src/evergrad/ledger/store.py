"""The ledger: append-only cost entries in Decimal dollars, each entered once, and what they add up to."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from evergrad.database import Database
from evergrad.ledger._owners import alive
from evergrad.ledger.prices import EXACT, LedgerError, PriceBook, View
from evergrad.types import CostEntry, plain, strict_json

SCHEMA_VERSION = 1
UNATTRIBUTED = "unattributed"
"""Phase of time that was reserved and passed, but whose process died before it could say what for."""

tables = sa.MetaData()
# Decimals are text: SQLite has no exact numbers of its own, and text keeps every digit in any database.
entries_table = sa.Table(
    "cost_entries",
    tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("idempotency_key", sa.String, nullable=False, unique=True),
    sa.Column("subject", sa.String, nullable=False, index=True),
    sa.Column("phase", sa.String, nullable=False),
    sa.Column("resource", sa.String, nullable=False),
    sa.Column("quantity", sa.String, nullable=False),
    sa.Column("unit_price", sa.String),
    sa.Column("usd", sa.String),
    sa.Column("price_book", sa.String, nullable=False),
    sa.Column("at", sa.String, nullable=False),
    # Always 0: a quantity of tokens is a resource of its own. Kept so that ledgers with this schema still open.
    sa.Column("tokens", sa.BigInteger, nullable=False, default=0),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("reservation_id", sa.String, index=True),
)
books_table = sa.Table(
    "price_books", tables, sa.Column("hash", sa.String, primary_key=True), sa.Column("book", sa.Text, nullable=False)
)
reservations_table = sa.Table(
    "reservations",
    tables,
    sa.Column("reservation_id", sa.String, primary_key=True),
    sa.Column("subject", sa.String, nullable=False),
    sa.Column("reserved", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("started_at", sa.String, nullable=False),
    sa.Column("heartbeat_at", sa.String, nullable=False),
    sa.Column("elapsed_ns", sa.BigInteger, nullable=False),
    sa.Column("charged_ns", sa.BigInteger, nullable=False),
    sa.Column("closed", sa.Boolean, nullable=False),
)


@sa.event.listens_for(entries_table, "after_create")
def _forbid_changes(_table: sa.Table, connection: sa.Connection, **_options: Any) -> None:
    """Append-only, not by good intentions: the database itself refuses to change an entry."""
    refusal = "cost entries are append-only"
    if connection.dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER cost_entries_no_{verb.lower()} BEFORE {verb} ON cost_entries "
                f"BEGIN SELECT RAISE(ABORT, '{refusal}'); END"
            )
    elif connection.dialect.name == "postgresql":
        connection.exec_driver_sql(
            "CREATE OR REPLACE FUNCTION refuse_cost_entry_change() RETURNS trigger LANGUAGE plpgsql "
            f"AS $$ BEGIN RAISE EXCEPTION '{refusal}'; END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER cost_entries_append_only BEFORE UPDATE OR DELETE ON cost_entries "
            "FOR EACH ROW EXECUTE FUNCTION refuse_cost_entry_change()"
        )


@dataclass(frozen=True, slots=True)
class CostSummary:
    """What a set of entries adds up to.

    An unpriced entry makes each sum that contains it ``None``; ``usd_known`` and ``coverage`` say how much is known.
    """

    usd: Decimal | None
    """The whole; ``None`` as soon as one entry has no price."""
    usd_known: Decimal
    """The priced entries alone."""
    coverage: float
    """Share of the entries that are priced; 1.0 for no entries."""
    unpriced: tuple[str, ...]
    """Resources without a price."""
    entries: int
    by_phase: Mapping[str, Decimal | None] = field(default_factory=dict)
    by_subject: Mapping[str, Decimal | None] = field(default_factory=dict)
    by_resource: Mapping[str, Decimal] = field(default_factory=dict)
    """Quantities, not dollars."""


@dataclass(frozen=True, slots=True)
class Conservation:
    """One resource of one reservation: what was reserved must be what was charged."""

    reservation_id: str
    resource: str
    reserved: Decimal
    """Units × seconds that have been settled; for a closed reservation, all of them."""
    charged: Decimal
    """Sum of its entries, idle time included."""

    @property
    def holds(self) -> bool:
        return self.reserved == self.charged


class Ledger:
    """Cost entries in one database; any number of processes and threads may append at once.

    Opening it charges the time of clocks whose process has died since (see :class:`~evergrad.ledger.PhaseClock`), at the
    prices of ``price_book``; so whoever only looks opens it by :meth:`for_reading`, and the run's own book is used later.

    Args:
        location: An SQLite file or an SQLAlchemy URL.
        price_book: Prices of new entries; the built-in book by default. Entries keep the price they were made with.
    """

    def __init__(self, location: str | Path, price_book: PriceBook | None = None) -> None:
        self._open(location, price_book)
        self._keep_book()
        self._charge_dead_clocks()

    @classmethod
    def for_reading(cls, location: str | Path) -> Ledger:
        """Opens a ledger to look at: no entry is made, whatever has died, since a reader does not know the run's prices.

        What it leaves for the next opening is in :meth:`uncharged`.
        """
        ledger = cls.__new__(cls)
        ledger._open(location, None)
        return ledger

    def _open(self, location: str | Path, price_book: PriceBook | None) -> None:
        self.price_book = price_book or PriceBook.load()
        self.database = Database(location, tables, room="ledger", schema_version=SCHEMA_VERSION)
        self._total_lock = threading.Lock()
        self._total_until, self._total_known, self._total_unpriced = 0, Decimal(0), 0

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def record(
        self,
        key: str,
        *,
        subject: str,
        phase: str,
        resource: str,
        quantity: Decimal | int | str,
        metadata: Mapping[str, Any] | None = None,
    ) -> CostEntry:
        """Enters ``quantity`` units of ``resource`` at the book's price, once per ``key``.

        The same key with the same content returns the entry that exists, at its own price and time.

        Raises:
            LedgerError: the key has entered something else, or the quantity is negative or not finite.
        """
        entry = self.make_entry(key, subject=subject, phase=phase, resource=resource, quantity=quantity, metadata=metadata)
        with self.database.write() as connection:
            return append(connection, entry)

    def make_entry(
        self,
        key: str,
        *,
        subject: str,
        phase: str,
        resource: str,
        quantity: Decimal | int | str,
        metadata: Mapping[str, Any] | None = None,
    ) -> CostEntry:
        """A priced entry that is not yet entered."""
        if not (key and subject and phase and resource):
            raise LedgerError(
                "a cost entry needs a key, a subject, a phase and a resource", where=f"{subject}/{phase}/{resource}"
            )
        try:
            exact = Decimal(quantity) if not isinstance(quantity, float) else None
        except InvalidOperation:
            exact = None
        if exact is None or not exact.is_finite() or exact < 0:
            raise LedgerError(f"quantity {quantity!r}: not an exact count", where=key, hint="give a finite Decimal or int >= 0")
        return CostEntry(
            idempotency_key=key,
            subject=subject,
            phase=phase,
            resource=resource,
            quantity=exact,
            unit_price=self.price_book.unit_price(resource),
            usd=self.price_book.cost(resource, exact),
            price_book=self.price_book.hash,
            at=utc_now(),
            metadata=plain(metadata or {}),
        )

    def entries(self, *, subject: str | None = None, phase: str | None = None) -> tuple[CostEntry, ...]:
        """Entries in the order in which they were made, all or those of a subject and phase."""
        query = sa.select(entries_table).order_by(entries_table.c.number)
        if subject is not None:
            query = query.where(entries_table.c.subject == subject)
        if phase is not None:
            query = query.where(entries_table.c.phase == phase)
        with self.database.read() as connection:
            return tuple(to_entry(row) for row in connection.execute(query))

    def summary(self, *, subject: str | None = None, phase: str | None = None) -> CostSummary:
        """Sums over all entries, or over those of a subject and phase."""
        return cost_summary(self.entries(subject=subject, phase=phase))

    def total_usd(self) -> Decimal | None:
        """Dollars of all entries; ``None`` when one is unpriced. Reads only what is new since the last call."""
        with self._total_lock:
            columns = (entries_table.c.number, entries_table.c.usd)
            query = sa.select(*columns).where(entries_table.c.number > self._total_until).order_by(entries_table.c.number)
            with self.database.read() as connection:
                rows = connection.execute(query).all()
            for row in rows:
                self._total_until = row.number
                if row.usd is None:
                    self._total_unpriced += 1
                else:
                    self._total_known = EXACT.add(self._total_known, Decimal(row.usd))
            return None if self._total_unpriced else self._total_known

    def price_books(self) -> dict[str, PriceBook]:
        """Every book that this ledger has been opened with, by hash."""
        with self.database.read() as connection:
            rows = connection.execute(sa.select(books_table)).all()
        return {row.hash: PriceBook.model_validate_json(row.book) for row in rows}

    def conservation(self) -> tuple[Conservation, ...]:
        """For each reservation and resource, what was reserved beside what was charged."""
        with self.database.read() as connection:
            reservations = connection.execute(sa.select(reservations_table).order_by(reservations_table.c.started_at)).all()
            columns = (entries_table.c.reservation_id, entries_table.c.resource, entries_table.c.quantity)
            charges = connection.execute(sa.select(*columns).where(entries_table.c.reservation_id.is_not(None))).all()
        charged: dict[tuple[str, str], Decimal] = {}
        for row in charges:
            place = (row.reservation_id, row.resource)
            charged[place] = EXACT.add(charged.get(place, Decimal(0)), Decimal(row.quantity))
        return tuple(
            Conservation(
                row.reservation_id,
                resource,
                reserved_quantity(row.elapsed_ns if row.closed else row.charged_ns, Decimal(units)),
                charged.get((row.reservation_id, resource), Decimal(0)),
            )
            for row in reservations
            for resource, units in json.loads(row.reserved).items()
        )

    def elapsed_s(self) -> float:
        """Seconds that clocks have run, those of killed processes included as far as their heartbeats went."""
        with self.database.read() as connection:
            nanoseconds = connection.execute(sa.select(sa.func.sum(reservations_table.c.elapsed_ns))).scalar()
        return (nanoseconds or 0) / 1e9

    def uncharged(self) -> dict[str, Decimal]:
        """Quantities by resource that clocks have seen pass and not yet put down: of phases that go on, or of the dead."""
        table = reservations_table
        with self.database.read() as connection:
            rows = connection.execute(sa.select(table).where(sa.not_(table.c.closed))).all()
        pending: dict[str, Decimal] = {}
        for row in rows:
            for resource, units in json.loads(row.reserved).items():
                quantity = reserved_quantity(row.elapsed_ns - row.charged_ns, Decimal(units))
                if quantity:
                    pending[resource] = EXACT.add(pending.get(resource, Decimal(0)), quantity)
        return pending

    def check_conservation(self) -> None:
        """Raises:
        LedgerError: some reservation was charged more or less than it reserved; names the first.
        """
        for item in self.conservation():
            if not item.holds:
                raise LedgerError(
                    f"{item.resource}: reserved {item.reserved}, charged {item.charged}",
                    where=f"reservation {item.reservation_id}",
                )

    def _keep_book(self) -> None:
        """Entries name their book by hash alone; the book itself stays beside them."""
        with self.database.read() as connection:
            known = connection.execute(sa.select(books_table.c.hash).where(books_table.c.hash == self.price_book.hash)).scalar()
        if known is None:
            with self.database.write() as connection:
                if (
                    connection.execute(sa.select(books_table.c.hash).where(books_table.c.hash == self.price_book.hash)).scalar()
                    is None
                ):
                    connection.execute(
                        books_table.insert().values(hash=self.price_book.hash, book=self.price_book.model_dump_json())
                    )

    def _charge_dead_clocks(self) -> None:
        """Charges, as ``unattributed``, what clocks of dead processes had seen but not put down."""
        table = reservations_table
        with self.database.read() as connection:
            rows = connection.execute(sa.select(table).where(sa.not_(table.c.closed))).all()
        dead = [row.reservation_id for row in rows if not alive(json.loads(row.owner), row.heartbeat_at)]
        if not dead:
            return
        with self.database.write() as connection:
            # Read again under the lock: another process may have opened the ledger at the same time.
            query = sa.select(table).where(table.c.reservation_id.in_(dead), sa.not_(table.c.closed))
            for row in connection.execute(query).all():
                self._close_reservation(connection, row)

    def _close_reservation(self, connection: sa.Connection, row: sa.Row[Any]) -> None:
        for resource, units in json.loads(row.reserved).items():
            quantity = reserved_quantity(row.elapsed_ns - row.charged_ns, Decimal(units))
            if quantity:
                key = f"{row.reservation_id}/{UNATTRIBUTED}/{resource}"
                entry = self.make_entry(key, subject=row.subject, phase=UNATTRIBUTED, resource=resource, quantity=quantity)
                append(connection, entry, row.reservation_id)
        table = reservations_table
        values = {"closed": True, "charged_ns": row.elapsed_ns}
        connection.execute(table.update().where(table.c.reservation_id == row.reservation_id).values(values))


def cost_summary(entries: Iterable[CostEntry]) -> CostSummary:
    """Sums of ``entries``; see :class:`CostSummary` for what an unpriced one does to them."""
    found = list(entries)
    priced = sum(entry.usd is not None for entry in found)
    quantities: dict[str, Decimal] = {}
    for entry in found:
        quantities[entry.resource] = EXACT.add(quantities.get(entry.resource, Decimal(0)), entry.quantity)
    return CostSummary(
        usd=_sum_usd(found),
        usd_known=_sum_usd([entry for entry in found if entry.usd is not None]) or Decimal(0),
        coverage=priced / len(found) if found else 1.0,
        unpriced=tuple(sorted({entry.resource for entry in found if entry.usd is None})),
        entries=len(found),
        by_phase=_grouped_usd((entry.phase, entry) for entry in found),
        by_subject=_grouped_usd((entry.subject, entry) for entry in found),
        by_resource=dict(sorted(quantities.items())),
    )


def reprice(entries: Iterable[CostEntry], price_book: PriceBook, view: View = "billed") -> tuple[CostEntry, ...]:
    """The same quantities at the prices of one book, so that costs of different days can be compared."""
    return tuple(_priced(entry, price_book, view) for entry in entries)


def in_view(entries: Iterable[CostEntry], books: Mapping[str, PriceBook], view: View) -> tuple[CostEntry, ...]:
    """Each entry at another price of its own book: what it would cost at the list, or at the margin.

    Args:
        entries: As they were billed.
        books: By hash, as :meth:`Ledger.price_books` gives them. An entry of a book that is not there has no price.
        view: Which of the prices.
    """
    unknown = PriceBook(prices={})
    return tuple(
        _priced(entry, books[entry.price_book], view)
        if entry.price_book in books
        else replace(_priced(entry, unknown, view), price_book=entry.price_book)
        for entry in entries
    )


def _priced(entry: CostEntry, book: PriceBook, view: View) -> CostEntry:
    usd = book.cost(entry.resource, entry.quantity, view)
    return replace(entry, unit_price=book.unit_price(entry.resource, view), usd=usd, price_book=book.hash)


def append(connection: sa.Connection, entry: CostEntry, reservation_id: str | None = None) -> CostEntry:
    """Enters ``entry`` inside a transaction, unless its key has entered the same before; see :meth:`Ledger.record`."""
    found = connection.execute(
        sa.select(entries_table).where(entries_table.c.idempotency_key == entry.idempotency_key)
    ).one_or_none()
    if found is not None:
        known = to_entry(found)
        same = ("subject", "phase", "resource", "quantity")
        differing = [name for name in same if getattr(known, name) != getattr(entry, name)]
        if differing:
            raise LedgerError(
                f"the key has entered another {', '.join(differing)} before",
                where=entry.idempotency_key,
                hint="use a key per entry",
            )
        return known
    values = {
        "idempotency_key": entry.idempotency_key,
        "subject": entry.subject,
        "phase": entry.phase,
        "resource": entry.resource,
        "quantity": f"{entry.quantity:f}",
        "unit_price": None if entry.unit_price is None else f"{entry.unit_price:f}",
        "usd": None if entry.usd is None else f"{entry.usd:f}",
        "price_book": entry.price_book,
        "at": entry.at,
        "metadata": strict_json(entry.metadata),
        "reservation_id": reservation_id,
    }
    connection.execute(entries_table.insert().values(values))
    return entry


def to_entry(row: sa.Row[Any]) -> CostEntry:
    """The entry in a row of ``entries_table``."""
    return CostEntry(
        idempotency_key=row.idempotency_key,
        subject=row.subject,
        phase=row.phase,
        resource=row.resource,
        quantity=Decimal(row.quantity),
        unit_price=None if row.unit_price is None else Decimal(row.unit_price),
        usd=None if row.usd is None else Decimal(row.usd),
        price_book=row.price_book,
        at=row.at,
        metadata=json.loads(row.metadata),
    )


def reserved_quantity(nanoseconds: int, units: Decimal) -> Decimal:
    """Unit-seconds of ``units`` held for ``nanoseconds``, exactly."""
    return EXACT.multiply(EXACT.scaleb(Decimal(nanoseconds), -9), units)


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _sum_usd(entries: Sequence[CostEntry]) -> Decimal | None:
    total = Decimal(0)
    for entry in entries:
        if entry.usd is None:
            return None
        total = EXACT.add(total, entry.usd)
    return total


def _grouped_usd(named: Iterable[tuple[str, CostEntry]]) -> dict[str, Decimal | None]:
    groups: dict[str, list[CostEntry]] = {}
    for name, entry in named:
        groups.setdefault(name, []).append(entry)
    return {name: _sum_usd(group) for name, group in sorted(groups.items())}
