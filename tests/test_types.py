"""What every room builds on: JSON that every strict parser reads."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.types import EvalReport, Outcome, Usage, Verdict, plain, strict_json

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
