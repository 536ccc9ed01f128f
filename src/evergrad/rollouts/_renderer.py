"""From messages to token ids and back, exactly.

The engine's tokens are the truth: what it sampled is carried on as ids and never tokenized again from text. A later turn's
prompt is the earlier prompt, the sampled ids, and the ids of what the chat template writes after them. That holds as long as
the template shows the conversation so far as it was; a template that rewrites it (drops old reasoning, trims) gives a prompt of
its own, and the turn becomes a training sample of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from evergrad.types import Completion, EvergradError, FinishReason, Message

_PROBE = "x1y2z3"
"""Stands for a message's content when the template is asked what it writes around it."""


class RendererError(EvergradError):
    """A tokenizer whose chat template cannot carry a conversation."""


class Renderer:
    """Renders conversations with a tokenizer's own chat template.

    Args:
        tokenizer: anything with ``chat_template``, ``apply_chat_template``, ``encode``, ``decode`` and ``eos_token_id`` as
            transformers' tokenizers have them.

    Raises:
        RendererError: no chat template, or one that fails on a plain conversation.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._where = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise RendererError(
                "the tokenizer has no chat template",
                where=self._where,
                hint="use an instruction-tuned model, or add a chat_template.jinja to its folder",
            )
        self._encode = functools.lru_cache(maxsize=16_384)(self._encode_uncached)
        self._template = functools.lru_cache(maxsize=4_096)(self._template_uncached)
        # A group's rollouts say the same short things again and again, and each is read twice.
        self._decode = functools.lru_cache(maxsize=16_384)(self._decode_uncached)
        user, assistant = Message("user", "a"), Message("assistant", _PROBE)
        self._check(user, assistant)
        self.has_system = self._accepts(Message("system", "s"), user)
        """Whether the template shows a system message; where it does not, its text goes before the user's first one."""
        self._has_tool = self._accepts(user, assistant, Message("tool", "t"))
        self.end_of_turn_id, self.end_of_turn = self._end_of_turn(user, assistant)
        eos = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (self.end_of_turn_id, eos) if i is not None))
        """Ids that end a completion: the template's end of turn, and the end of text."""
        self._ending_ids = frozenset((*self.stop_token_ids, *tokenizer.all_special_ids))

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation that the assistant is to continue; exactly the template's own."""
        return self._encode(self._template(self._shape(messages)))

    def extend(
        self,
        messages: Sequence[Message],
        prompt_token_ids: tuple[int, ...],
        completion: Completion,
        new: Sequence[Message],
    ) -> tuple[int, ...]:
        """Ids of the next turn's prompt.

        Args:
            messages: the conversation that ``prompt_token_ids`` stands for, the completion not included.
            completion: what the engine sampled after it.
            new: the messages after the completion, such as a tool's answer.

        Returns:
            ``prompt_token_ids + completion.token_ids + …`` where the template allows it, else the whole conversation rendered
            anew; :func:`extends` tells which.
        """
        said = self.text(completion)
        whole = self._template(self._shape([*messages, Message("assistant", said), *new]))
        before = self._template(self._shape(messages)) + said
        stop = self.decode(completion.token_ids[-1:]) if completion.finish_reason is FinishReason.STOP else ""
        if stop and whole.startswith(before) and whole.startswith(stop, len(before)):
            return prompt_token_ids + completion.token_ids + self._encode(whole[len(before) + len(stop) :])
        return self._encode(whole)

    def text(self, completion: Completion) -> str:
        """What the model said, without the token that ended it."""
        ids = completion.token_ids
        if completion.finish_reason is FinishReason.STOP and ids and ids[-1] in self._ending_ids:
            ids = ids[:-1]
        return self.decode(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of any ids, special tokens included; for reading, never for encoding again."""
        return self._decode(tuple(token_ids))

    def reply(self, text: str) -> tuple[int, ...]:
        """Ids of an assistant's reply, its end of turn included: what a model should have sampled to say ``text``."""
        ending = self.end_of_turn_id if self.end_of_turn_id is not None else self._tokenizer.eos_token_id
        return (*self._encode(text), ending)

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        # No special tokens of the tokenizer's own: the template has written all that belong there.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _shape(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages in roles that the template knows."""
        shaped = list(messages)
        if not self._has_tool:
            shaped = [Message("user", each.content) if each.role == "tool" else each for each in shaped]
        if not self.has_system and shaped and shaped[0].role == "system":
            system, *shaped = shaped
            if shaped and shaped[0].role == "user" and system.content:
                shaped[0] = Message("user", f"{system.content}\n\n{shaped[0].content}")
        return tuple(shaped)

    def _decode_uncached(self, token_ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _template_uncached(self, messages: tuple[Message, ...]) -> str:
        try:
            return self._apply(messages)
        except Exception as error:
            roles = ", ".join(each.role for each in messages)
            raise RendererError(f"the chat template refuses the roles {roles}: {error}"[:300], where=self._where) from error

    def _apply(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        plain = [each.as_dict() for each in messages]
        return str(self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation_prompt))

    def _check(self, user: Message, assistant: Message) -> None:
        try:
            shown = self._apply([user, assistant, user])
        except Exception as error:
            raise RendererError(f"the chat template fails on a plain conversation: {error}"[:300], where=self._where) from error
        if _PROBE not in shown:
            raise RendererError("the chat template does not show what the assistant said", where=self._where)

    def _accepts(self, *messages: Message) -> bool:
        """Whether the template shows all of ``messages`` without complaint."""
        try:
            shown = self._apply(messages)
        except Exception:
            return False
        return all(each.content in shown for each in messages)

    def _end_of_turn(self, user: Message, assistant: Message) -> tuple[int | None, str]:
        """The special token that the template writes after the assistant's text, if it does."""
        shown = self._apply([user, assistant, user])
        tail = self._encode_uncached(shown[shown.index(_PROBE) + len(_PROBE) :])
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        first = tail[0] if tail else None
        if first is None or (first not in added and first not in self._tokenizer.all_special_ids):
            return None, ""
        return first, str(self._tokenizer.decode([first]))


def extends(earlier_prompt: tuple[int, ...], completion: Completion, later_prompt: tuple[int, ...]) -> bool:
    """Whether a later turn's prompt begins with the earlier one and what was sampled after it.

    >>> from evergrad.types import PolicySpan
    >>> done = Completion((5, 2), (-0.1, -0.1), FinishReason.STOP, (PolicySpan(0, 0, 2),))
    >>> extends((1, 4), done, (1, 4, 5, 2, 9)), extends((1, 4), done, (1, 4, 6, 2, 9))
    (True, False)
    """
    whole = earlier_prompt + completion.token_ids
    return later_prompt[: len(whole)] == whole
