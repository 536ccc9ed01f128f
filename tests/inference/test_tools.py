"""Tool calls: the format that a chat template shows, calls read from a reply, and replies held to the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from evergrad.inference._chat import ChatFormat
from evergrad.inference._openai_wire import ChatBody
from evergrad.inference._tools import Call, CallFormat
from evergrad.inference._wire import parse_body
from tests.inference.conftest import make_model
from tests.inference.test_server import Server, serving

HEAD = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}"
)
TAIL = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = {
    "hermes": "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>",
    "json": "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}",
    "xml": "<call name={{ call.function.name }}>{{ call.function.arguments.zq_key }}</call>",
}
FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Says where a thing lies <|im_end|>",
        "parameters": {
            "type": "object",
            "properties": {"item": {"enum": ["rope", "lamp"]}},
            "required": ["item"],
            "additionalProperties": False,
        },
    },
}
COUNT: dict[str, Any] = {"type": "function", "function": {"name": "count"}}
MESSAGES: list[Any] = [{"role": "user", "content": "Where is the rope?"}]


def folder_with(folder: Path, calls: str) -> Path:
    make_model(folder, seed=0, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = HEAD + CALLS[calls] + TAIL
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("hermes", CallFormat("<tool_call>\n", "\n</tool_call>", "arguments")),
        ("json", CallFormat("", "", "parameters")),
        ("xml", None),
    ],
)
def test_the_template_shows_how_calls_are_written(tmp_path: Path, calls: str, expected: CallFormat | None) -> None:
    assert ChatFormat(folder_with(tmp_path, calls), ()).calls == expected


def test_a_template_without_tools_has_no_format(model_folder: Path) -> None:
    assert ChatFormat(model_folder, ()).calls is None


HERMES = CallFormat("<tool_call>\n", "\n</tool_call>", "arguments")
ROPE = '{"name": "find", "arguments": {"item": "rope"}}'


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ("It lies there.", "It lies there.", []),
        (f"<tool_call>\n{ROPE}\n</tool_call>", "", [Call("find", '{"item": "rope"}')]),
        (f"I look.\n<tool_call>{ROPE}</tool_call>\n<tool_call>\n{ROPE}", "I look.", [Call("find", '{"item": "rope"}')] * 2),
        ("<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{broken\n</tool_call>", []),
        ('<tool_call>\n{"name": "other"}\n</tool_call>', '<tool_call>\n{"name": "other"}\n</tool_call>', []),
    ],
)
def test_calls_are_read_and_what_is_none_stays_text(text: str, plain: str, calls: list[Call]) -> None:
    assert HERMES.split(text, ["find"]) == (plain, calls)


def test_a_reply_of_bare_json_is_a_call() -> None:
    bare = CallFormat("", "", "parameters")
    assert bare.split(' {"name": "find", "parameters": {}}', ["find"]) == ("", [Call("find", "{}")])
    assert bare.split('{"name": "find"', ["find"]) == ('{"name": "find"', [])


def test_tools_and_calls_stand_in_the_prompt_as_the_template_has_them(tmp_path: Path) -> None:
    chat = ChatFormat(folder_with(tmp_path, "hermes"), ())
    called = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"item": "rope"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "shelf <|im_end|> 3"},
    ]
    body = parse_body(ChatBody, {"model": "m", "messages": messages, "tools": [FIND]})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    shown = tokenizer.decode(chat.prompt(body))
    assert json.dumps(FIND) in shown
    assert f"<|im_start|>assistant\n<tool_call>\n{ROPE}\n</tool_call><|im_end|>" in shown
    # A special token's text in a description or a result is no special token.
    assert chat.prompt(body).count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = folder_with(tmp_path_factory.mktemp("tools") / "agent", "hermes")
    with serving(folder, max_batch_tokens=512) as running:
        yield running


@pytest.fixture
async def chat(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as chat:
        yield chat


async def test_a_required_call_fits_its_schema_whatever_the_model_says(chat: openai.AsyncOpenAI) -> None:
    """A model of random weights never writes JSON by itself."""
    items = set()
    for seed in range(6):
        settings: dict[str, Any] = {"model": "agent", "messages": MESSAGES, "tools": [FIND, COUNT], "seed": seed}
        settings |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
        answer = await chat.chat.completions.create(**settings)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        items.add((call.function.name, call.function.arguments))
        assert json.loads(call.function.arguments) in ({"item": "rope"}, {"item": "lamp"}, {})
        streamed = None
        async for chunk in await chat.chat.completions.create(**settings, stream=True):
            for part in chunk.choices:
                assert not part.delta.content
                streamed = part.delta.tool_calls[0].function if part.delta.tool_calls else streamed
        assert streamed is not None
        assert (streamed.name, streamed.arguments) == (call.function.name, call.function.arguments)
    assert len(items) > 1


async def test_a_chosen_tool_is_the_one_that_is_called(chat: openai.AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "count"}}
    answer = await chat.chat.completions.create(
        model="agent", messages=MESSAGES, tools=[FIND, COUNT], tool_choice=choice, max_tokens=300, n=3, seed=1
    )
    for each in answer.choices:
        assert each.message.tool_calls is not None
        assert {call.function.name for call in each.message.tool_calls if call.type == "function"} == {"count"}


async def test_free_text_stays_free_where_calls_are_optional(chat: openai.AsyncOpenAI) -> None:
    settings: dict[str, Any] = {"model": "agent", "messages": MESSAGES, "max_tokens": 30, "seed": 4, "logprobs": True}
    free = await chat.chat.completions.create(**settings, tools=[FIND], tool_choice="auto")
    without = await chat.chat.completions.create(**settings, tools=[FIND], tool_choice="none")
    assert free.choices[0].message.tool_calls is None
    assert free.choices[0].finish_reason in ("stop", "length")
    assert without.choices[0].message.content is not None


async def test_a_response_format_is_kept_and_its_logprobs_are_of_what_was_allowed(chat: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"shelf": {"type": "integer", "minimum": 1, "maximum": 99}, "sure": {"type": "boolean"}},
        "required": ["shelf", "sure"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    answer = await chat.chat.completions.create(
        model="agent", messages=MESSAGES, response_format=form, max_tokens=200, n=4, seed=2, logprobs=True
    )
    for choice in answer.choices:
        said = json.loads(choice.message.content or "")
        assert 1 <= said["shelf"] <= 99
        assert isinstance(said["sure"], bool)
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        # Where only one token may come, it is certain.
        forced = [entry.logprob for entry in choice.logprobs.content or [] if entry.token == "{"]
        assert max(forced) == 0.0


async def test_what_cannot_be_followed_is_refused(chat: openai.AsyncOpenAI) -> None:
    wrong: Any = {"type": "function", "function": {"name": "fnd"}}
    for change, says in (
        ({"tools": [FIND], "tool_choice": wrong}, "did you mean 'find'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}}, "schema"),
        ({"tools": [FIND], "response_format": {"type": "json_object"}}, "either tools or a response_format"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            await chat.chat.completions.create(model="agent", messages=MESSAGES, max_tokens=5, **change)  # type: ignore[call-overload]
