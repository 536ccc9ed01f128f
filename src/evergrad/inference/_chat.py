"""Between messages and tokens: the chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from evergrad.config import ConfigError
from evergrad.inference._openai_wire import ChatBody, ChatMessage
from evergrad.inference._text import TokenText
from evergrad.inference._tools import CallFormat, find_format
from evergrad.inference.config import EngineError
from evergrad.types import system_message

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
_NO_TOOLS = (
    "is not supported: this model's chat template shows no tools, or writes calls in no format known here; an agent trained "
    "here has its tools in its system message, and a call is its content, such as find(item=rope)"
)


class ChatFormat:
    """A model folder's tokenizer and template.

    Args:
        eos_token_ids: The model's own, which end an answer besides the tokenizer's.
    """

    def __init__(self, folder: Path, eos_token_ids: Sequence[int], text: TokenText | None = None) -> None:
        """
        Raises:
            EngineError: the folder has a tokenizer that cannot be read.
        """
        self.text = text or TokenText(folder)
        self._tokenizer: Any = self.text.tokenizer
        self._folder = folder
        self.stop_token_ids = self._stop_token_ids(eos_token_ids)
        self._specials = self._special_texts()

    @cached_property
    def calls(self) -> CallFormat | None:
        """How this model calls tools; None when its template says nothing of it."""

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]], add_generation_prompt: bool) -> str:
            options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "tokenize": False}
            return str(self._tokenizer.apply_chat_template(messages, **options))

        return find_format(render) if self._tokenizer is not None and self._tokenizer.chat_template else None

    def prompt(self, body: ChatBody, system_prompt: str = "") -> tuple[int, ...]:
        """Token ids of the conversation, up to where the assistant speaks.

        Args:
            system_prompt: The version's own, added to the conversation's system message.

        Raises:
            EngineError: no tokenizer, no template, or a conversation that the template refuses.
            ConfigError: tools, with a template that has no place for them.
        """
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise EngineError("the model has no chat template", where=str(self._folder), hint="use /inference/v1/generate")
        self._require_calls(body)
        # Stands in a text for what reads like a special token, so that only the template can write one.
        mark = f"\ue000{secrets.token_hex(8)}:"
        quoted: list[str] = []

        def quote(found: re.Match[str]) -> str:
            quoted.append(found.group())
            return f"{mark}{len(quoted) - 1}\ue001"

        shown_messages = _with_system_prompt([self._message(message) for message in body.messages], system_prompt)
        messages = [self._quoted(message, quote) for message in shown_messages]
        options: dict[str, Any] = {}
        if body.offers_tools:
            options["tools"] = [self._quoted(tool.as_dict(), quote) for tool in body.tools]
        try:
            shown = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
            ids: list[int] = []
            for place, part in enumerate(re.split(f"{mark}(\\d+)\ue001", str(shown))):
                ids += self.text.ids_of(quoted[int(part)], split_special_tokens=True) if place % 2 else self.text.ids_of(part)
        except Exception as error:
            raise EngineError(f"the chat template refuses these messages: {error}", where="messages") from error
        return tuple(ids)

    def grammar(self, body: ChatBody) -> str | None:
        """What the reply must follow: calls that fit the tools' schemas, or the ``response_format``."""
        if not body.offers_tools or self.calls is None:
            return body.response_format.as_grammar()
        tools = [tool.as_dict() for tool in body.tools if body.chosen_tool in (None, tool.function.name)]
        needed = body.tool_choice == "required" or body.chosen_tool is not None
        return self.calls.grammar(tools, needed=needed, several=body.parallel_tool_calls)

    def _require_calls(self, body: ChatBody) -> None:
        asked = ["tools"] if body.offers_tools else []
        asked += [f"messages.{index}.tool_calls" for index, message in enumerate(body.messages) if message.tool_calls]
        if asked and self.calls is None:
            raise ConfigError(f"{asked[0]} {_NO_TOOLS}", where="request body", key=asked[0])

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": message.role, "content": message.text()}
        if message.tool_calls:
            shown["tool_calls"] = [call.as_dict() for call in message.tool_calls]
        if message.role == "tool" and self.calls is not None:
            shown |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
        return shown

    def _quoted(self, value: Any, quote: Any) -> Any:
        """The same, with what reads like a special token marked in every text."""
        if isinstance(value, str):
            return self._specials.sub(quote, value)
        if isinstance(value, dict):
            return {key: self._quoted(each, quote) for key, each in value.items()}
        return [self._quoted(each, quote) for each in value] if isinstance(value, list) else value

    def _special_texts(self) -> re.Pattern[str]:
        """Finds the text of any special token; the longest where one begins another."""
        texts: set[str] = set()
        if self._tokenizer is not None:
            texts |= set(self._tokenizer.all_special_tokens)
            texts |= {str(each.content) for each in self._tokenizer.added_tokens_decoder.values() if each.special}
        found = sorted((text for text in texts if text), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, found)) if found else r"(?!)")

    def _stop_token_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        found = set(eos_token_ids)
        if self._tokenizer is not None:
            vocabulary = self._tokenizer.get_vocab()
            found |= {vocabulary[text] for text in _END_OF_TURN if text in vocabulary}
            if self._tokenizer.eos_token_id is not None:
                found.add(self._tokenizer.eos_token_id)
        return tuple(sorted(found))


def _with_system_prompt(messages: list[dict[str, Any]], added: str) -> list[dict[str, Any]]:
    if not added:
        return messages
    before, *rest = messages if messages and messages[0]["role"] == "system" else [{"role": "system", "content": ""}, *messages]
    return [{**before, "content": system_message(before["content"], added)}, *rest]
