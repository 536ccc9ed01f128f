"""Other models on the same suite, as somebody measured them: points to compare the versions of a run with."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from pydantic import Field, model_validator

from evergrad.config import Config, load_config
from evergrad.ledger.frontier import Point
from evergrad.ledger.prices import PriceBook


class OtherModel(Config):
    """One model of others: what it scored, and what an attempt used."""

    name: str
    suite: str
    """As reports name it, such as ``support_desk@v1``."""
    score: float = Field(ge=0, le=1, allow_inf_nan=False)
    """Share of attempts that succeed."""
    usd_per_attempt: Decimal | None = Field(None, ge=0, allow_inf_nan=False)
    """What an attempt cost on average, where that is known; otherwise it is priced by what it used."""
    used: dict[str, Decimal] = Field(default_factory=dict)
    """Quantities of an average attempt by resource of the price book, such as ``api_output_tokens = 350``."""
    as_of: str = ""
    source: str = ""
    """Who measured it, and how."""

    @model_validator(mode="after")
    def _one_cost(self) -> OtherModel:
        if (self.usd_per_attempt is None) == (not self.used):
            raise ValueError(f"give usd_per_attempt of {self.name}, or what an attempt used, and not both")
        return self

    def point(self, book: PriceBook) -> Point:
        """Score against cost per success at the prices of ``book``; without a cost where it lacks one, or without a success."""
        costs = [book.cost(resource, quantity) for resource, quantity in self.used.items()]
        usd = self.usd_per_attempt
        if usd is None and None not in costs:
            usd = sum((cost for cost in costs if cost is not None), Decimal(0))
        return Point(self.name, self.score, None if usd is None or self.score == 0 else usd / Decimal(str(self.score)))


class OtherModels(Config):
    """A TOML file of ``[[models]]``."""

    models: list[OtherModel]

    @classmethod
    def load(cls, path: Path) -> OtherModels:
        """
        Raises:
            ConfigError: missing file, bad TOML, unknown key, or a model without a cost.
        """
        return load_config(cls, path)
