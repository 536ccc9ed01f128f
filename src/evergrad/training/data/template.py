"""Which characters of a rendered conversation the assistant wrote: found from the chat template, proved, never guessed.

Two ways, in this order::

    {% generation %} marks   the template's own word: what stands between them is the assistant's
    prefixes                 the conversation is rendered up to each trained message and up to its end; both must be beginnings
                             of the whole, and what lies between them is what the model will be asked to write

A template that does neither (one that rewrites earlier messages, for instance) refuses the row with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from evergrad.training.data.problems import shown
from evergrad.training.data.rows import Conversation
from evergrad.types import EvergradError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int, float]
"""Start, end and weight of a stretch that carries a loss."""


class RowRefused(EvergradError):
    """A row that is well formed and cannot be trained on with this model."""

    def __init__(self, field: str, what: str, fix: str, value: str = "") -> None:
        self.field, self.value, self.fix = field, value, fix
        super().__init__(what, where=field, hint=fix)


class ChatTemplate:
    """A tokenizer's chat template, as far as training is concerned.

    Args:
        tokenizer: anything with ``chat_template``, ``get_chat_template``, ``apply_chat_template`` and
            ``all_special_tokens`` as transformers has them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = [str(token) for token in tokenizer.all_special_tokens]

    def render(self, conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
        """The conversation as text, and where in it the trained messages are, in characters.

        Raises:
            RowRefused: no template, one that fails on this conversation, does not show all of it, or gives no span.
        """
        messages = [dict(message) for message in conversation.messages]
        tools = [dict(tool) for tool in conversation.tools] or None
        if not getattr(self._tokenizer, "chat_template", None):
            raise RowRefused(
                "messages", "the model's tokenizer has no chat template", "add chat_template.jinja to its folder, or use 'text'"
            )
        self._check_no_special_tokens(messages)
        whole = self._apply(messages, tools)
        if _MARKS.search(self._tokenizer.get_chat_template(tools=tools)):
            spans = self._marked(conversation, messages, tools, whole)
        else:
            spans = self._between_prefixes(conversation, messages, tools, whole)
        _check_shown(conversation, whole, spans)
        return whole, tuple((start, end, conversation.weights[number]) for number, (start, end) in spans.items())

    def _check_no_special_tokens(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """
        Raises:
            RowRefused: a message holds the text of a special token, which would be encoded as that token: what one says could
                pass for the end of a turn, or the beginning of another's.
        """
        for number, message in enumerate(messages):
            for key in ("content", "reasoning_content"):
                token = next((each for each in self._special if each in str(message.get(key, ""))), None)
                if token is not None:
                    raise RowRefused(
                        f"messages[{number}].{key}",
                        "holds the text of one of the model's special tokens",
                        "remove it, or write it in another way",
                        shown(token),
                    )

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None, *, generation_prompt: bool = False
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
                )
            )
        except Exception as error:  # templates raise whatever they like
            roles = ", ".join(str(message["role"]) for message in messages)
            what = f"the chat template refuses the roles {roles}: {error}"[:300]
            raise RowRefused("messages", what, "write the conversation as the template wants it") from error

    def _marked(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        whole: str,
    ) -> dict[int, tuple[int, int]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, indices = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        marked = [tuple(span) for span in indices[0]]
        said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if rendered[0] != whole or len(marked) != len(said):
            raise RowRefused(
                "messages",
                f"the chat template marks {len(marked)} stretches with {{% generation %}} for {len(said)} assistant messages",
                "mark each of them once in the template, or remove the marks: prefixes are compared then",
            )
        return {number: span for number, span in zip(said, marked, strict=True) if conversation.weights[number]}

    def _between_prefixes(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        whole: str,
    ) -> dict[int, tuple[int, int]]:
        found = {}
        for number in conversation.trained:
            before = self._apply(messages[:number], tools, generation_prompt=True)
            after = whole if number == len(messages) - 1 else self._apply(messages[: number + 1], tools)
            for prefix, ends in ((before, "before it"), (after, "to its end")):
                if not whole.startswith(prefix):
                    raise RowRefused(
                        f"messages[{number}]",
                        f"the chat template rewrites the conversation: rendered {ends}, {_difference(prefix, whole)}",
                        "set weight 0 on the assistant's messages that are context only, write one row per answer, or add "
                        "{% generation %} marks to the template",
                    )
            if len(after) <= len(before):
                raise RowRefused(f"messages[{number}]", "the chat template shows nothing of it", "use another chat template")
            found[number] = (len(before), len(after))
        return found


def _check_shown(conversation: Conversation, whole: str, spans: Mapping[int, tuple[int, int]]) -> None:
    """
    Raises:
        RowRefused: something that the row says is not in what the model would see.
    """
    squeezed = _squeeze(whole)
    for number, tool in enumerate(conversation.tools):
        name = str(tool["function"]["name"])
        if _squeeze(name) not in squeezed:
            raise RowRefused(
                f"tools[{number}]", "the chat template does not show tools", "describe them in the system message", shown(name)
            )
    for number, message in enumerate(conversation.messages):
        inside = _squeeze(whole[slice(*spans[number])]) if number in spans else squeezed
        if message["role"] == "assistant" and number not in spans:
            continue  # context: a template may leave out what was thought earlier
        for key in ("content", "reasoning_content"):
            text = str(message.get(key, ""))
            if _squeeze(text) not in inside:
                raise RowRefused(
                    f"messages[{number}].{key}",
                    "the chat template does not show this text as it is",
                    "write it as the template keeps it, set weight 0, or use another template",
                    shown(text),
                )
        for place, call in enumerate(message.get("tool_calls", ())):
            name = str(call["function"]["name"])
            if _squeeze(name) not in inside:
                raise RowRefused(
                    f"messages[{number}].tool_calls[{place}]",
                    "the chat template does not show tool calls",
                    "write the call into 'content' as the model is to say it",
                    shown(name),
                )


def _squeeze(text: str) -> str:
    """Without white space, which templates add and trim."""
    return "".join(text.split())


def _difference(prefix: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole)))
    return f"character {at} begins {prefix[at : at + 24]!r}, in the whole {whole[at : at + 24]!r}"
