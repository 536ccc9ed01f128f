"""From a line's JSON object to a :class:`Row`: every rule about keys, roles and values, and none about tokens.

The formats are those that other trainers and services take (OpenAI's and Together's chat and preference files, TRL's
prompt/completion and prompt/chosen/rejected), so that a file that works there works here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evergrad.config import nearest
from evergrad.training.data.problems import Problem, shown
from evergrad.training.data.tokens import Tokens, read_tokens

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_KEYS = ("role", "content", "weight", "tool_calls", "tool_call_id", "name", "reasoning_content")
_NOTES = ("id", "metadata")
"""Keys that every format allows and nothing reads: a place for what belongs to the row and not to its training."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that go through the model's chat template.

    >>> said = Conversation(({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}), (0.0, 1.0))
    >>> said.trained
    (1,)
    """

    messages: tuple[Mapping[str, Any], ...]
    """As templates take them: ``content`` is text, the arguments of tool calls are objects, ``weight`` is gone."""
    weights: tuple[float, ...]
    """One a message: what its tokens count in the loss, 0 for those that are context."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas as OpenAI's ``tools`` has them."""

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the messages that carry a loss."""
        return tuple(number for number, weight in enumerate(self.weights) if weight)


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is taken as it is, without a template; ``completion`` is trained, ``prompt`` (possibly empty) is context."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the first preferred; both hold the prompt."""

    chosen: Conversation | Text
    rejected: Conversation | Text


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a data file."""

    line: int
    content: Conversation | Text | Tokens | Pair


class _Finder:
    """Collects what is wrong with one line."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.problems: list[Problem] = []

    def note(self, field: str, what: str, value: Any, fix: str) -> None:
        self.problems.append(Problem(self.line, field, what, "" if value is _NOTHING else shown(value), fix))


_NOTHING = object()


def detect(data: Mapping[str, Any]) -> str | None:
    """The format whose required keys ``data`` has; ``None`` when there is none or more than one.

    >>> detect({"messages": []}), detect({"prompt": "a", "chosen": "b", "rejected": "c"}), detect({"question": "a"})
    ('chat', 'preference', None)
    """
    found = [name for name, form in FORMATS.items() if all(key in data for key in form.required)]
    return found[0] if len(found) == 1 else None


def parse(line: int, data: Mapping[str, Any], form: str) -> tuple[Row | None, tuple[Problem, ...]]:
    """The row that ``data`` holds under a format, or all that is wrong with it."""
    finder = _Finder(line)
    known = FORMATS[form]
    allowed = (*known.required, *known.optional, *_NOTES)
    for key in data:
        if key not in allowed:
            fix = f"{nearest(key, allowed)} What belongs to no training may stand under 'metadata'"
            finder.note(key, f"unknown key of format '{form}'", data[key], fix)
    for key in known.required:
        if key not in data:
            finder.note(key, f"missing key of format '{form}'", _NOTHING, f"a row has {', '.join(known.required)}")
    if finder.problems:
        return None, tuple(finder.problems)
    content = known.read(finder, data)
    if finder.problems or content is None:
        return None, tuple(finder.problems)
    return Row(line, content), ()


# ── The formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Format:
    """One way of writing a row."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[_Finder, Mapping[str, Any]], Conversation | Text | Tokens | Pair | None]


def _read_chat(finder: _Finder, data: Mapping[str, Any]) -> Conversation | None:
    messages = _messages(finder, "messages", data["messages"])
    tools = _tools(finder, data.get("tools"))
    weights = _weights(finder, data["messages"]) if messages else ()
    if not finder.problems and not any(weights):
        finder.note(
            "messages", "no assistant message with a weight above 0: nothing to train", _NOTHING, "add one, or drop the row"
        )
    return None if finder.problems else Conversation(messages, weights, tools)


def _read_prompt_completion(finder: _Finder, data: Mapping[str, Any]) -> Conversation | Text | None:
    return _answered(finder, data["prompt"], "completion", data["completion"], _tools(finder, data.get("tools")))


def _read_text(finder: _Finder, data: Mapping[str, Any]) -> Text | None:
    text = _string(finder, "text", data["text"])
    return Text("", text) if text else None


def _read_preference(finder: _Finder, data: Mapping[str, Any]) -> Pair | None:
    tools = _tools(finder, data.get("tools"))
    chosen = _answered(finder, data["prompt"], "chosen", data["chosen"], tools)
    rejected = _answered(finder, data["prompt"], "rejected", data["rejected"], tools)
    return _pair(finder, chosen, rejected, "rejected", data["rejected"])


def _read_preference_openai(finder: _Finder, data: Mapping[str, Any]) -> Pair | None:
    given = data["input"]
    if not isinstance(given, Mapping) or "messages" not in given:
        finder.note("input", "must be an object with messages", given, 'write {"messages": […]}')
        return None
    for key in given:
        if key not in ("messages", "tools", "parallel_tool_calls"):
            finder.note(f"input.{key}", "unknown key", given[key], nearest(key, ("messages", "tools", "parallel_tool_calls")))
    tools = _tools(finder, given.get("tools"), "input.tools")
    answers = []
    for key in ("preferred_output", "non_preferred_output"):
        if not isinstance(data[key], list) or len(data[key]) != 1:
            finder.note(
                key, "must be a list of one assistant message", data[key], 'write [{"role": "assistant", "content": …}]'
            )
        else:
            answers.append(_answered(finder, given["messages"], key, data[key], tools, "input.messages"))
    if len(answers) < 2:
        return None
    return _pair(finder, answers[0], answers[1], "non_preferred_output", data["non_preferred_output"])


FORMATS: dict[str, Format] = {
    "chat": Format(("messages",), ("tools", "parallel_tool_calls"), _read_chat),
    "prompt_completion": Format(("prompt", "completion"), ("tools",), _read_prompt_completion),
    "text": Format(("text",), (), _read_text),
    "tokens": Format(("input_ids",), ("labels", "attention_mask", "position_ids"), read_tokens),
    "preference": Format(("prompt", "chosen", "rejected"), ("tools",), _read_preference),
    "preference_openai": Format(("input", "preferred_output", "non_preferred_output"), (), _read_preference_openai),
}
PREFERENCES = ("preference", "preference_openai")


# ── Parts of a row ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _answered(
    finder: _Finder,
    prompt: Any,
    field: str,
    answer: Any,
    tools: tuple[Mapping[str, Any], ...],
    prompt_field: str = "prompt",
) -> Conversation | Text | None:
    """A prompt and its answer: both text, or both messages (the assistant's alone are trained)."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if tools:
            finder.note("tools", "tools go with messages, and the prompt is text", _NOTHING, "write the prompt as messages")
        said = _string(finder, field, answer)
        asked = _string(finder, prompt_field, prompt, empty=True)
        return None if finder.problems or said is None or asked is None else Text(asked, said)
    if isinstance(prompt, str):
        finder.note(field, "must be text as the prompt is", answer, f"write '{prompt_field}' and '{field}' alike")
        return None
    if not isinstance(prompt, list):
        finder.note(prompt_field, "must be text, or a list of messages", prompt, f"write '{prompt_field}' and '{field}' alike")
        return None
    if not isinstance(answer, list):
        finder.note(field, "must be a list of messages as the prompt is", answer, 'write [{"role": "assistant", "content": …}]')
        return None
    before, after = _messages(finder, prompt_field, prompt), _messages(finder, field, answer)
    if finder.problems:
        return None
    if before[-1]["role"] == "assistant":
        finder.note(
            f"{prompt_field}[{len(before) - 1}].role",
            "the prompt ends with the assistant",
            "assistant",
            "end it with what is answered",
        )
    weights = _weights(finder, answer, field)
    if not any(weights):
        finder.note(field, "no assistant message to train", answer, "give the answer the role 'assistant'")
    return None if finder.problems else Conversation((*before, *after), ((0.0,) * len(before)) + weights, tools)


def _pair(
    finder: _Finder, chosen: Conversation | Text | None, rejected: Conversation | Text | None, field: str, value: Any
) -> Pair | None:
    if finder.problems or chosen is None or rejected is None:
        return None
    weights = [each.weights for each in (chosen, rejected) if isinstance(each, Conversation)]
    odd = [weight for each in weights for weight in each if weight not in (0.0, 1.0)]
    if odd:
        finder.note("weight", "answers of a pair are compared whole: a weight is 0 or 1", odd[0], "remove it")
        return None
    if chosen == rejected:
        finder.note(field, "both answers are the same: nothing is preferred", value, "drop the row, or give another answer")
        return None
    return Pair(chosen, rejected)


def _string(finder: _Finder, field: str, value: Any, *, empty: bool = False) -> str | None:
    if not isinstance(value, str):
        finder.note(field, "must be text", value, "write a string")
    elif not empty and not value.strip():
        finder.note(field, "is empty: nothing to train", value, "fill it, or drop the row")
    else:
        return value
    return None


def _messages(finder: _Finder, field: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        finder.note(field, "must be a list of messages, not empty", value, 'write [{"role": "user", "content": …}, …]')
        return ()
    known_calls: set[str] = set()
    return tuple(_message(finder, f"{field}[{number}]", message, known_calls) for number, message in enumerate(value))


def _message(finder: _Finder, field: str, message: Any, known_calls: set[str]) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        finder.note(field, "must be an object with role and content", message, 'write {"role": "user", "content": …}')
        return {}
    for key in message:
        if key not in _MESSAGE_KEYS:
            finder.note(f"{field}.{key}", "unknown key of a message", message[key], nearest(key, _MESSAGE_KEYS))
    role = message.get("role")
    if role not in ROLES:
        hint = "the role of a tool's answer is 'tool'" if role == "function" else nearest(str(role), ROLES)
        finder.note(f"{field}.role", "no role of a message", role, hint)
    calls = _tool_calls(finder, f"{field}.tool_calls", message.get("tool_calls"), role, known_calls)
    made: dict[str, Any] = {"role": role, "content": _content(finder, f"{field}.content", message, role)}
    if calls:
        made["tool_calls"] = calls
    for key in ("name", "reasoning_content"):
        if message.get(key) is not None:
            made[key] = _string(finder, f"{field}.{key}", message[key])
    if "reasoning_content" in made and role != "assistant":
        finder.note(f"{field}.reasoning_content", "only the assistant reasons", made["reasoning_content"], "remove it")
    answers = message.get("tool_call_id")
    if answers is not None:
        made["tool_call_id"] = answers
        if answers not in known_calls:
            fix = nearest(str(answers), known_calls) if known_calls else "no call before it has an id"
            finder.note(f"{field}.tool_call_id", "answers no tool call before it", answers, fix)
    return made


def _content(finder: _Finder, field: str, message: Mapping[str, Any], role: Any) -> str:
    value = message.get("content")
    if value is None and role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content")):
        return ""
    if isinstance(value, list):
        return _parts(finder, field, value)
    if not isinstance(value, str):
        fix = "write a string" if "content" in message else "add it"
        finder.note(field, "must be text", value if "content" in message else _NOTHING, fix)
        return ""
    if role == "assistant" and not value.strip() and not message.get("tool_calls") and message.get("weight") != 0:
        finder.note(field, "the assistant says nothing here", value, "fill it, drop the message, or give it weight 0")
    return value


def _parts(finder: _Finder, field: str, parts: Sequence[Any]) -> str:
    """OpenAI's list of content parts, of which only text is trained here."""
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            finder.note(
                f"{field}[{number}]", "only parts of type 'text' are trained here", part, "remove the part, or drop the row"
            )
    return "".join(texts)


def _weights(finder: _Finder, messages: Sequence[Any], field: str = "messages") -> tuple[float, ...]:
    """What each message counts: 1 for the assistant's unless its ``weight`` says otherwise, 0 for all others."""
    weights = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        assistant, value = message.get("role") == "assistant", message.get("weight")
        if value is None:
            weights.append(float(assistant))
            continue
        where = f"{field}[{number}].weight"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            finder.note(where, "must be a number of 0 or more", value, "0 leaves the message out of the loss, 1 trains it")
        elif value and not assistant:
            finder.note(where, f"messages of the role {message.get('role')!r} are not trained", value, "remove it, or set 0")
        else:
            weights.append(float(value))
    return tuple(weights)


def _tools(finder: _Finder, tools: Any, field: str = "tools") -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        finder.note(field, "must be a list of tools", tools, 'write [{"type": "function", "function": {"name": …}}]')
        return ()
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or tool.get("type") != "function":
            fix = 'write {"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
            finder.note(f"{field}[{number}]", "is no tool", tool, fix)
    return tuple(tools)


def _tool_calls(finder: _Finder, field: str, calls: Any, role: Any, known_calls: set[str]) -> list[dict[str, Any]]:
    """The calls with their arguments as objects, which is what templates write out."""
    if calls is None:
        return []
    if role != "assistant":
        finder.note(field, "only the assistant calls tools", calls, "move it to the assistant's message")
    if not isinstance(calls, list) or not calls:
        finder.note(field, "must be a list of calls, not empty", calls, "remove it, or fill it")
        return []
    made = []
    for number, call in enumerate(calls):
        here = f"{field}[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            finder.note(
                here, "is no tool call", call, 'write {"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
            )
            continue
        if isinstance(call.get("id"), str):
            known_calls.add(call["id"])
        arguments = _arguments(finder, f"{here}.function.arguments", function.get("arguments"))
        made.append({**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return made


def _arguments(finder: _Finder, field: str, value: Any) -> Mapping[str, Any]:
    """OpenAI writes them as JSON in a string; an object is taken as well."""
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except ValueError:
            read = None
    if isinstance(read, Mapping):
        return read
    finder.note(field, "must be a JSON object, or one in a string", value, 'write "{\\"name\\": \\"value\\"}"')
    return {}
