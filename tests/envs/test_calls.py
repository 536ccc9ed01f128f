"""Tool calls are read strictly, and what was written is read back."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.envs import Call, Malformed, format_call, parse_reply
from evergrad.envs._calls import convert

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,11}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
VALUES = st.one_of(TEXTS, st.integers(-(10**18) + 1, 10**18 - 1), st.booleans())


@given(name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=5))
def test_what_is_formatted_is_read_back(name: str, arguments: dict[str, str | int | bool]) -> None:
    parsed = parse_reply(format_call(name, arguments))
    assert isinstance(parsed, Call)
    assert parsed.name == name
    assert list(parsed.arguments) == list(arguments)
    assert {key: convert(parsed.arguments[key], type(value)) for key, value in arguments.items()} == arguments


@given(text=st.text(max_size=200))
def test_any_text_is_a_call_an_attempt_or_an_answer_and_never_an_exception(text: str) -> None:
    parsed = parse_reply(text)
    assert parsed is None or isinstance(parsed, (Call, Malformed))


@given(name=NAMES, rest=st.text(max_size=60))
def test_what_begins_like_a_call_is_never_an_answer(name: str, rest: str) -> None:
    assert parse_reply(f"{name}({rest}") is not None


@pytest.mark.parametrize(
    "text",
    [
        "order(id=id=46)",
        "order(id=F50",
        "order(id=F50) please",
        "order(id=F50)\norder(id=F51)",
        "order(F50)",
        "order(id=)",
        "order(id=F50,)",
        "order(,)",
        "order(id=F50, id=F51)",
        "order(id='F50')",
        'order(id="F50)',
        'order(id="\\x")',
        "order(id=F50; amount=3)x",
        "order((id=F50))",
        "order(id=F\n50)",
        "order(id=" + "9" * 3_000 + ")",
    ],
)
def test_slips_are_malformed(text: str) -> None:
    parsed = parse_reply(text)
    assert isinstance(parsed, Malformed)
    assert parsed.name == "order"


@pytest.mark.parametrize(
    "text", ["", "It arrives May 3.", "order id=F50", "I call order(id=F50)", "(id=F50)", "Sorry (closed)."]
)
def test_texts_are_answers(text: str) -> None:
    assert parse_reply(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f(a=k 47)", "k 47"),
        ("f( a = k47 )", "k47"),
        (' f(a="x, (y)=\\"z\\"") ', 'x, (y)="z"'),
        ("f(a=é☂)", "é☂"),
        ("f(a=K-47)", "K-47"),
    ],
)
def test_values_are_what_is_between_the_separators(text: str, value: str) -> None:
    parsed = parse_reply(text)
    assert isinstance(parsed, Call)
    assert parsed.arguments["a"].text == value


@pytest.mark.parametrize(
    ("written", "annotation", "value"),
    [
        ("61", int, 61),
        ("-61", int, -61),
        ("61.0", int, None),
        ("6_1", int, None),
        ("٦١", int, None),
        ("0x3d", int, None),
        ('"61"', int, None),
        ('"61"', str, "61"),
        ("9" * 400, int, None),
        ("1.5", float, 1.5),
        ("nan", float, None),
        ("inf", float, None),
        ("1e999", float, None),
        ("1e2", float, 100.0),
        ("true", bool, True),
        ("True", bool, None),
        ("1", bool, None),
        ("red", Literal["red", "blue"], "red"),
        ("green", Literal["red", "blue"], None),
        ("2", Literal[1, 2], 2),
    ],
)
def test_values_fit_their_type_exactly_or_not_at_all(written: str, annotation: object, value: object) -> None:
    parsed = parse_reply(f"f(a={written})")
    assert isinstance(parsed, Call)
    converted = convert(parsed.arguments["a"], annotation)
    assert converted == value
    assert type(converted) is type(value)
