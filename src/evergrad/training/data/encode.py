"""From a row to token ids and the positions that carry a loss, as the served model will see and write them.

What the model is shown and what it is to say are encoded apart, because that is how they are made in service: an engine encodes
the prompt, and samples the rest. A tokenizer that puts a space of its own in front of every text cannot be used like that; for
it the whole is encoded at once and positions are found by their characters.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evergrad.training.data.rows import Conversation, Pair, Row, Text
from evergrad.training.data.template import ChatTemplate, RowRefused, Span
from evergrad.training.data.tokens import Tokens
from evergrad.types import TrainingSample


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One token sequence of a row, kept small: data sets have many.

    >>> row = EncodedRow(3, array("i", (7, 8, 9)), ((1, 3, 1.0),))
    >>> row.sample("my.jsonl").loss_mask, row.trained_tokens
    ((0, 1, 1), 2)
    """

    line: int
    token_ids: array[int]
    """[tokens]"""
    spans: tuple[Span, ...]
    """``(start, end, weight)`` in tokens, ascending, apart, and never at position 0, which nothing predicts."""
    preference: int = 0
    """1 for the preferred answer of a pair, −1 for the other, 0 for a row that is no pair."""

    @property
    def trained_tokens(self) -> int:
        return sum(end - start for start, end, _ in self.spans)

    def sample(self, source: str, reference_logprobs: tuple[float, ...] | None = None) -> TrainingSample:
        """The row as the trainer takes it; ``source`` and the line name it in errors.

        Advantages hold the weights of the tokens, or the preference of a pair; behaviour log-probabilities are 0: nobody
        sampled these tokens.
        """
        count = len(self.token_ids)
        mask, advantages = [0] * count, [0.0] * count
        for start, end, weight in self.spans:
            mask[start:end] = [1] * (end - start)
            advantages[start:end] = [float(self.preference) or weight] * (end - start)
        name = f"{source}:{self.line}"
        return TrainingSample(
            token_ids=tuple(self.token_ids),
            loss_mask=tuple(mask),
            logprobs=(0.0,) * count,
            advantages=tuple(advantages),
            min_policy_version=0,
            max_policy_version=0,
            rollout_id=name,
            group_id=name if self.preference else "",
            reference_logprobs=reference_logprobs,
        )


class Encoder:
    """Encodes rows for one model.

    Args:
        tokenizer: of transformers.
        where: names the model in errors.
    """

    def __init__(self, tokenizer: Any, where: str) -> None:
        self.tokenizer, self.where = tokenizer, where
        self._template = ChatTemplate(tokenizer)
        self._added = frozenset(getattr(tokenizer, "added_tokens_decoder", {})) | frozenset(tokenizer.all_special_ids)
        self._apart = self.decode([*self._encode("ab"), *self._encode("cd")]) == "abcd"

    def encode(self, row: Row) -> tuple[EncodedRow, ...]:
        """The row's sequences: one, or the preferred and the other answer of a pair.

        Raises:
            RowRefused: the chat template cannot show the row, or no position of it would carry a loss.
        """
        content = row.content
        if isinstance(content, Pair):
            chosen = replace(self._one(row.line, content.chosen), preference=1)
            return chosen, replace(self._one(row.line, content.rejected), preference=-1)
        return (self._one(row.line, content),)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of any ids, special tokens included."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _one(self, line: int, content: Conversation | Text | Tokens) -> EncodedRow:
        if isinstance(content, Tokens):
            ids, spans = self._as_they_are(content)
        elif isinstance(content, Text):
            ids, spans = self._plain(content)
        else:
            text, character_spans = self._template.render(content)
            ids, spans = (self._in_pieces if self._apart else self._by_offsets)(text, character_spans)
        spans = [(max(start, 1), end, weight) for start, end, weight in spans]
        spans = [(start, end, weight) for start, end, weight in spans if end > start]
        if not spans:
            raise RowRefused("", "no token of it would be trained", "give it text to learn")
        return EncodedRow(line, array("i", ids), tuple(spans))

    def _as_they_are(self, content: Tokens) -> tuple[list[int], list[Span]]:
        size = len(self.tokenizer)
        for place, token in enumerate(content.token_ids):
            if token >= size:
                fix = f"it has {size}: name the model whose tokenizer made the file"
                raise RowRefused(f"input_ids[{place}]", "is no token of the model", fix, str(token))
        return list(content.token_ids), content.spans

    def _plain(self, content: Text) -> tuple[list[int], list[Span]]:
        """Text as it is, between the tokenizer's own start token, if it has one, and its end of text."""
        ending = self.tokenizer.eos_token_id
        prompt = list(self.tokenizer(content.prompt)["input_ids"])
        if prompt and prompt[-1] == ending:
            prompt.pop()  # the text goes on
        if content.prompt and not self._apart:
            both = list(self.tokenizer(content.prompt + content.completion)["input_ids"])
            ids = both[:-1] if both[-1] == ending else both
        else:
            ids = [*prompt, *self._encode(content.completion)]
        if ending is not None:
            ids.append(ending)
        return ids, [(len(prompt), len(ids), 1.0)]

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        found: list[Span] = []
        at = 0
        for start, end, weight in spans:
            ids += self._encode(text[at:start])
            said = self._encode(text[start:end])
            found.append((len(ids), len(ids) + self._own(said), weight))
            ids += said
            at = end
        return [*ids, *self._encode(text[at:])], found

    def _by_offsets(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]
        found: list[Span] = []
        for start, end, weight in spans:
            # A token belongs to the stretch that its last character is in.
            first = next((i for i, last in enumerate(ends) if last > start), len(ids))
            after = next((i for i, last in enumerate(ends) if last > end), len(ids))
            found.append((first, first + self._own(ids[first:after]), weight))
        return ids, found

    def _own(self, said: Sequence[int]) -> int:
        """How many tokens of a message the model itself writes: those up to its end of turn. The white space that a template
        puts after that is never sampled, since generation ends there."""
        last = max((place for place, token in enumerate(said) if token in self._added), default=None)
        if last is None or self.decode(said[last + 1 :]).strip():
            return len(said)
        return last + 1

    def _encode(self, text: str) -> list[int]:
        # No special tokens of the tokenizer's own: the template has written all that belong there.
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
