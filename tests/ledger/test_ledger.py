"""The ledger: exact money, each entry once, unknown is not zero."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from evergrad.config import ConfigError
from evergrad.ledger import Ledger, LedgerError, PhaseClock, Price, PriceBook, cost_summary, reprice
from evergrad.types import CostEntry


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path)


def test_room_imports_light() -> None:
    code = "import sys, evergrad.ledger; assert not {'torch', 'transformers', 'scipy', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_default_book_prices_what_it_says() -> None:
    book = PriceBook.load()
    assert book.cost("cpu_core_s", Decimal(3600)) == Decimal("0.036")
    assert book.cost("api_output_tokens", Decimal(2_000_000)) == 10
    assert book.unit_price("gpu_of_next_year_s") is None
    assert all(price.source and price.as_of for price in book.prices.values())


def test_a_book_of_ones_own_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[prices.cpu_core_s]\nusd = 0.1\nper = 3600\n")
    assert PriceBook.load(path).cost("cpu_core_s", Decimal(36000)) == pytest.approx(1, abs=Decimal("1e-15"))
    for text, message in [
        ("[prices.cpu_core_s]\nusd = 0.1\npre = 3600\n", "did you mean 'per'"),
        ("[prices.cpu_core_s]\nusd = -0.1\n", "greater than or equal to 0"),
        ("[prices.cpu_core_s]\nusd = nan\n", "finite"),
        ("[prices.cpu_core_s]\nusd = 1\nper = 0\n", "greater than 0"),
        ("currency = 'EUR'\n[prices]\n", "USD"),
        ("usd = \n", "not valid TOML"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            PriceBook.load(path)
    with pytest.raises(ConfigError, match="not found"):
        PriceBook.load(tmp_path / "none.toml")


def test_book_hash_names_prices_alone() -> None:
    def book(usd: str, per: str, source: str = "") -> PriceBook:
        return PriceBook(prices={"gpu_s": Price(usd=Decimal(usd), per=Decimal(per), source=source)})

    assert book("3", "3600").hash == book("3.00", "3600", "an invoice").hash == book("6", "7200").hash
    assert book("3", "3600").hash != book("3.01", "3600").hash


def test_entries_keep_every_digit_over_reopening(ledger: Ledger, path: Path) -> None:
    entry = ledger.record("k", subject="cycle-1", phase="rollout", resource="cpu_core_s", quantity="123456789.123456789")
    assert entry.usd == Decimal("1234.56789123456789")
    assert Ledger(path).entries() == (entry,)
    assert entry.price_book == PriceBook.load().hash
    assert entry.price_book in Ledger(path).price_books()


def test_a_key_enters_once(ledger: Ledger, path: Path) -> None:
    first = ledger.record("k", subject="s", phase="train", resource="cpu_core_s", quantity=5)
    dearer = Ledger(path, PriceBook(prices={"cpu_core_s": Price(usd=Decimal(1))}))
    assert dearer.record("k", subject="s", phase="train", resource="cpu_core_s", quantity=Decimal("5.0")) == first
    assert ledger.total_usd() == first.usd
    with pytest.raises(LedgerError, match="another quantity before"):
        ledger.record("k", subject="s", phase="train", resource="cpu_core_s", quantity=6)
    with pytest.raises(LedgerError, match="another phase before"):
        ledger.record("k", subject="s", phase="eval", resource="cpu_core_s", quantity=5)


def test_entries_cannot_be_changed(ledger: Ledger, path: Path) -> None:
    ledger.record("k", subject="s", phase="train", resource="cpu_core_s", quantity=5)
    for statement in ("UPDATE cost_entries SET usd = '0'", "DELETE FROM cost_entries"):
        with sqlite3.connect(path) as connection, pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)


@pytest.mark.parametrize("quantity", [-1, "NaN", "Infinity", "many", 0.1])
def test_what_is_no_exact_count_is_refused(ledger: Ledger, quantity: object) -> None:
    with pytest.raises(LedgerError, match="not an exact count"):
        ledger.record("k", subject="s", phase="train", resource="cpu_core_s", quantity=quantity)  # type: ignore[arg-type]
    assert ledger.entries() == ()


def test_unknown_prices_make_sums_unknown_and_are_named(ledger: Ledger) -> None:
    ledger.record("a", subject="cycle-1", phase="train", resource="cpu_core_s", quantity=100_000)
    assert ledger.summary().usd == ledger.total_usd() == 1
    ledger.record("b", subject="cycle-2", phase="eval", resource="quantum_s", quantity=1)
    ledger.record("c", subject="cycle-2", phase="train", resource="cpu_core_s", quantity=100_000)
    summary = ledger.summary()
    assert (summary.usd, summary.usd_known, summary.unpriced) == (None, 2, ("quantum_s",))
    assert summary.coverage == pytest.approx(2 / 3)
    assert summary.by_phase == {"eval": None, "train": 2}
    assert summary.by_subject == {"cycle-1": 1, "cycle-2": None}
    assert summary.by_resource == {"cpu_core_s": 200_000, "quantum_s": 1}
    assert ledger.total_usd() is None
    assert ledger.summary(subject="cycle-1").usd == 1
    assert ledger.summary(subject="cycle-2", phase="train").usd == 1


def test_no_entries_cost_nothing(ledger: Ledger) -> None:
    summary = ledger.summary()
    assert (summary.usd, summary.coverage, summary.entries, ledger.total_usd()) == (0, 1.0, 0, 0)


def test_repricing_puts_both_arms_under_one_book(ledger: Ledger) -> None:
    ledger.record("a", subject="s", phase="train", resource="cpu_core_s", quantity=10)
    ledger.record("b", subject="s", phase="train", resource="quantum_s", quantity=2)
    book = PriceBook(prices={"quantum_s": Price(usd=Decimal(3))})
    old, new = ledger.entries(), reprice(ledger.entries(), book)
    assert [entry.usd for entry in old] == [Decimal("0.0001"), None]
    assert [entry.usd for entry in new] == [None, 6]
    assert {entry.price_book for entry in new} == {book.hash}
    assert ledger.entries() == old


quantities = st.lists(st.decimals(0, 10**9, places=9), max_size=30)


@given(quantities, st.decimals("0.000001", 10**4, places=6), st.integers(1, 10**7))
def test_the_sum_of_parts_is_the_price_of_the_whole(parts: list[Decimal], usd: Decimal, per: int) -> None:
    book = PriceBook(prices={"x": Price(usd=usd, per=Decimal(per))})
    unit = book.unit_price("x")
    assert unit is not None
    assert abs(Fraction(unit) - Fraction(usd) / per) <= Fraction(1, 10**24)
    entries = [CostEntry(str(i), "s", "p", "x", part, unit, book.cost("x", part)) for i, part in enumerate(parts)]
    total = cost_summary(entries).usd
    assert total is not None
    assert Fraction(total) == sum(map(Fraction, parts), Fraction(0)) * Fraction(unit)


APPEND = """
import sys
from evergrad.ledger import Ledger
ledger = Ledger(sys.argv[1])
for number in range(40):
    ledger.record(f"{sys.argv[2]}/{number}", subject="s", phase="p", resource="cpu_core_s", quantity=1)
    ledger.record(f"shared/{number}", subject="s", phase="p", resource="cpu_core_s", quantity=1)
"""


def test_processes_append_at_once_and_shared_keys_enter_once(ledger: Ledger, path: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", APPEND, str(path), name]) for name in "ab"]
    assert [child.wait() for child in children] == [0, 0]
    assert len(ledger.entries()) == 120
    assert ledger.total_usd() == Decimal("0.0012")


def test_a_transaction_that_dies_leaves_no_entry(path: Path, ledger: Ledger) -> None:
    code = (
        "import os, signal, sys, sqlalchemy as sa\n"
        "from evergrad.ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1])\n"
        "@sa.event.listens_for(sa.Engine, 'after_cursor_execute')\n"
        "def die(connection, cursor, statement, *rest):\n"
        "    if statement.startswith('INSERT'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "ledger.record('k', subject='s', phase='p', resource='cpu_core_s', quantity=1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    assert ledger.entries() == ()
    ledger.record("k", subject="s", phase="p", resource="cpu_core_s", quantity=1)
    assert sa.inspect(ledger.database.engine).has_table("cost_entries")


@pytest.mark.skipif("EVERGRAD_TEST_DATABASE" not in os.environ, reason="needs the URL of a PostgreSQL database to empty")
def test_the_same_on_postgresql() -> None:
    url = os.environ["EVERGRAD_TEST_DATABASE"]
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    ledger = Ledger(url)
    children = [subprocess.Popen([sys.executable, "-c", APPEND, url, name]) for name in "ab"]
    assert [child.wait() for child in children] == [0, 0]
    assert len(ledger.entries()) == 120
    assert ledger.total_usd() == ledger.summary().usd == Decimal("0.0012")
    with pytest.raises(sa.exc.DBAPIError, match="append-only"), ledger.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM cost_entries")
    with PhaseClock(ledger, subject="s", cores=2) as clock, clock.phase("train"):
        clock.heartbeat()
    ledger.check_conservation()
