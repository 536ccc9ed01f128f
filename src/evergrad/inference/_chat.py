"""Between messages and tokens: the chat template on the way in, text that is whole on the way out."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evergrad.inference._wire import ChatBody
from evergrad.inference.config import EngineError

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


class ChatFormat:
    """A model folder's tokenizer and template.

    Args:
        eos_token_ids: The model's own, which end an answer besides the tokenizer's.
    """

    def __init__(self, folder: Path, eos_token_ids: Sequence[int]) -> None:
        """
        Raises:
            EngineError: the folder has a tokenizer that cannot be read.
        """
        from transformers import AutoTokenizer

        self._tokenizer: Any = None
        self._folder = folder
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(folder)
            except Exception as error:
                raise EngineError(f"the tokenizer cannot be loaded: {error}", where=str(folder)) from error
        self.stop_token_ids = self._stop_token_ids(eos_token_ids)
        vocabulary = self._tokenizer.get_vocab() if self._tokenizer is not None else {}
        self.longest_token = max(map(len, vocabulary), default=1)
        """Characters of the longest token, at least: what bounds the text that fits a context."""
        self._specials = self._special_texts()

    def prompt(self, body: ChatBody) -> tuple[int, ...]:
        """Token ids of the conversation, up to where the assistant speaks.

        Raises:
            EngineError: no tokenizer, no template, or a conversation that the template refuses.
        """
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise EngineError("the model has no chat template", where=str(self._folder), hint="use /inference/v1/generate")
        # Stands in a message's text for what reads like a special token, so that only the template can write one.
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        quoted: list[str] = []

        def quote(found: re.Match[str]) -> str:
            quoted.append(found.group())
            return mark

        messages = [{"role": message.role, "content": self._specials.sub(quote, message.text())} for message in body.messages]
        try:
            shown = str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            head, *rest = shown.split(mark)
            ids = self._ids(head)
            for plain, part in zip(quoted, rest, strict=True):
                ids += self._ids(plain, split_special_tokens=True) + self._ids(part)
        except Exception as error:
            raise EngineError(f"the chat template refuses these messages: {error}", where="messages") from error
        return tuple(ids)

    def _ids(self, text: str, **how: Any) -> list[int]:
        # The template writes every special token itself; the tokenizer must not add its own on top.
        return list(self._tokenizer.encode(text, add_special_tokens=False, **how)) if text else []

    def _special_texts(self) -> re.Pattern[str]:
        """Finds the text of any special token; the longest where one begins another."""
        texts: set[str] = set()
        if self._tokenizer is not None:
            texts |= set(self._tokenizer.all_special_tokens)
            texts |= {str(each.content) for each in self._tokenizer.added_tokens_decoder.values() if each.special}
        found = sorted((text for text in texts if text), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, found)) if found else r"(?!)")

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """One token as it is, special or not."""
        return str(self._tokenizer.decode([token_id]))

    def _stop_token_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        found = set(eos_token_ids)
        if self._tokenizer is not None:
            vocabulary = self._tokenizer.get_vocab()
            found |= {vocabulary[text] for text in _END_OF_TURN if text in vocabulary}
            if self._tokenizer.eos_token_id is not None:
                found.add(self._tokenizer.eos_token_id)
        return tuple(sorted(found))


class TextStream:
    """Text of a growing answer, in pieces that never need to be taken back.

    Held back: bytes of a character that is not whole yet, and what may turn out to be the beginning of a stop text.
    """

    def __init__(self, chat: ChatFormat, stop_texts: Sequence[str]) -> None:
        self._chat, self._stop_texts = chat, stop_texts
        self._token_ids: list[int] = []
        self._settled = self._read = 0
        self._pending = ""
        self.stopped = False
        """A stop text came; it and what follows is not part of the answer."""

    def add(self, token_id: int) -> str:
        """The piece that is certain after one more token."""
        self._token_ids.append(token_id)
        # Decoding needs the tokens before, since some tokenizers write a token differently at the start of a text.
        before = self._chat.text_of(self._token_ids[self._settled : self._read])
        after = self._chat.text_of(self._token_ids[self._settled :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._settled, self._read = self._read, len(self._token_ids)
        return self._release(after[len(before) :], final=False)

    def finish(self) -> str:
        """All that was held back."""
        before = self._chat.text_of(self._token_ids[self._settled : self._read])
        after = self._chat.text_of(self._token_ids[self._settled :])
        return self._release(after[len(before) :], final=True)

    def _release(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._pending + text
        found = [at for at in (text.find(stop) for stop in self._stop_texts) if at >= 0]
        if found:
            self.stopped, self._pending = True, ""
            return text[: min(found)]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
