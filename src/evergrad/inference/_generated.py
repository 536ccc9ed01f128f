"""Events of one ``/inference/v1/generate`` request as JSON: whole, or in pieces as they come.

A piece has the shape of the whole answer, and holds only what is new since the piece before; the last one has ``usage``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from evergrad.inference._spans import joined
from evergrad.inference._web import sse
from evergrad.inference.engine import Event
from evergrad.types import PolicySpan


@dataclass
class Answer:
    """One completion as its events come in."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: Event | None = None

    def add(self, event: Event) -> None:
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
            self.logprobs.append(event.logprob)
        if event.finish_reason is not None:
            self.last = event


def whole(
    answer_id: str, prompt: Sequence[int], answers: Sequence[Answer], prompt_logprobs: Sequence[float] | None = None
) -> dict[str, Any]:
    """The answer to a request, once all its completions have ended.

    ``prompt_logprobs`` are of each token of the prompt but the first, which nothing precedes.
    """
    choices = []
    for index, answer in enumerate(answers):
        assert answer.last is not None, "a completion has no end"
        spans = answer.last.policy_spans
        choices.append(_choice(index, answer.token_ids, answer.logprobs, spans, answer.last.finish_reason))
    body: dict[str, Any] = {"id": answer_id, "choices": choices, "usage": usage(len(prompt), answers)}
    if prompt_logprobs is not None:
        pairs = zip(prompt[1:], prompt_logprobs, strict=True)
        body["prompt_logprobs"] = [None, *({"token_id": token, "logprob": logprob} for token, logprob in pairs)]
    return body


async def pieces(
    answer_id: str, num_prompt_tokens: int, n: int, bursts: AsyncGenerator[list[Event], None]
) -> AsyncGenerator[str, None]:
    """Server-sent events, one for each burst of events, ``[DONE]`` after the last."""
    answers = [Answer() for _ in range(n)]
    async with aclosing(bursts):
        async for burst in bursts:
            choices = [
                _take(answers[index], index, [event for event in burst if event.index == index])
                for index in sorted({event.index for event in burst})
            ]
            body: dict[str, Any] = {"id": answer_id, "choices": choices}
            if all(answer.last is not None for answer in answers):
                body["usage"] = usage(num_prompt_tokens, answers)
            yield sse(body)
    yield "data: [DONE]\n\n"


def _take(answer: Answer, index: int, events: Sequence[Event]) -> dict[str, Any]:
    """Adds events to an answer, and gives what is new in it as a choice."""
    start = len(answer.token_ids)
    spans: list[PolicySpan] = []
    for event in events:
        at = len(answer.token_ids)
        answer.add(event)
        if event.token_id is not None:
            spans.append(PolicySpan(event.policy_version, at, at + 1))
    reason = None if answer.last is None else answer.last.finish_reason
    return _choice(index, answer.token_ids[start:], answer.logprobs[start:], joined(spans), reason)


def usage(num_prompt_tokens: int, answers: Iterable[Answer]) -> dict[str, Any]:
    """In the words of OpenAI's API; cached tokens are those of the first completion."""
    answers = list(answers)
    cached = answers[0].last.cached_tokens if answers[0].last is not None else 0
    completion = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def total(usages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several prompts together."""
    each = list(usages)
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in each)
    keys = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {**{key: sum(one[key] for one in each) for key in keys}, "prompt_tokens_details": {"cached_tokens": cached}}


def _choice(
    index: int, token_ids: Sequence[int], logprobs: Sequence[float], spans: Iterable[PolicySpan], reason: str | None
) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(token_ids, logprobs, strict=True)]
    versions = [{"version": span.policy_version, "start": span.start, "end": span.end} for span in spans]
    return {
        "index": index,
        "token_ids": list(token_ids),
        "logprobs": {"content": content},
        "finish_reason": reason,
        "weight_versions": versions,
    }
