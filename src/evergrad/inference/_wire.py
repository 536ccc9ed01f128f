"""Bodies of requests. A key that none of them knows is refused, with the nearest one that exists; null means absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from evergrad.config import Config, ConfigError, parse_config
from evergrad.types import Sampling

BodyT = TypeVar("BodyT", bound=Config)

MIN_TEMPERATURE = 1e-4
"""Below it, and above 0, logits divided by it leave the range of single precision."""

_MAX_COMPLAINT = 1_000
_NO_TOOLS = "is not supported: the agent's tools stand in its system message"
_NO_CALLS = "is not supported: a call is the assistant's content, such as find(item=rope)"
_UNSUPPORTED = {
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "parallel_tool_calls": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
}
_UNSUPPORTED_IN_MESSAGE = {"tool_calls": _NO_CALLS, "function_call": _NO_CALLS}


def _drawable(temperature: float) -> float:
    if 0.0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"{temperature:g} is too small to draw with; give 0 for the likeliest token, or {MIN_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[StrictFloat, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_drawable)]
TopP = Annotated[StrictFloat, Field(gt=0, le=1)]
TopK = Annotated[StrictInt, Field(ge=-1)]
Count = Annotated[StrictInt, Field(ge=1)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


class SamplingParams(Config):
    """How to draw, in the words of ``/inference/v1/generate``."""

    max_tokens: Count = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 and −1 keep all."""
    seed: Seed | None = None
    stop_token_ids: tuple[StrictInt, ...] = ()
    n: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    logprobs: Annotated[StrictInt, Field(ge=0, le=1)] = 1
    """Accepted for compatibility; the drawn token's is always there."""

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, max(0, self.top_k), self.max_tokens, self.stop_token_ids, self.seed)


class GenerateBody(Config):
    """``POST /inference/v1/generate``."""

    model: StrictStr | None = None
    token_ids: tuple[StrictInt, ...]
    sampling_params: SamplingParams = SamplingParams()
    session_id: StrictStr | None = None
    stream: StrictBool = False
    """Server-sent events, each with the tokens since the one before."""
    drawn: Annotated[StrictInt, Field(ge=0)] = 0
    """How many of the last ``token_ids`` an earlier try drew: a seed's draws go on after them."""


class TextPart(Config):
    """A piece of a message's content."""

    type: StrictStr
    text: StrictStr


class ChatMessage(Config):
    """A message as the OpenAI wire has it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr | tuple[TextPart, ...] | None = None
    name: StrictStr | None = None
    tool_call_id: StrictStr | None = None

    def text(self) -> str:
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Config):
    """What a stream says besides its tokens."""

    include_usage: StrictBool = False


class ChatBody(Config):
    """``POST /v1/chat/completions``: what the engine honours, then what it only accepts at its neutral value."""

    model: StrictStr
    messages: tuple[ChatMessage, ...]
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    seed: Seed | None = None
    stop: StrictStr | tuple[StrictStr, ...] = ()
    stop_token_ids: tuple[StrictInt, ...] = ()
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: StrictBool = False
    session_id: StrictStr | None = None
    user: StrictStr | None = None
    metadata: Annotated[dict[str, Any], Field(default_factory=dict)]
    store: StrictBool = False
    presence_penalty: Annotated[StrictFloat, Field(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[StrictFloat, Field(ge=0, le=0)] = 0.0
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=0)] = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0, default_factory=dict)]
    tools: Annotated[tuple[Any, ...], Field(max_length=0)] = ()

    def stop_texts(self) -> tuple[str, ...]:
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        return tuple(text for text in texts if text)


class AttachBody(Config):
    """``POST /admin/weights/attach``: a publisher's slot descriptor."""

    descriptor: dict[str, Any]


class UpdateBody(Config):
    """``POST /admin/weights/update``: a manifest of the attached publisher."""

    manifest: dict[str, Any]


class LoadBody(Config):
    """``POST /admin/weights/load``: whole Hugging Face weights, or a PEFT adapter over the engine's base."""

    weights_uri: StrictStr
    policy_version: StrictInt
    served_names: tuple[StrictStr, ...] | None = None


class TokensBody(Config):
    """``POST /admin/logprobs``."""

    token_ids: tuple[StrictInt, ...]


class SessionsBody(Config):
    """``POST /admin/sessions/open`` and ``close``."""

    ids: tuple[StrictStr, ...]


def parse_body(model: type[BodyT], data: Any) -> BodyT:
    """
    Raises:
        ConfigError: the body is no object, has an unknown key, or a value that does not fit; its ``key`` is the field.
    """
    if not isinstance(data, Mapping):
        raise ConfigError("the body must be a JSON object", where="request body")
    if model is ChatBody:
        _check_chat(data)
    try:
        return parse_config(model, _without_nulls(data), where="request body")
    except ConfigError as error:
        what = error.what.replace("Value error, ", "")[:_MAX_COMPLAINT]
        raise ConfigError(what, where="request body", key=error.key) from error


def _check_chat(data: Mapping[str, Any]) -> None:
    """What OpenAI's wire has and this one does not, said in words instead of by the nearest spelling."""
    messages = data.get("messages")
    if messages == []:
        what = "messages is empty: give at least one, such as {role: user, content: …}"
        raise ConfigError(what, where="request body", key="messages")
    asked = [(key, complaint) for key, complaint in _UNSUPPORTED.items() if data.get(key)]
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, Mapping):
            asked += [(f"messages.{index}.{key}", why) for key, why in _UNSUPPORTED_IN_MESSAGE.items() if message.get(key)]
    if asked:
        raise ConfigError(" ".join(asked[0]), where="request body", key=asked[0][0])


def _without_nulls(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nulls(value) for key, value in data.items() if value is not None}
    if isinstance(data, list) and dict in map(type, data):  # most lists are thousands of token ids
        return [_without_nulls(item) if isinstance(item, dict) else item for item in data]
    return data
