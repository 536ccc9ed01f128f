"""What the engine is asked, and what it says of each step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from evergrad.inference._model import Model
from evergrad.inference._rows import Sample
from evergrad.inference._text import TextStream, TokenText
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


def check_request(request: Request, model: Model) -> None:
    """
    Raises:
        RequestError: it can never be served.
    """
    check_tokens(request.token_ids, model, room=1)
    if not 0 <= request.drawn <= len(request.token_ids):
        what = f"{request.drawn} of the prompt's {len(request.token_ids)} tokens cannot have been drawn before"
        raise RequestError(what, where="drawn")


def check_tokens(token_ids: Sequence[int], model: Model, room: int) -> None:
    """
    Args:
        room: Tokens that the context must hold besides.

    Raises:
        RequestError: no tokens, too many, or one outside of the vocabulary.
    """
    count, limit = len(token_ids), model.max_len
    if not count:
        raise RequestError("the prompt is empty", where="token_ids")
    if count + room > limit:
        raise RequestError(
            f"the prompt has {count} tokens, and prompt and completion may have {limit} together", where="token_ids"
        )
    ends = min(token_ids), max(token_ids)
    odd = next((one for one in ends if not 0 <= one < model.vocab_size), None)
    if odd is not None:
        raise RequestError(f"token {odd} is outside of the vocabulary of {model.vocab_size}", where="token_ids")


def sample_of(request: Request, index: int, seed: int, group: tuple[int, str, int], text: TokenText) -> Sample:
    """One completion of a request. What an earlier try drew counts for its stop texts, too."""
    own_seed = seed if index == 0 else derived_seed(seed, index)
    sample = Sample(request.request_id, index, request.sampling, own_seed, (*group, index), request.drawn)
    if request.sampling.stop:
        sample.text = TextStream(text, request.sampling.stop)
        for token in request.token_ids[len(request.token_ids) - request.drawn :]:
            sample.text.add(token)
    return sample


def derived_seed(seed: int, *path: object) -> int:
    """A seed of its own for each path."""
    text = ":".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
