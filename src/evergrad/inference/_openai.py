"""A request's events in the words of OpenAI's API: chat completions and completions, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from evergrad.inference._chat import ChatFormat
from evergrad.inference._generated import Answer, usage
from evergrad.inference._openai_wire import ChatBody, CompletionBody
from evergrad.inference._text import TextStream, TokenText
from evergrad.inference._tools import CallFormat
from evergrad.inference._web import sse
from evergrad.inference.engine import Event


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


@dataclass
class _Piece:
    """What an event adds to one completion."""

    index: int
    text: str
    reason: str | None
    answer: Answer


class _Spoken:
    """The text of each completion as its events come."""

    def __init__(self, text: TokenText, n: int, stop_texts: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        self.answers = [Answer() for _ in range(n)]
        self._texts = [TextStream(text, stop_texts) for _ in range(n)]
        self._stop_token_ids = frozenset(stop_token_ids)

    async def pieces(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[_Piece, None]:
        async with aclosing(events):
            async for event in events:
                yield self._take(event)

    def _take(self, event: Event) -> _Piece:
        answer, text = self.answers[event.index], self._texts[event.index]
        answer.add(event)
        # A stop token has no text, whatever the tokenizer thinks of it.
        silent = event.token_id is None or event.token_id in self._stop_token_ids
        piece = "" if silent or event.token_id is None else text.add(event.token_id)
        if event.finish_reason is not None and not text.stopped:
            piece += text.finish()
        return _Piece(event.index, piece, None if event.finish_reason is None else str(event.finish_reason), answer)


class ChatReply:
    """One chat completion request."""

    def __init__(self, chat: ChatFormat, body: ChatBody, num_prompt_tokens: int) -> None:
        self._text, self._body, self._num_prompt_tokens = chat.text, body, num_prompt_tokens
        self._calls: CallFormat | None = chat.calls if body.offers_tools else None
        self._names = [tool.function.name for tool in body.tools]
        self._id, self._created = new_id("chatcmpl"), int(time.time())
        stop_token_ids = (*body.stop_token_ids, *chat.stop_token_ids)
        self._spoken = _Spoken(chat.text, body.n, body.stop_texts(), stop_token_ids)

    async def collect(self, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
        parts: list[list[str]] = [[] for _ in range(self._body.n)]
        reasons: list[str | None] = [None] * len(parts)
        async for piece in self._spoken.pieces(events):
            parts[piece.index].append(piece.text)
            reasons[piece.index] = piece.reason or reasons[piece.index]
        choices = []
        for index, answer in enumerate(self._spoken.answers):
            content, calls = self._read("".join(parts[index]))
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            reason = reasons[index]
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
                reason = "tool_calls" if reason == "stop" else reason
            logprobs = self._logprobs(answer, 0) if self._body.logprobs else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    async def stream(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
        """Server-sent events, ``[DONE]`` at the end. A call is told whole, when the reply has ended."""
        for index in range(self._body.n):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        sent = [0] * self._body.n
        held = [""] * self._body.n
        async for piece in self._spoken.pieces(events):
            index, logprobs = piece.index, None
            if self._body.logprobs:
                logprobs, sent[index] = self._logprobs(piece.answer, sent[index]), len(piece.answer.token_ids)
            text, reason, delta = piece.text, piece.reason, dict[str, Any]()
            if self._calls is not None:
                text, held[index] = self._release(held[index] + text)
                if reason is not None:
                    rest, calls = self._read(held[index])
                    text += rest
                    if calls:
                        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
                        reason = "tool_calls" if reason == "stop" else reason
            if text:
                delta["content"] = text
            if delta or logprobs or reason:
                yield self._chunk(index, delta, reason, logprobs)
        if self._body.stream_options.include_usage:
            yield sse({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        if self._calls is None:
            return text, []
        said, calls = self._calls.split(text, self._names)
        shown = [
            {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        return said, shown

    def _release(self, text: str) -> tuple[str, str]:
        """What is plain text for certain, and what may be or become a call."""
        assert self._calls is not None
        mark = self._calls.begin.strip() or "{"
        if self._calls.begin:
            at = text.find(mark)
            at = next((end for end in range(len(text)) if mark.startswith(text[end:])), len(text)) if at < 0 else at
            return text[:at], text[at:]
        # Without marks, only a reply that begins as JSON may be a call.
        return ("", text) if text.lstrip().startswith(mark) or not text.strip() else (text, "")

    def _logprobs(self, answer: Answer, start: int) -> dict[str, Any]:
        content = []
        for token_id, logprob in zip(answer.token_ids[start:], answer.logprobs[start:], strict=True):
            text = self._text.token_text(token_id)
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _usage(self) -> dict[str, Any]:
        return usage(self._num_prompt_tokens, self._spoken.answers)


@dataclass(frozen=True)
class Echo:
    """The prompt, where it is to stand before the completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...] | None
    """Of each token, None for the first; None where they are not asked for."""


class TextReply:
    """The completions of one prompt.

    Args:
        first_index: Of its completions among those of all prompts of the request.
    """

    def __init__(
        self,
        text: TokenText,
        body: CompletionBody,
        num_prompt_tokens: int,
        stop_token_ids: Sequence[int],
        echo: Echo | None = None,
        first_index: int = 0,
    ) -> None:
        self._text, self._body, self._echo, self._first_index = text, body, echo, first_index
        self._num_prompt_tokens = num_prompt_tokens
        self._spoken = _Spoken(text, body.n, body.stop_texts(), stop_token_ids)

    async def collect(self, events: AsyncGenerator[Event, None] | None) -> list[dict[str, Any]]:
        """The choices; without events, the prompt's alone."""
        parts: list[list[str]] = [[] for _ in range(self._body.n)]
        reasons = ["length"] * len(parts)
        if events is not None:
            async for piece in self._spoken.pieces(events):
                parts[piece.index].append(piece.text)
                reasons[piece.index] = piece.reason or reasons[piece.index]
        before = "" if self._echo is None else self._text.text_of(self._echo.token_ids)
        return [
            {
                "index": self._first_index + index,
                "text": before + "".join(parts[index]),
                "logprobs": self._logprobs(answer, 0, self._echo) if self._body.logprobs is not None else None,
                "finish_reason": reasons[index],
            }
            for index, answer in enumerate(self._spoken.answers)
        ]

    async def stream(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
        """Server-sent events, ``[DONE]`` at the end."""
        head = head_of_completions(self._body)
        sent = [0] * self._body.n
        async for piece in self._spoken.pieces(events):
            logprobs = None
            if self._body.logprobs is not None:
                start, sent[piece.index] = sent[piece.index], len(piece.answer.token_ids)
                logprobs = self._logprobs(piece.answer, start, None)
            choice = {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.reason}
            if piece.text or logprobs or piece.reason:
                yield sse({**head, "choices": [choice]})
        if self._body.stream_options.include_usage:
            yield sse({**head, "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def usage(self) -> dict[str, Any]:
        return usage(self._num_prompt_tokens, self._spoken.answers)

    def _logprobs(self, answer: Answer, start: int, echo: Echo | None) -> dict[str, Any]:
        token_ids, logprobs = answer.token_ids[start:], list[float | None](answer.logprobs[start:])
        if echo is not None and echo.logprobs is not None:
            token_ids, logprobs = [*echo.token_ids, *token_ids], [*echo.logprobs, *logprobs]
        texts = [self._text.token_text(token) for token in token_ids]
        offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def head_of_completions(body: CompletionBody) -> dict[str, Any]:
    """What every answer to a completion request begins with."""
    return {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": body.model}
