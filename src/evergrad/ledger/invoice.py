"""The ledger against an invoice: every dollar of it was spent on something, was idle, or is shown as unattributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from evergrad.ledger.clock import IDLE
from evergrad.ledger.prices import EXACT, LedgerError
from evergrad.ledger.store import UNATTRIBUTED, cost_summary
from evergrad.types import CostEntry


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """``allocated + idle + unattributed = invoiced``, to the last digit."""

    invoiced: Decimal
    allocated: Decimal
    """Entries that say what they were for."""
    idle: Decimal
    """Time that was reserved and not used, on account of whoever reserved it."""
    unattributed: Decimal
    """The rest: time of killed processes, and what the invoice has and the ledger does not. Negative when the ledger has more
    than the invoice: then its prices are too high."""
    residual: Decimal
    """What the invoice has beyond the ledger; part of ``unattributed``."""
    unpriced: tuple[str, ...]
    """Resources without a price: what they cost is in the residual."""


def reconcile(entries: Sequence[CostEntry], invoiced: Decimal) -> Reconciliation:
    """Puts the entries of a period beside what was invoiced for it.

    Raises:
        LedgerError: the invoice is negative or not finite.
    """
    if not invoiced.is_finite() or invoiced < 0:
        raise LedgerError(f"an invoice of {invoiced}", hint="give its sum in dollars, such as 12.34")
    summary = cost_summary(entry for entry in entries if entry.usd is not None)
    idle, lost = (summary.by_phase.get(phase) or Decimal(0) for phase in (IDLE, UNATTRIBUTED))
    allocated = EXACT.subtract(EXACT.subtract(summary.usd_known, idle), lost)
    residual = EXACT.subtract(invoiced, summary.usd_known)
    unpriced = tuple(sorted({entry.resource for entry in entries if entry.usd is None}))
    return Reconciliation(invoiced, allocated, idle, EXACT.add(lost, residual), residual, unpriced)
