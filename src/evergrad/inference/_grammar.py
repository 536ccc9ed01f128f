"""What a completion must follow: a JSON schema or a grammar, as the tokens that may come next.

The work is llguidance's (https://github.com/guidance-ai/llguidance): an Earley parser over a lexer of regular-expression
derivatives, which knows after each token which others the grammar allows.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evergrad.inference._text import TokenText
from evergrad.inference.config import EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_KEPT = 64
"""Compiled grammars that are kept for the next request with the same."""


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """The grammar of JSON texts that fit ``schema``; None takes any object."""
    return "start: %json " + json.dumps({"type": "object"} if schema is None else schema)


class Matcher:
    """One completion's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> torch.Tensor:
        """[V] bool: the tokens that may come next."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.zeros(self._vocab_size, dtype=bool)
        known = min(len(bits), self._vocab_size)
        allowed[:known] = bits[:known]
        return torch.from_numpy(allowed)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(token_ids))

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    @property
    def ended(self) -> bool:
        """Nothing can follow any more, or :attr:`error` says why it is not known what can."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the text cannot be followed: it does not fit, or the grammar is too costly."""
        return self._matcher.get_error() or None


class Grammars:
    """Grammars over one model's tokens, compiled once each.

    Args:
        eos_token_ids: May come where a completion is whole.
    """

    def __init__(self, text: TokenText, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._text, self._vocab_size, self._eos_token_ids = text, vocab_size, eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def start(self, grammar: str) -> Matcher:
        """A matcher at the beginning of ``grammar``, which is in llguidance's Lark dialect.

        Raises:
            EngineError: the grammar cannot be used, or the model has no tokenizer that can be read token by token.
        """
        with self._one_at_a_time:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                from llguidance import LLMatcher

                compiled = LLMatcher(self._tokens(), grammar, log_level=0)
                if compiled.is_error():
                    raise EngineError(f"the grammar or schema cannot be used: {compiled.get_error()[:500]}", where="grammar")
                self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self._vocab_size)

    def _tokens(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer

            tokenizer = self._text.required
            eos = sorted({*self._eos_token_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])})
            size = max(self._vocab_size, len(tokenizer))
            try:
                self._tokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=eos or None)
            except ValueError as error:
                raise EngineError(f"grammars need a fast tokenizer: {error}", where=str(self._text.folder)) from error
        return self._tokenizer


def advanced(matcher: Matcher | None, token_ids: Iterable[int]) -> dict[int, Matcher]:
    """Where a row's grammar is after each of the tokens; empty without one."""
    if matcher is None:
        return {}
    first, *others = dict.fromkeys(token_ids)
    after = {token: matcher.copy() for token in others}
    after[first] = matcher
    for token, each in after.items():
        each.advance([token])
    return after
