"""Suites side by side, and other models beside the versions of a run."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path

import pytest

from evergrad.config import ConfigError
from evergrad.ledger import LedgerError, OtherModels, PriceBook, Suite, suite_index

CHOICES, FREE = Suite("choices", chance=0.25), Suite("free", weight=3.0)


def test_an_index_is_the_weighted_mean_of_normalized_scores() -> None:
    scores = {"a": {"choices": 0.625, "free": 0.5}, "b": {"choices": 0.25, "free": 0.9}, "c": {"free": 0.9}}
    index = suite_index([CHOICES, FREE], scores)
    assert index.values == {"a": pytest.approx((0.5 + 3 * 0.5) / 4), "b": pytest.approx(3 * 0.9 / 4)}
    assert index.suites == ("choices", "free")
    raw = [(row["choices"] + row["free"]) / 2 for row in (scores["a"], scores["b"])]
    assert raw[0] < raw[1] < index.values["b"], "raw means would call chance progress"


def test_what_is_retired_leaves_the_index_and_gives_it_another_version() -> None:
    scores = {"a": {"choices": 1.0, "free": 0.5}}
    whole, rest = suite_index([CHOICES, FREE], scores), suite_index([CHOICES, FREE], scores, ["choices"])
    assert (rest.suites, rest.retired, rest.values) == (("free",), ("choices",), {"a": 0.5})
    assert rest.version == suite_index([FREE], scores).version != whole.version
    assert whole.version == suite_index([FREE, CHOICES], {}).version
    assert suite_index([CHOICES], scores, ["choices"]).values == {}, "nothing is left to measure progress by"


@pytest.mark.parametrize("suite", [Suite("x", chance=1.0), Suite("x", weight=0.0), Suite("x", weight=math.inf)])
def test_a_suite_without_a_scale_is_refused(suite: Suite) -> None:
    with pytest.raises(LedgerError, match="chance < ceiling"):
        suite_index([suite], {})
    with pytest.raises(LedgerError, match="not finite"):
        suite_index([FREE], {"a": {"free": math.nan}})


MODELS = """
[[models]]
name = "large"
suite = "desk@v1"
score = 0.8
used = { api_input_tokens = 3000, api_output_tokens = 200 }
source = "96 tasks, measured by hand"

[[models]]
name = "flat"
suite = "desk@v1"
score = 0.5
usd_per_attempt = 0.001
"""


def test_another_model_costs_what_it_used_at_the_books_prices(tmp_path: Path) -> None:
    path = tmp_path / "others.toml"
    path.write_text(MODELS)
    large, flat = (model.point(PriceBook.load()) for model in OtherModels.load(path).models)
    assert large.usd_per_success == (Decimal("0.003") + Decimal("0.001")) / Decimal("0.8")
    assert flat.usd_per_success == Decimal("0.002")
    assert OtherModels.load(path).models[0].point(PriceBook(prices={})).usd_per_success is None, "unpriced, not free"
    path.write_text(MODELS.replace("score = 0.5", "score = 0.0"))
    assert OtherModels.load(path).models[1].point(PriceBook.load()).usd_per_success is None, "no success to pay for"
    for wrong in ("usd_per_attempt = 0.1\n", ""):
        path.write_text(f'[[models]]\nname = "m"\nsuite = "s"\nscore = 0.5\n{wrong}' + ("used = { x = 1 }\n" if wrong else ""))
        with pytest.raises(ConfigError, match="usd_per_attempt of m"):
            OtherModels.load(path)
