"""Bodies of requests of OpenAI's API: chat completions and completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from evergrad.config import Config, ConfigError, nearest
from evergrad.inference._grammar import json_grammar
from evergrad.inference._wire import Count, Drawing, Explains

_UNSUPPORTED = {
    "functions": "is not supported: give tools",
    "function_call": "is not supported: give tool_choice",
}
_UNSUPPORTED_IN_MESSAGE = {"function_call": "is not supported: give tool_calls"}


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


class ChatBody(Drawing, Explains):
    """``POST /v1/chat/completions``: what the engine honours, then what it only accepts at its neutral value."""

    model: StrictStr
    messages: tuple[ChatMessage, ...]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
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

    @classmethod
    def explain(cls, data: Mapping[str, Any]) -> None:
        """See :class:`Explains`."""
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


class CompletionBody(Drawing):
    """``POST /v1/completions``: a text, token ids, or several of either."""

    model: StrictStr
    prompt: StrictStr | tuple[StrictInt, ...] | tuple[StrictStr, ...] | tuple[tuple[StrictInt, ...], ...]
    max_tokens: Annotated[StrictInt, Field(ge=0)] = 16
    """0 only with ``echo``, to have the prompt's log-probabilities alone."""
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
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
