"""Bodies of requests. A key that none of them knows is refused, with the nearest one that exists; null means absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from evergrad.config import Config, ConfigError, nearest, parse_config
from evergrad.inference._grammar import json_grammar
from evergrad.types import Sampling

BodyT = TypeVar("BodyT", bound=Config)
UpdateMode = Literal["keep", "drain", "abort"]

MIN_TEMPERATURE = 1e-4
"""Below it, and above 0, logits divided by it leave the range of single precision."""

_MAX_COMPLAINT = 1_000
_UNSUPPORTED = {
    "functions": "is not supported: give tools",
    "function_call": "is not supported: give tool_choice",
}
_UNSUPPORTED_IN_MESSAGE = {"function_call": "is not supported: give tool_calls"}


def _drawable(temperature: float) -> float:
    if 0.0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"{temperature:g} is too small to draw with; give 0 for the likeliest token, or {MIN_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[StrictFloat, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_drawable)]
TopP = Annotated[StrictFloat, Field(gt=0, le=1)]
TopK = Annotated[StrictInt, Field(ge=-1)]
MinP = Annotated[StrictFloat, Field(ge=0, le=1)]
Count = Annotated[StrictInt, Field(ge=1)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


class StructuredOutputs(Config):
    """What a completion must follow; one of the two."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json", default=None)]
    """JSON Schema."""
    grammar: StrictStr | None = None
    """In llguidance's Lark dialect."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.json_schema is None) == (self.grammar is None):
            raise ValueError("give either json or grammar")
        return self

    def as_grammar(self) -> str:
        return self.grammar if self.grammar is not None else json_grammar(self.json_schema)


class SamplingParams(Config):
    """How to draw, in the words of ``/inference/v1/generate``."""

    max_tokens: Count = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 and −1 keep all."""
    min_p: MinP = 0.0
    """Least probability that is kept, as a share of the likeliest token's."""
    seed: Seed | None = None
    stop: StrictStr | tuple[StrictStr, ...] = ()
    """Texts that end the completion; the token that completes one is its last."""
    stop_token_ids: tuple[StrictInt, ...] = ()
    n: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    logprobs: Annotated[StrictInt, Field(ge=0, le=1)] = 1
    """Accepted for compatibility; the drawn token's is always there."""
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=1)] | None = None
    """With a number, those of the prompt's tokens too, at temperature 1."""
    structured_outputs: StructuredOutputs | None = None

    def sampling(self) -> Sampling:
        return sampling_of(self, self.max_tokens, self.stop_token_ids)

    def grammar(self) -> str | None:
        return None if self.structured_outputs is None else self.structured_outputs.as_grammar()


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


class CalledFunction(Config):
    """The function of a call in a message."""

    name: StrictStr
    arguments: StrictStr
    """JSON."""


class ToolCall(Config):
    """A call in an assistant's message."""

    id: StrictStr = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_dict(self) -> dict[str, Any]:
        """As chat templates read it: with the arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError as error:
            raise ConfigError(f"a call's arguments are not JSON: {error}", where="request body", key="messages") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolFunction(Config):
    """A function that may be called."""

    name: StrictStr
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema."""
    strict: StrictBool = False
    """Accepted; arguments follow the schema either way."""


class Tool(Config):
    """A tool as the OpenAI wire has it."""

    type: Literal["function"] = "function"
    function: ToolFunction

    def as_dict(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class ToolChoice(Config):
    """A choice of one tool."""

    type: Literal["function"] = "function"
    function: Annotated[dict[Literal["name"], StrictStr], Field(min_length=1)]


class JsonSchema(Config):
    """Of a ``response_format``."""

    name: StrictStr
    description: StrictStr | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema", default=None)]
    strict: StrictBool = False


class ResponseFormat(Config):
    """What the content of a reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def as_grammar(self) -> str | None:
        if self.type == "text":
            return None
        return json_grammar(None if self.json_schema is None else self.json_schema.json_schema)


class ChatMessage(Config):
    """A message as the OpenAI wire has it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr | tuple[TextPart, ...] | None = None
    name: StrictStr | None = None
    tool_call_id: StrictStr | None = None
    tool_calls: tuple[ToolCall, ...] = ()

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
    min_p: MinP = 0.0
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
    tools: tuple[Tool, ...] = ()
    """Only for models whose chat template shows tools."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: StrictBool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    user: StrictStr | None = None
    metadata: Annotated[dict[str, Any], Field(default_factory=dict)]
    store: StrictBool = False
    presence_penalty: Annotated[StrictFloat, Field(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[StrictFloat, Field(ge=0, le=0)] = 0.0
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=0)] = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0, default_factory=dict)]

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        chosen = self.chosen_tool
        if chosen is not None and chosen not in names:
            raise ValueError(f"tool_choice names '{chosen}', which is not among the tools: {nearest(chosen, names)}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is 'required', and there are no tools")
        if self.offers_tools and self.response_format.type != "text":
            raise ValueError("give either tools or a response_format")
        return self

    @property
    def chosen_tool(self) -> str | None:
        return self.tool_choice.function["name"] if isinstance(self.tool_choice, ToolChoice) else None


class CompletionBody(Config):
    """``POST /v1/completions``: a text, token ids, or several of either."""

    model: StrictStr
    prompt: StrictStr | tuple[StrictInt, ...] | tuple[StrictStr, ...] | tuple[tuple[StrictInt, ...], ...]
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    max_tokens: Annotated[StrictInt, Field(ge=0)] = 16
    """0 only with ``echo``, to have the prompt's log-probabilities alone."""
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    seed: Seed | None = None
    stop: StrictStr | tuple[StrictStr, ...] = ()
    stop_token_ids: tuple[StrictInt, ...] = ()
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: Annotated[StrictInt, Field(ge=0, le=1)] | None = None
    echo: StrictBool = False
    """The prompt goes before the completion, with its log-probabilities where those are asked for."""
    session_id: StrictStr | None = None
    user: StrictStr | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=1)] = 1
    presence_penalty: Annotated[StrictFloat, Field(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[StrictFloat, Field(ge=0, le=0)] = 0.0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0, default_factory=dict)]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which leaves nothing to answer without echo")
        if self.stream and (self.echo or len(self.prompts()) > 1):
            raise ValueError("stream goes with one prompt, and without echo")
        if not self.prompts():
            raise ValueError("prompt is empty")
        return self

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """One by one."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if all(isinstance(each, int) for each in self.prompt):
            return (cast(tuple[int, ...], self.prompt),) if self.prompt else ()
        return cast(tuple[str | tuple[int, ...], ...], self.prompt)


def sampling_of(body: SamplingParams | ChatBody | CompletionBody, max_tokens: int, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How a body asks to draw."""
    texts = (body.stop,) if isinstance(body.stop, str) else body.stop
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        stop=tuple(text for text in texts if text),
        seed=body.seed,
    )


class AttachBody(Config):
    """``POST /admin/weights/attach``: a publisher's slot descriptor."""

    descriptor: dict[str, Any]


class UpdateBody(Config):
    """``POST /admin/weights/update``: a manifest of the attached publisher."""

    manifest: dict[str, Any]
    mode: UpdateMode = "keep"


class LoadBody(Config):
    """``POST /admin/weights/load``: whole Hugging Face weights, or a PEFT adapter over the engine's base."""

    weights_uri: StrictStr
    policy_version: StrictInt
    served_names: tuple[StrictStr, ...] | None = None
    mode: UpdateMode = "keep"


class AdapterBody(Config):
    """``POST /admin/adapters/load``: a PEFT folder, and the name under which it is asked for."""

    name: Annotated[StrictStr, Field(min_length=1)]
    path: StrictStr


class AdapterName(Config):
    """``POST /admin/adapters/drop``."""

    name: StrictStr


class PauseBody(Config):
    """``POST /admin/pause``."""

    mode: UpdateMode = "keep"
    """What becomes of the requests that run: they stay as they are, end first, or end at once."""


class TokensBody(Config):
    """``POST /admin/logprobs``."""

    token_ids: tuple[StrictInt, ...]
    adapter: StrictStr | None = None


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


_VERBATIM = ("json", "schema", "parameters", "metadata")
"""Keys below which a null is a value."""


def _without_nulls(data: Any) -> Any:
    if isinstance(data, Mapping):
        kept = ((key, value) for key, value in data.items() if value is not None)
        return {key: value if key in _VERBATIM else _without_nulls(value) for key, value in kept}
    if isinstance(data, list):
        return [_without_nulls(item) if isinstance(item, Mapping) else item for item in data]
    return data
