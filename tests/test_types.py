"""What every room builds on: examples that are true, and JSON that every strict parser reads."""

from __future__ import annotations

import doctest
import json
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evergrad.evals.evaluation
import evergrad.evals.statistics
import evergrad.ledger.clock
import evergrad.ledger.metrics
import evergrad.ledger.prices
import evergrad.registry.store
import evergrad.rollouts.advantages.generalized
import evergrad.rollouts.advantages.leave_one_out
import evergrad.rollouts.advantages.overlong
import evergrad.types
from evergrad.types import EvalReport, Outcome, Usage, Verdict, plain, strict_json


@pytest.mark.parametrize(
    "module",
    [
        evergrad.types,
        evergrad.registry.store,
        sys.modules["evergrad.rollouts.advantages.generalized"],
        sys.modules["evergrad.rollouts.advantages.leave_one_out"],
        sys.modules["evergrad.rollouts.advantages.overlong"],
        evergrad.ledger.clock,
        evergrad.ledger.metrics,
        evergrad.ledger.prices,
        evergrad.evals.evaluation,
        evergrad.evals.statistics,
    ],
)
def test_examples_in_docstrings_are_true(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.decimals(allow_nan=True)
    | st.sampled_from(Outcome),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner) | st.builds(Verdict, st.booleans(), inner)
    ),
    max_leaves=20,
)


@given(values)
def test_any_value_becomes_strict_json_that_reads_back_as_its_plain_form(value: Any) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(strict_json(value), parse_constant=refuse) == plain(value)
    assert plain(plain(value)) == plain(value)


def test_what_is_not_finite_keeps_its_name_and_money_its_digits() -> None:
    assert plain([math.nan, math.inf, -math.inf, 0.1]) == ["NaN", "Infinity", "-Infinity", 0.1]
    assert plain(Decimal("0.10")) == "0.10"
    assert plain(Path("runs/demo")) == "runs/demo"
    assert plain({3, 1, 2}) == [1, 2, 3]
    assert plain(EvalReport("v", "s", {"t": 1.0}, "h"))["usage"] == plain(Usage())


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON form for object"):
        strict_json({"x": object()})
