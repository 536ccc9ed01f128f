"""Bodies of requests. A key that none of them knows is refused, with the nearest one that exists; null means absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from evergrad.config import Config, ConfigError, parse_config
from evergrad.inference._grammar import json_grammar
from evergrad.inference.config import UpdateMode
from evergrad.types import Sampling

BodyT = TypeVar("BodyT", bound=Config)
MIN_TEMPERATURE = 1e-4
"""Below it, and above 0, logits divided by it leave the range of single precision."""

_MAX_COMPLAINT = 1_000


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


class Explains:
    """A body that says in words what it does not have, instead of by the nearest spelling."""

    @classmethod
    def explain(cls, data: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: ``data`` has something of the kind.
        """


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


class Drawing(Config):
    """How tokens are drawn, in every body that asks for completions."""

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

    def stop_texts(self) -> tuple[str, ...]:
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        return tuple(text for text in texts if text)

    def sampling(self, max_tokens: int, more_stop_token_ids: Iterable[int] = ()) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*self.stop_token_ids, *more_stop_token_ids))),
            stop=self.stop_texts(),
            seed=self.seed,
        )


class SamplingParams(Drawing):
    """How to draw, in the words of ``/inference/v1/generate``."""

    max_tokens: Count = 16
    n: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    logprobs: Annotated[StrictInt, Field(ge=0, le=1)] = 1
    """Accepted for compatibility; the drawn token's is always there."""
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=1)] | None = None
    """With a number, those of the prompt's tokens too, at temperature 1."""
    structured_outputs: StructuredOutputs | None = None

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


class AttachBody(Config):
    """``POST /admin/weights/attach``: a publisher's slot descriptor."""

    descriptor: dict[str, Any]


class UpdateBody(Config):
    """``POST /admin/weights/update``: a manifest of the attached publisher."""

    manifest: dict[str, Any]
    mode: UpdateMode = "keep"
    full_precision: StrictBool = False
    """This version is not quantized, whatever the engine's configuration says."""


class LoadBody(Config):
    """``POST /admin/weights/load``: whole Hugging Face weights, or a PEFT adapter over the engine's base."""

    weights_uri: StrictStr
    policy_version: StrictInt
    served_names: tuple[StrictStr, ...] | None = None
    system_prompt: StrictStr = ""
    """Added to the system message of every chat with the version from then on."""
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
    if issubclass(model, Explains):
        model.explain(data)
    try:
        return parse_config(model, _without_nulls(data), where="request body")
    except ConfigError as error:
        what = error.what.replace("Value error, ", "")[:_MAX_COMPLAINT]
        raise ConfigError(what, where="request body", key=error.key) from error


_VERBATIM = ("json", "schema", "parameters", "metadata")
"""Keys below which a null is a value."""


def _without_nulls(data: Any) -> Any:
    if isinstance(data, dict):
        kept = ((key, value) for key, value in data.items() if value is not None)
        return {key: value if key in _VERBATIM else _without_nulls(value) for key, value in kept}
    if isinstance(data, list) and dict in map(type, data):  # most lists are thousands of token ids
        return [_without_nulls(item) if isinstance(item, dict) else item for item in data]
    return data
