"""Price books: what one unit of each resource costs, by whose word, and as of when."""

from __future__ import annotations

import hashlib
import importlib.resources
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field

from evergrad.config import Config, load_config
from evergrad.types import EvergradError, strict_json

EXACT = Context(prec=60, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero])
"""Sums and products of money: no digit is ever dropped; what would not fit raises."""

View = Literal["billed", "list", "marginal"]
"""``billed``: what is paid. ``list``: what it would cost without a discount. ``marginal``: what more of it costs, where part of
it is paid for anyway, such as a reserved machine's idle hours."""

_ROUNDING = Context(prec=50)
_SMALLEST_UNIT_PRICE = Decimal("1e-24")


class LedgerError(EvergradError):
    """An entry, price book or reservation that the ledger cannot accept."""


class Price(Config):
    """What a resource costs.

    >>> Price(usd=Decimal("3"), per=Decimal("3600")).unit_price().quantize(Decimal("1e-9"))
    Decimal('0.000833333')
    """

    usd: Decimal = Field(ge=0, allow_inf_nan=False)
    """Dollars for ``per`` units."""
    per: Decimal = Field(Decimal(1), gt=0, allow_inf_nan=False)
    """Units that ``usd`` buys."""
    list_usd: Decimal | None = Field(None, ge=0, allow_inf_nan=False)
    """Dollars for ``per`` units at the list price, where ``usd`` is a discounted one; the same as ``usd`` when absent."""
    marginal_usd: Decimal | None = Field(None, ge=0, allow_inf_nan=False)
    """Dollars for ``per`` more units of what is paid for anyway, such as 0 for a reserved machine; ``usd`` when absent."""
    as_of: str = ""
    """Date of the source, ISO 8601."""
    source: str = ""
    """Where the figure comes from: an invoice, a list, an assumption."""

    def unit_price(self, view: View = "billed") -> Decimal:
        """Dollars for one unit, rounded once to 24 places; from there on all arithmetic is exact."""
        shown = {"billed": self.usd, "list": self.list_usd, "marginal": self.marginal_usd}[view]
        usd = self.usd if shown is None else shown
        return _ROUNDING.divide(usd, self.per).quantize(_SMALLEST_UNIT_PRICE, context=_ROUNDING).normalize(_ROUNDING)


class PriceBook(Config):
    """Prices by resource name. A resource that is not in the book has no price, which is not a price of zero."""

    version: str = ""
    """What its keeper calls this state of it, such as ``2026-06``. Entries go by the book's hash, whatever its version says."""
    currency: Literal["USD"] = "USD"
    prices: dict[str, Price]

    @classmethod
    def load(cls, path: Path | None = None) -> PriceBook:
        """The book in a TOML file; without one, the book that comes with the package.

        Raises:
            ConfigError: missing file, bad TOML, unknown key, or a price that is negative or not finite.
        """
        if path is not None:
            return load_config(cls, path)
        with importlib.resources.as_file(importlib.resources.files("evergrad.ledger") / "default_prices.toml") as built_in:
            return load_config(cls, built_in)

    @cached_property
    def hash(self) -> str:
        """Names the prices alone: equal for two books that price everything equally, whatever their sources say."""
        prices = {name: str(price.unit_price()) for name, price in self.prices.items()}
        views: tuple[View, ...] = ("list", "marginal")
        for view in views:
            others = {name: str(price.unit_price(view)) for name, price in self.prices.items()}
            prices |= {f"{name} ({view})": usd for name, usd in others.items() if usd != prices[name]}
        return hashlib.sha256(strict_json({"currency": self.currency, "prices": prices}).encode()).hexdigest()[:16]

    def unit_price(self, resource: str, view: View = "billed") -> Decimal | None:
        """Dollars for one unit of ``resource``; ``None`` when the book does not know it."""
        price = self.prices.get(resource)
        return None if price is None else price.unit_price(view)

    def cost(self, resource: str, quantity: Decimal, view: View = "billed") -> Decimal | None:
        """Dollars for ``quantity`` units, to the last digit; ``None`` when unpriced."""
        unit_price = self.unit_price(resource, view)
        return None if unit_price is None else EXACT.multiply(quantity, unit_price)
