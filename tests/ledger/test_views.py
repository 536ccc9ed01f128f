"""Views of the same quantities, and the ledger beside an invoice."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.ledger import IDLE, UNATTRIBUTED, Ledger, LedgerError, Price, PriceBook, cost_summary, in_view, reconcile, reprice
from evergrad.types import CostEntry

BOOK = PriceBook(
    version="2026-06",
    prices={
        "gpu_h100_s": Price(usd=Decimal(2), list_usd=Decimal(3), marginal_usd=Decimal(0)),
        "cpu_core_s": Price(usd=Decimal(1)),
    },
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", BOOK) as ledger:
        ledger.record("a", subject="s", phase="train", resource="gpu_h100_s", quantity=10)
        ledger.record("b", subject="s", phase="eval", resource="cpu_core_s", quantity=5)
        yield ledger


def test_each_view_has_its_own_sum(ledger: Ledger) -> None:
    books = ledger.price_books()
    assert books[BOOK.hash].version == "2026-06"
    assert ledger.total_usd() == cost_summary(in_view(ledger.entries(), books, "billed")).usd == 25
    assert cost_summary(in_view(ledger.entries(), books, "list")).usd == 35
    assert cost_summary(in_view(ledger.entries(), books, "marginal")).usd == 5
    assert cost_summary(reprice(ledger.entries(), BOOK, "list")).usd == 35


def test_an_entry_whose_book_is_gone_has_no_other_price(ledger: Ledger) -> None:
    seen = in_view(ledger.entries(), {}, "list")
    assert [entry.usd for entry in seen] == [None, None]
    assert [entry.price_book for entry in seen] == [BOOK.hash, BOOK.hash]
    assert cost_summary(seen).usd is None


def test_the_hash_of_a_book_names_all_its_prices_and_not_its_version() -> None:
    plain = PriceBook(prices={"x": Price(usd=Decimal(2))})
    assert plain.hash == PriceBook(version="later", prices={"x": Price(usd=Decimal(2), list_usd=Decimal(2))}).hash
    assert plain.hash != PriceBook(prices={"x": Price(usd=Decimal(2), list_usd=Decimal(3))}).hash
    assert plain.hash != PriceBook(prices={"x": Price(usd=Decimal(2), marginal_usd=Decimal(3))}).hash


amounts = st.decimals(0, 10**6, places=9)


@given(st.lists(st.tuples(st.sampled_from(["train", "eval", IDLE, UNATTRIBUTED]), st.none() | amounts)), amounts)
def test_every_dollar_of_an_invoice_is_somewhere(rows: list[tuple[str, Decimal | None]], invoiced: Decimal) -> None:
    entries = [CostEntry(str(i), "s", phase, "x", Decimal(1), usd, usd) for i, (phase, usd) in enumerate(rows)]
    found = reconcile(entries, invoiced)
    assert found.allocated + found.idle + found.unattributed == invoiced
    assert found.idle == sum((usd for phase, usd in rows if phase == IDLE and usd is not None), Decimal(0))
    assert found.allocated == sum((usd for phase, usd in rows if phase in ("train", "eval") and usd is not None), Decimal(0))
    assert (found.unpriced == ("x",)) == any(usd is None for _, usd in rows)


def test_an_invoice_below_the_ledger_says_so(ledger: Ledger) -> None:
    found = reconcile(ledger.entries(), Decimal("20.00"))
    assert (found.allocated, found.unattributed, found.residual) == (25, -5, -5)
    assert reconcile(ledger.entries(), Decimal(26)).residual == 1
    for wrong in ("-1", "NaN", "Infinity"):
        with pytest.raises(LedgerError, match="invoice"):
            reconcile(ledger.entries(), Decimal(wrong))
