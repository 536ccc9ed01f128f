"""What the engine is asked, and what it says of each step."""

from __future__ import annotations

from dataclasses import dataclass

from evergrad.inference._rows import Sample
from evergrad.inference.config import EngineError
from evergrad.types import FinishReason, PolicySpan, Sampling


class RequestError(EngineError):
    """A request that can never be served as it is."""


@dataclass(frozen=True)
class Request:
    """``n`` completions of one prompt.

    Completion 0 draws by ``sampling.seed`` itself, the others by seeds derived from it, so that they differ.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    session_id: str | None = None
    n: int = 1
    drawn: int = 0
    """How many of the last ``token_ids`` an earlier try at this request drew. With a seed, the same tokens follow as would
    have followed there."""
    grammar: str | None = None
    """What each completion follows, in llguidance's Lark dialect; the ``drawn`` tokens are its beginning."""
    adapter: str | None = None
    """Name of the adapter that is added to the base."""


@dataclass(frozen=True)
class Event:
    """What a step, or an abort, did to one completion."""

    request_id: str
    index: int
    token_id: int | None
    """None only when a completion ends without a further token: aborted or failed."""
    logprob: float = 0.0
    policy_version: int = 0
    """Of the weights that drew the token."""
    finish_reason: FinishReason | None = None
    policy_spans: tuple[PolicySpan, ...] = ()
    """Of the whole completion; only on its last event."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed for it; only on its last event."""
    error: str | None = None
    """Why it failed: the model gave no usable distribution."""


def progress(sample: Sample) -> Event:
    """Its last token came; its last event, where that ended it."""
    token_id, logprob, version = sample.token_ids[-1], sample.logprobs[-1], sample.spans[-1].policy_version
    if sample.finish_reason is None:
        return Event(sample.request_id, sample.index, token_id, logprob, version)
    spans = tuple(sample.spans)
    return Event(sample.request_id, sample.index, token_id, logprob, version, sample.finish_reason, spans, sample.cached_tokens)


def closing(sample: Sample, error: str | None = None) -> Event:
    """It ends without a further token."""
    return Event(
        sample.request_id,
        sample.index,
        None,
        finish_reason=sample.finish_reason,
        policy_spans=tuple(sample.spans),
        cached_tokens=sample.cached_tokens,
        error=error,
    )
