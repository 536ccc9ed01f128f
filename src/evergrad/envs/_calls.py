"""How a model writes a tool call, and how strictly it is read.

A reply is one of three things: a tool call ``name(arg=value, other="quoted value")``, an attempt at one that does not parse,
or text. Whatever begins like a call (a name and an opening bracket) and does not end as a whole, well-formed one is an
attempt, never an answer, so that a slip can be told to the model instead of ending its rollout.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

MAX_CALL_CHARACTERS = 2_000
"""A longer attempt is malformed unread; keeps parsing linear and cheap whatever the model writes."""

Value = str | int | float | bool

_ATTEMPT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\(")
_ARGUMENT = re.compile(
    r"""\ *([A-Za-z_][A-Za-z0-9_]*)\ *=\ *        # name =
        (?: "((?:[^"\\\x00-\x1f]|\\.)*)"\ *       # a JSON string
          | ([^\s,()="'\\][^,()="'\\\x00-\x1f]*)  # or bare: no separators, quotes or control characters
        )(,|\Z)""",
    re.VERBOSE,
)
_BARE = re.compile(r"""[^\s,()="'\\\x00-\x1f](?:[^,()="'\\\x00-\x1f]*[^\s,()="'\\\x00-\x1f])?""")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Argument:
    """One value as written; ``quoted`` values are strings and nothing else."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A well-formed tool call, not yet checked against any tool.

    >>> parse_reply("refund(id=F50, amount=61)").arguments["amount"].text
    '61'
    """

    name: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Malformed:
    """An attempt at a call that does not parse; ``name`` is what stood before the bracket."""

    name: str
    reason: str


def parse_reply(text: str) -> Call | Malformed | None:
    """Reads a reply; ``None`` when it is no attempt at a call, hence the final answer.

    >>> parse_reply("order(id=id=46)")
    Malformed(name='order', reason='arguments are not name=value')
    >>> parse_reply("Refunded, ref 993.") is None
    True
    """
    text = text.strip()
    attempt = _ATTEMPT.match(text)
    if attempt is None:
        return None
    name = attempt.group()[:-1]
    if len(text) > MAX_CALL_CHARACTERS:
        return Malformed(name, "too long")
    if not text.endswith(")"):
        return Malformed(name, "no closing bracket at the end")
    return _parse_arguments(name, text[attempt.end() : -1])


def _parse_arguments(name: str, body: str) -> Call | Malformed:
    arguments: dict[str, Argument] = {}
    position = 0
    while body.strip(" "):
        match = _ARGUMENT.match(body, position)
        if match is None:
            return Malformed(name, "arguments are not name=value")
        key, quoted, bare, separator = match.groups()
        if key in arguments:
            return Malformed(name, f"{key} given twice")
        if bare is not None:
            arguments[key] = Argument(bare.rstrip())
        else:
            try:
                arguments[key] = Argument(json.loads(f'"{quoted}"'), quoted=True)
            except ValueError:
                return Malformed(name, f"{key} is not a valid quoted string")
        if not separator:
            break
        position = match.end()
    return Call(name, arguments)


def format_call(name: str, arguments: Mapping[str, Value]) -> str:
    """Writes a call so that :func:`parse_reply` reads the same values back.

    >>> format_call("refund", {"id": "F50", "amount": 61, "note": "late, again"})
    'refund(id=F50, amount=61, note="late, again")'
    """
    return f"{name}({', '.join(f'{key}={_format_value(value)}' for key, value in arguments.items())})"


def _format_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return value if _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def convert(argument: Argument, annotation: Any) -> Value | None:
    """The argument as the annotated type, or ``None`` when it does not fit.

    >>> convert(Argument("61"), int), convert(Argument("sixty"), int), convert(Argument("61", quoted=True), int)
    (61, None, None)
    """
    text = argument.text
    if annotation is str:
        return text
    if get_origin(annotation) is Literal:
        return next((choice for choice in get_args(annotation) if str(choice) == text), None)
    if argument.quoted:
        return None
    if annotation is bool:
        return {"true": True, "false": False}.get(text)
    if annotation is int:
        return int(text) if _INTEGER.fullmatch(text) else None
    if annotation is float and _NUMBER.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else None
    return None


def type_name(annotation: Any) -> str | None:
    """What a tool contract calls an annotation, or ``None`` when no call could carry such a value."""
    if annotation in (str, int, float, bool):
        return str(annotation.__name__)
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    return None
