"""Tool calls in a model's own words, found from its chat template: how they look, how they are read, what a valid one is.

A template that lists tools shows by itself how the model was taught to call them: it is rendered once with a made-up tool and a
made-up call, and what stands around the call's JSON is the format. A template that shows neither has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PROBE = "zq_probe"
_ARGUMENTS = {"zq_key": "zq_value"}
_OPENING = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])(\s*)$")
_CLOSING = re.compile(r"(\s*)(</[^<>\s]+>)")


@dataclass(frozen=True)
class Call:
    """One call in a reply."""

    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True)
class CallFormat:
    """How a call is written: JSON with a name and arguments, between two marks or by itself."""

    begin: str
    """Empty where a reply that is nothing but JSON is the call."""
    end: str
    arguments: str
    """The key of the arguments."""

    def split(self, text: str, names: Sequence[str]) -> tuple[str, list[Call]]:
        """A reply's plain text, and the calls in it. What is no whole call of a known tool stays text."""
        if not self.begin:
            call = self._read(text.strip(), names)
            return (text, []) if call is None else ("", [call])
        calls: list[Call] = []
        plain: list[str] = []
        mark, close = self.begin.strip(), self.end.strip()
        head, *pieces = text.split(mark)
        plain.append(head)
        for piece in pieces:
            inside, _, after = piece.partition(close) if close else (piece, "", "")
            call = self._read(inside.strip(), names)
            if call is None:
                plain.append(mark + piece)
            else:
                calls.append(call)
                plain.append(after)
        said = "".join(plain)
        return (said.strip() if calls else said), calls

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, needed: bool, several: bool) -> str | None:
        """What a reply must follow, in llguidance's Lark dialect; None where nothing can be said before it is read.

        Args:
            needed: The reply is one call at least; else it may be all text, and only calls in it are held to the schema.
            several: There may be more than one call.
        """
        calls = json.dumps({"anyOf": [self._schema(tool["function"]) for tool in tools]})
        if needed:
            more = '("\\n" call)*' if several and self.begin else ""
            return f"start: call {more}\ncall: {_text(self.begin)} %json {calls} {_text(self.end)}\n"
        if not self.begin:
            return None
        mark, rest = self.begin.strip(), self.begin[len(self.begin.strip()) :]
        times = "*" if several else "?"
        return (
            f"start: call{times} TEXT\nTEXT: /(.|\\n)*/\nopening[lazy]: TEXT {_text(mark)}\n"
            f"call: opening {_text(rest)} %json {calls} {_text(self.end)}\n"
        )

    def _schema(self, function: Mapping[str, Any]) -> dict[str, Any]:
        # Properties come in the order in which they stand here: the model was taught to say the name first.
        arguments = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def _read(self, text: str, names: Sequence[str]) -> Call | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") not in names:
            return None
        arguments = found.get(self.arguments, {})
        return Call(str(found["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))


def find_format(render: Callable[..., str]) -> CallFormat | None:
    """The format of a template's calls, or None where it lists no tools or writes calls in no format that is known here.

    Args:
        render: ``(messages, tools, add_generation_prompt)`` to text; may raise anything.
    """
    parameters = {"type": "object", "properties": {"zq_key": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": _PROBE, "description": "probe", "parameters": parameters}}
    call = {"id": "call00001", "type": "function", "function": {"name": _PROBE, "arguments": _ARGUMENTS}}
    asks = {"role": "user", "content": "hi"}
    try:
        if _PROBE not in render([asks], [tool], True):
            return None
        said = render([asks, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool], False)
    except Exception:
        return None
    return _around(said)


def _around(text: str) -> CallFormat | None:
    decoder = json.JSONDecoder()
    # The last one: those before are the list of tools, or an example of the template's own.
    for at in reversed([found.start() for found in re.finditer(r"\{", text)]):
        try:
            found, end = decoder.raw_decode(text, at)
        except ValueError:
            continue
        if not isinstance(found, dict) or found.get("name") != _PROBE:
            continue
        for key in ("arguments", "parameters"):
            if found.get(key) == _ARGUMENTS and found.keys() == {"name", key}:
                opening, closing = _OPENING.search(text[:at]), _CLOSING.match(text[end:])
                if opening is None or closing is None or opening[1].startswith("<|"):
                    return CallFormat("", "", key)
                return CallFormat(opening[1] + opening[2], closing[1] + closing[2], key)
    return None


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
