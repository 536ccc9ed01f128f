"""The phase clock: splits the time of a reserved machine into phases that exclude each other, with nothing left over.

At every moment exactly one thing is going on: the phase that was entered last and has not ended, or ``idle``. A phase
inside another takes its time out of the outer one. So for each reserved resource::

    units × wall time  =  Σ phases  +  idle          (in integer nanoseconds: to the last digit)

What a clock has seen is put down at each end of a phase. In between, a heartbeat puts down how much time has passed: should
the process be killed, whoever opens the ledger next to write to it charges that time as ``unattributed``.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import Decimal

import sqlalchemy as sa

from evergrad.database import DatabaseError
from evergrad.ledger._owners import this_process
from evergrad.ledger.energy import EnergyMeter
from evergrad.ledger.prices import EXACT, LedgerError
from evergrad.ledger.store import UNATTRIBUTED, Ledger, append, reservations_table, reserved_quantity, utc_now
from evergrad.types import CostEntry, strict_json

IDLE = "idle"
CPU_RESOURCE = "cpu_core_s"
_SMALL_IDLE_NS = 1_000_000_000


class Span:
    """One phase while it lasts."""

    def __init__(self, phase: str, subject: str) -> None:
        self.phase, self.subject = phase, subject
        self._nanoseconds = 0
        self._joules: dict[str, Decimal] = {}

    def _use(self, nanoseconds: int, joules: Mapping[str, Decimal]) -> None:
        self._nanoseconds += nanoseconds
        for resource, amount in joules.items():
            self._joules[resource] = EXACT.add(self._joules.get(resource, Decimal(0)), amount)


class PhaseClock:
    """Charges a reserved machine's time to phases; use as a context manager. Threads and tasks may share it.

    >>> from tempfile import mkdtemp
    >>> ledger = Ledger(mkdtemp() + "/ledger.sqlite")
    >>> with PhaseClock(ledger, subject="cycle-1", cores=2) as clock, clock.phase("rollout"):
    ...     batch = sorted(range(1000))
    >>> ledger.check_conservation()
    >>> [(entry.subject, entry.resource) for entry in ledger.entries(phase="rollout")]
    [('cycle-1', 'cpu_core_s')]

    Args:
        ledger: Where the entries go.
        subject: What the time is spent on; :attr:`subject` may be set to another later.
        cores: CPU cores that are reserved; those this process may use by default.
        reserved: Reserved units by resource (``{"cpu_core_s": 16, "gpu_h100_s": 1}``); takes the place of ``cores``.
        meter: Joules go to the phase that used them, where the ledger's book prices ``cpu_joule`` or ``gpu_joule``; what a
            killed process had not put down yet is lost. No joules without it.
        heartbeat_s: Seconds between heartbeats of a thread; ``None`` for none.
        now_ns: A clock that never goes back, in nanoseconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        subject: str,
        cores: int | None = None,
        reserved: Mapping[str, Decimal | int] | None = None,
        meter: EnergyMeter | None = None,
        heartbeat_s: float | None = 5.0,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        units = dict(reserved) if reserved is not None else {CPU_RESOURCE: cores or len(os.sched_getaffinity(0))}
        self._units = {resource: Decimal(count) for resource, count in units.items()}
        if not self._units or any(not count.is_finite() or count <= 0 for count in self._units.values()):
            raise LedgerError(
                f"cannot reserve {dict(units)}", where=subject, hint="give a positive number of units per resource"
            )
        self.reservation_id = f"{subject}-{secrets.token_hex(6)}"
        self._meter = meter if meter is not None and meter.resources & ledger.price_book.prices.keys() else None
        self.parents: tuple[str, ...] = ()
        """What the subject builds on, such as the version that a cycle starts from; kept with each entry."""
        self._ledger, self._subject, self._now_ns, self._heartbeat_s = ledger, subject, now_ns, heartbeat_s
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._open: list[Span] = []
        self._idle = Span(IDLE, subject)
        self._started_ns = self._seen_ns = 0
        self._used = self._running = False
        self._entry_number = 0

    def __enter__(self) -> PhaseClock:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Reserves the machine from now on."""
        with self._lock:
            if self._used:
                raise LedgerError("a clock runs once", where=self.reservation_id, hint="make a new PhaseClock")
            now = utc_now()
            values = {
                "reservation_id": self.reservation_id,
                "subject": self._subject,
                "reserved": strict_json(self._units),
                "owner": strict_json(this_process()),
                "started_at": now,
                "heartbeat_at": now,
                "elapsed_ns": 0,
                "charged_ns": 0,
                "closed": False,
            }
            with self._ledger.database.write() as connection:
                connection.execute(reservations_table.insert().values(values))
            self._started_ns = self._seen_ns = self._now_ns()
            if self._meter is not None:
                self._meter.take()  # what was used before the machine was reserved is not ours
            self._used = self._running = True
        if self._heartbeat_s is not None:
            self._thread = threading.Thread(target=self._beat, name="ledger-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Charges all that is left and releases the machine. Phases that are still open end here."""
        with self._lock:
            if not self._running:
                return
            self._stop.set()
            self._advance()
            self._charge([*self._open, self._idle], close=True)
            self._open.clear()
            self._running = False
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextmanager
    def phase(self, name: str, *, subject: str | None = None) -> Iterator[Span]:
        """Charges the time inside to phase ``name``, less that of phases entered inside it.

        Args:
            name: ``rollout``, ``train``, ``weight_sync``, ``eval``, ``gate``, ``serve``, ``store``, ``setup``, or another.
            subject: What it is spent on, if not the clock's :attr:`subject`.
        """
        if not name or name in (IDLE, UNATTRIBUTED):
            raise LedgerError(f"'{name}' is no phase to enter", where=self.reservation_id, hint="name what is being done")
        with self._lock:
            if not self._running:
                raise LedgerError("the clock is not running", where=self.reservation_id, hint="use it as a context manager")
            self._advance()
            span = Span(name, subject or self._subject)
            self._open.append(span)
        try:
            yield span
        finally:
            self._leave(span)

    @property
    def subject(self) -> str:
        """What time is spent on unless a phase says otherwise; idle time is charged to it as well."""
        return self._subject

    @subject.setter
    def subject(self, subject: str) -> None:
        with self._lock:
            if subject == self._subject:
                return  # with a new span, idle time that a heartbeat has seen would be lost
            if self._running:
                self._advance()
                self._charge([self._idle])
            self._subject = subject
            self._idle = Span(IDLE, subject)

    def settle(self) -> None:
        """Puts down everything up to now, phases that go on included."""
        with self._lock:
            if self._running:
                self._advance()
                self._charge([*self._open, self._idle])

    def heartbeat(self) -> None:
        """Puts down how much time has passed, without saying what for."""
        with self._lock:
            if not self._running:
                return
            self._advance()
            with self._ledger.database.write() as connection:
                self._update_reservation(connection, charged_ns=0)

    def spent_usd(self) -> Decimal | None:
        """Dollars in the whole ledger, and what this clock has seen and not yet put down; ``None`` when unpriced."""
        with self._lock:
            pending: list[Span] = []
            if self._running:
                self._advance()
                pending = [*self._open, self._idle]
            total, book = self._ledger.total_usd(), self._ledger.price_book
            for entry in (entry for span in pending for entry in self._used_by(span)):
                usd = book.cost(*entry)
                total = None if total is None or usd is None else EXACT.add(total, usd)
            return total

    # -- under the lock --------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Gives the time since the last call to whatever was going on."""
        now = max(self._now_ns(), self._seen_ns)
        joules = self._meter.take() if self._meter is not None else {}
        (self._open[-1] if self._open else self._idle)._use(now - self._seen_ns, joules)
        self._seen_ns = now

    def _leave(self, span: Span) -> None:
        with self._lock:
            if span not in self._open:
                # The clock was stopped inside the phase, which has charged it.
                return
            self._advance()
            self._open.remove(span)
            due = [span, self._idle] if self._idle._nanoseconds >= _SMALL_IDLE_NS else [span]
            self._charge(due)

    def _charge(self, spans: list[Span], *, close: bool = False) -> None:
        """Enters the time of ``spans`` and moves the reservation along, in one transaction."""
        entries: list[CostEntry] = []
        for span in spans:
            entries += self._entries(span)
        charged_ns = sum(span._nanoseconds for span in spans)
        with self._ledger.database.write() as connection:
            for entry in entries:
                append(connection, entry, self.reservation_id)
            self._update_reservation(connection, charged_ns=charged_ns, closed=close)
        for span in spans:
            span._nanoseconds = 0
            span._joules.clear()

    def _entries(self, span: Span) -> list[CostEntry]:
        entries = []
        for resource, quantity in self._used_by(span):
            self._entry_number += 1
            entries.append(
                self._ledger.make_entry(
                    f"{self.reservation_id}/{self._entry_number}",
                    subject=span.subject,
                    phase=span.phase,
                    resource=resource,
                    quantity=quantity,
                    metadata={"parents": list(self.parents)} if self.parents else None,
                )
            )
        return entries

    def _used_by(self, span: Span) -> list[tuple[str, Decimal]]:
        """Resources and quantities that a span has used and not put down yet."""
        used = {resource: reserved_quantity(span._nanoseconds, units) for resource, units in self._units.items()}
        used |= {name: joules for name, joules in span._joules.items() if name in self._ledger.price_book.prices}
        return [(resource, quantity) for resource, quantity in used.items() if quantity]

    def _update_reservation(self, connection: sa.Connection, *, charged_ns: int, closed: bool = False) -> None:
        table = reservations_table
        values = {
            "subject": self._subject,
            "heartbeat_at": utc_now(),
            "elapsed_ns": self._seen_ns - self._started_ns,
            "charged_ns": table.c.charged_ns + charged_ns,
            "closed": closed,
        }
        connection.execute(table.update().where(table.c.reservation_id == self.reservation_id).values(values))

    def _beat(self) -> None:
        assert self._heartbeat_s is not None
        while not self._stop.wait(self._heartbeat_s):
            # A store that cannot be written now may be writable at the next beat; the end of a phase will not be silent.
            with suppress(DatabaseError, sa.exc.SQLAlchemyError):
                self.heartbeat()
