"""The FOCUS table: every digit of the ledger in it, nothing unknown shown as nothing, and the columns the tools ask for."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evergrad.ledger import Ledger, PhaseClock, Price, PriceBook, cost_summary, focus_csv
from evergrad.ledger.focus import COLUMNS
from evergrad.types import CostEntry

NOT_NULL = (
    *("BilledCost", "BillingAccountId", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory"),
    *("ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost", "EffectiveCost", "InvoiceIssuerName"),
    *("ListCost", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
)
"""Mandatory columns of FOCUS 1.2 that a row of usage cannot leave empty."""


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def rows_of(entries: tuple[CostEntry, ...], books: dict[str, PriceBook] | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(focus_csv(entries, "run", books or {}))))


def test_the_table_sums_up_to_the_ledger_idle_time_included(ledger: Ledger) -> None:
    now = iter(range(0, 10**12, 123_456_789))
    with PhaseClock(ledger, subject="cycle-1", cores=2, heartbeat_s=None, now_ns=lambda: next(now)) as clock:
        for phase in ("rollout", "train", "eval"):
            with clock.phase(phase):
                pass
        clock.subject = "cycle-2"
        with clock.phase("train"):
            pass
    rows = rows_of(ledger.entries())
    assert sum(Decimal(row["BilledCost"]) for row in rows) == ledger.total_usd()
    assert sum(Decimal(row["ConsumedQuantity"]) for row in rows) == sum(each.charged for each in ledger.conservation())
    ledger.check_conservation()
    idle = [row for row in rows if row["x_Idle"] == "true"]
    assert {row["SubAccountId"] for row in idle} == {"cycle-1", "cycle-2"}, "whoever reserved pays for it"
    assert {row["x_Phase"] for row in idle} == {"idle"}


def test_a_row_says_what_the_tools_ask_for(ledger: Ledger) -> None:
    ledger.record("k", subject="cycle-1", phase="label", resource="api_input_tokens", quantity=1_500_000)
    (row,) = rows_of(ledger.entries())
    assert tuple(row) == COLUMNS
    assert all(row[name] for name in NOT_NULL)
    assert (row["BilledCost"], row["ListUnitPrice"], row["PricingUnit"]) == ("1.500000", "0.000001", "Tokens")
    assert (row["ServiceCategory"], row["SkuId"], row["BillingAccountId"]) == (
        "AI and Machine Learning",
        "api_input_tokens",
        "run",
    )
    assert row["ChargePeriodStart"] < row["ChargePeriodEnd"]
    assert row["BillingPeriodStart"].endswith("-01T00:00:00Z")
    assert row["Tags"] == '{"phase":"label","subject":"cycle-1"}'


def test_periods_are_of_the_hour_and_month_in_utc() -> None:
    entry = CostEntry(
        "k", "s", "train", "gpu_h100_s", Decimal(1), Decimal(1), Decimal(1), "book", "2026-12-31T23:59:59.500+00:00"
    )
    (row,) = rows_of((entry,))
    assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == ("2026-12-31T23:00:00Z", "2027-01-01T00:00:00Z")
    assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == ("2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z")
    assert (row["ServiceName"], row["PricingUnit"]) == ("GPU", "Seconds")


def test_an_unknown_price_is_empty_and_marked_never_zero(ledger: Ledger) -> None:
    ledger.record("a", subject="s", phase="train", resource="cpu_core_s", quantity=100)
    ledger.record("b", subject="s", phase="train", resource="quantum_s", quantity=100)
    known, unknown = rows_of(ledger.entries())
    assert (known["x_Priced"], unknown["x_Priced"]) == ("true", "false")
    assert unknown["BilledCost"] == unknown["EffectiveCost"] == unknown["ListUnitPrice"] == ""
    assert (unknown["ConsumedQuantity"], unknown["ServiceCategory"]) == ("100", "Other")
    assert cost_summary(ledger.entries()).coverage == 0.5


amounts = st.decimals(min_value=0, max_value=10**6, allow_nan=False, allow_infinity=False, places=12)


@given(st.lists(st.tuples(amounts, st.text(min_size=1, max_size=12)), min_size=1, max_size=8))
@example([(Decimal(0), "\r"), (Decimal(1), "a\nb"), (Decimal(2), '",')])
def test_no_digit_and_no_odd_name_is_lost(items: list[tuple[Decimal, str]]) -> None:
    entries = tuple(
        CostEntry(f"k{i}", name, "train", "cpu_core_s", amount, Decimal(1), amount, "b", "2026-01-01T00:00:00+00:00")
        for i, (amount, name) in enumerate(items)
    )
    rows = list(csv.DictReader(io.StringIO(focus_csv(entries, "run", {}), newline="")))
    assert [Decimal(row["BilledCost"]) for row in rows] == [amount for amount, _ in items]
    assert [row["x_IdempotencyKey"] for row in rows] == [entry.idempotency_key for entry in entries]


def test_the_list_price_stands_beside_what_was_billed(tmp_path: Path) -> None:
    book = PriceBook(prices={"gpu_h100_s": Price(usd=Decimal(2), list_usd=Decimal(3))})
    with Ledger(tmp_path / "ledger.sqlite", book) as ledger:
        ledger.record("k", subject="s", phase="train", resource="gpu_h100_s", quantity=10)
        (row,) = rows_of(ledger.entries(), ledger.price_books())
    assert (row["BilledCost"], row["ListCost"], row["ListUnitPrice"]) == ("20", "30", "3")


def test_what_a_charge_builds_on_stands_in_its_row(ledger: Ledger) -> None:
    with PhaseClock(ledger, subject="cycle-2", cores=1, heartbeat_s=None) as clock:
        clock.parents = ("run-c1-rl",)
        with clock.phase("train"):
            pass
    assert [row["x_Parents"] for row in rows_of(ledger.entries(phase="train"))] == ['["run-c1-rl"]']
