"""Text of tokens: a folder's tokenizer, read when it is first needed, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from evergrad.inference.config import EngineError

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class Decodes(Protocol):
    """Turns tokens into text."""

    def text_of(self, token_ids: Sequence[int]) -> str: ...


class TokenText:
    """The tokenizer of a model folder. Reading it takes seconds for a large one, so nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, or None where the folder has none.

        Raises:
            EngineError: the folder has one that cannot be read.
        """
        if not any((self.folder / name).is_file() for name in _FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except Exception as error:
            raise EngineError(f"the tokenizer cannot be loaded: {error}", where=str(self.folder)) from error

    @property
    def required(self) -> Any:
        """The tokenizer.

        Raises:
            EngineError: there is none, or it cannot be read.
        """
        if self.tokenizer is None:
            raise EngineError("the model has no tokenizer", where=str(self.folder), hint="ask by token ids, without texts")
        return self.tokenizer

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, at least: what bounds the text that fits a context."""
        vocabulary = self.tokenizer.get_vocab() if self.tokenizer is not None else {}
        return max(map(len, vocabulary), default=1)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, special tokens left out."""
        return str(self.required.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """One token as it is, special or not."""
        return str(self.required.decode([token_id]))

    def ids_of(self, text: str, **how: Any) -> list[int]:
        """Token ids of a text, with nothing added before or after it."""
        return list(self.required.encode(text, add_special_tokens=False, **how)) if text else []


class TextStream:
    """Text of a growing answer, in pieces that never need to be taken back.

    Held back: bytes of a character that is not whole yet, and what may turn out to be the beginning of a stop text.
    """

    def __init__(self, tokens: Decodes, stop_texts: Sequence[str]) -> None:
        self._tokens, self._stop_texts = tokens, stop_texts
        self._token_ids: list[int] = []
        self._settled = self._read = 0
        self._pending = ""
        self.stopped = False
        """A stop text came; it and what follows is not part of the answer."""

    def add(self, token_id: int) -> str:
        """The piece that is certain after one more token."""
        self._token_ids.append(token_id)
        # Decoding needs the tokens before, since some tokenizers write a token differently at the start of a text.
        before = self._tokens.text_of(self._token_ids[self._settled : self._read])
        after = self._tokens.text_of(self._token_ids[self._settled :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._settled, self._read = self._read, len(self._token_ids)
        return self._release(after[len(before) :], final=False)

    def finish(self) -> str:
        """All that was held back."""
        before = self._tokens.text_of(self._token_ids[self._settled : self._read])
        after = self._tokens.text_of(self._token_ids[self._settled :])
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
