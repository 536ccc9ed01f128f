"""The ledger as a FOCUS table (FinOps Open Cost and Usage Specification 1.2), for the tools that read cloud bills.

One row per cost entry, idle time included, so that the column BilledCost sums up to the ledger. What the specification has
no column for stands in columns of ours, which begin with ``x_`` as it asks.

One departure: BilledCost and its like are empty where a price is unknown. The specification wants a number there, and the
only number at hand would be 0, which would be wrong. ``x_Priced`` says which rows those are.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from evergrad.ledger.clock import IDLE
from evergrad.ledger.prices import PriceBook
from evergrad.ledger.store import in_view
from evergrad.types import CostEntry, strict_json

PROVIDER = "Evergrad"

_UNITS = (
    ("_tokens", "Tokens"),
    ("_gb_month", "GB-Months"),
    ("_gb", "GB"),
    ("_core_s", "Core-Seconds"),
    ("_joule", "Joules"),
    ("_s", "Seconds"),
)
"""Endings of resource names, and the unit that they are counted in."""
_CATEGORIES = (
    ("api_", "AI and Machine Learning", "Model API"),
    ("cpu_", "Compute", "CPU"),
    ("gpu_", "Compute", "GPU"),
    ("sandbox_", "Compute", "Sandbox"),
    ("storage_", "Storage", "Storage"),
    ("egress_", "Networking", "Egress"),
)
"""Beginnings of resource names; the specification's ServiceCategory, and a ServiceName."""

COLUMNS = (
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ResourceId",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SubAccountId",
    "Tags",
    "x_IdempotencyKey",
    "x_Idle",
    "x_Parents",
    "x_Phase",
    "x_PriceBook",
    "x_Priced",
    "x_Subject",
)


def focus_csv(entries: Iterable[CostEntry], account: str, books: Mapping[str, PriceBook]) -> str:
    """``entries`` as a FOCUS table in CSV, with a header; decimals keep every digit.

    Args:
        entries: Of one ledger, or of several.
        account: BillingAccountId of all rows, such as the run's name.
        books: Price books by hash, for the list prices; an entry of another book is listed at what was billed.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)  # ends lines as RFC 4180 has it; with "\n" it would leave a name's "\r" unquoted
    writer.writeheader()
    writer.writerows(focus_rows(entries, account, books))
    return text.getvalue()


def focus_rows(entries: Iterable[CostEntry], account: str, books: Mapping[str, PriceBook]) -> Iterator[dict[str, str]]:
    """One row per entry, by column name; empty where there is no value."""
    for entry in entries:
        hour = _time(entry.at).replace(minute=0, second=0, microsecond=0)
        month = hour.replace(day=1, hour=0)
        usd, unit_price, unit = _digits(entry.usd), _digits(entry.unit_price), _unit(entry.resource)
        category, service = _service(entry.resource)
        listed = in_view([entry], books, "list")[0] if entry.price_book in books else entry
        yield dict.fromkeys(COLUMNS, "") | {
            "BilledCost": usd,
            "BillingAccountId": account,
            "BillingAccountName": account,
            "BillingCurrency": "USD",
            "BillingPeriodStart": _stamp(month),
            "BillingPeriodEnd": _stamp((month + datetime.timedelta(days=32)).replace(day=1)),
            "ChargeCategory": "Usage",
            "ChargeDescription": f"{entry.resource} for {entry.phase} of {entry.subject}",
            "ChargeFrequency": "Usage-Based",
            # An entry knows when it was made; the specification's finest period is the hour.
            "ChargePeriodStart": _stamp(hour),
            "ChargePeriodEnd": _stamp(hour + datetime.timedelta(hours=1)),
            "ConsumedQuantity": _digits(entry.quantity),
            "ConsumedUnit": unit,
            "ContractedCost": usd,
            "ContractedUnitPrice": unit_price,
            "EffectiveCost": usd,
            "InvoiceIssuerName": PROVIDER,
            "ListCost": _digits(listed.usd),
            "ListUnitPrice": _digits(listed.unit_price),
            "PricingCategory": "Standard",
            "PricingQuantity": _digits(entry.quantity),
            "PricingUnit": unit,
            "ProviderName": PROVIDER,
            "PublisherName": PROVIDER,
            "ResourceId": entry.resource,
            "ServiceCategory": category,
            "ServiceName": service,
            "SkuId": entry.resource,
            "SubAccountId": entry.subject,
            "Tags": strict_json({"phase": entry.phase, "subject": entry.subject}),
            "x_IdempotencyKey": entry.idempotency_key,
            "x_Idle": str(entry.phase == IDLE).lower(),
            "x_Parents": strict_json(entry.metadata.get("parents", [])),
            "x_Phase": entry.phase,
            "x_PriceBook": entry.price_book,
            "x_Priced": str(entry.usd is not None).lower(),
            "x_Subject": entry.subject,
        }


def _digits(amount: Decimal | None) -> str:
    return "" if amount is None else f"{amount:f}"


def _time(at: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(at).astimezone(datetime.UTC)


def _stamp(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _unit(resource: str) -> str:
    return next((unit for ending, unit in _UNITS if resource.endswith(ending)), "Units")


def _service(resource: str) -> tuple[str, str]:
    return next(((category, name) for start, category, name in _CATEGORIES if resource.startswith(start)), ("Other", "Other"))
