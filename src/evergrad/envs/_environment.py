"""The native protocol: one class per environment, one instance per rollout.

A subclass gives ``tasks`` (where its tasks come from), ``@tool`` methods (what the model may do) and ``@reward`` methods
(what counts as done). The instance holds the state of one rollout, so tools and rewards simply use ``self``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, TypeVar, overload

from evergrad.config import Config
from evergrad.envs._calls import type_name
from evergrad.types import InputError, Limits, Message, Task, ToolSpec, Trace

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


class EnvError(InputError):
    """An environment that cannot be used: not found, raises at import, or does not follow the protocol."""


class ToolError(Exception):
    """Raised by a tool to tell the model what it did wrong; it reads ``error: …`` and goes on.

    Any other exception of a tool is a fault of the environment, not of the model.
    """


class EnvironmentConfig(Config):
    """What every environment can be configured with; subclasses add their own fields."""

    contract: str = "v1"
    """Which version of the tools and their arguments the model is given."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task as its environment makes it.

    >>> TaskRow("Where is lamp 7?", {"item": "lamp 7", "shelf": 31}).slice
    ''
    """

    prompt: str | tuple[Message, ...]
    """The user's request, or whole messages when there are several or a system message of one's own."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values that the instance reads as ``self.facts``; with the prompt they are the task's content."""
    slice: str = ""
    """Reports break scores down by it."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values.

        >>> row = TaskRow((Message("user", "Where is lamp 7?"),), {"shelf": 31})
        >>> TaskRow.from_dict(row.as_dict()) == row
        True
        """
        prompt = self.prompt if isinstance(self.prompt, str) else [each.as_dict() for each in self.prompt]
        return {"prompt": prompt, "facts": dict(self.facts), "slice": self.slice}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskRow:
        """The row that :meth:`as_dict` wrote."""
        prompt = data["prompt"]
        return cls(
            prompt if isinstance(prompt, str) else tuple(Message(**each) for each in prompt), data["facts"], data["slice"]
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One attempt of the model at a tool, as ``self.calls`` keeps it; also attempts that were answered ``error: …``."""

    text: str
    name: str
    arguments: Mapping[str, Any]
    result: str
    refused: bool = False
    """There is no such tool, or it takes no such arguments: answered without asking it."""


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool method and what the model is told of it."""

    spec: ToolSpec
    method: str
    types: Mapping[str, Any]
    required: frozenset[str]
    contract: str | None


@dataclass(frozen=True, slots=True)
class RewardPart:
    """A reward method and its weight in the sum."""

    method: str
    weight: float
    per_turn: bool = False
    """Asked after each turn, not at the end."""


@overload
def tool(method: Method) -> Method: ...
@overload
def tool(*, name: str = "", contract: str | None = None) -> Callable[[Method], Method]: ...
def tool(method: Method | None = None, *, name: str = "", contract: str | None = None) -> Method | Callable[[Method], Method]:
    """Marks an async method as a tool; its name, parameters and docstring are all that the model is told.

    Parameters must be annotated ``str``, ``int``, ``float``, ``bool`` or ``Literal``. Keep the docstring to the few words
    that the model needs, or leave it out: every token of it is paid in every rollout.

    Args:
        name: what the model calls it, when not the method's name.
        contract: the one contract version that has it; all versions when left out.
    """

    def mark(marked: Method) -> Method:
        marked.__evergrad_tool__ = (name or marked.__name__, contract)  # type: ignore[attr-defined]
        return marked

    return mark if method is None else mark(method)


@overload
def reward(method: Method) -> Method: ...
@overload
def reward(*, weight: float = 1.0, per_turn: bool = False) -> Callable[[Method], Method]: ...
def reward(method: Method | None = None, *, weight: float = 1.0, per_turn: bool = False) -> Method | Callable[[Method], Method]:
    """Marks ``async def method(self, answer: str) -> float``; the reward is the weighted sum of all that are marked.

    Args:
        weight: of this one in the sum.
        per_turn: ``method(self, reply: str)`` is asked after each turn instead, with what the model said, once the tool has
            answered. The sum of these is the turn's own reward (``Turn.reward``): the policy learns from it, and scores,
            reports and the gate do not see it.
    """

    def mark(marked: Method) -> Method:
        marked.__evergrad_reward__ = (float(weight), per_turn)  # type: ignore[attr-defined]
        return marked

    return mark if method is None else mark(method)


class Environment:
    """Base of all environments. See ``examples/my_environment.py`` for a whole one.

    An instance lives for one rollout: ``setup``, then tools as the model calls them, then rewards, then ``close``.
    """

    name: ClassVar[str] = ""
    """How tasks and reports call it; the class name in snake_case when left out."""
    Config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    """The configuration model; nest a subclass of ``EnvironmentConfig`` of that name to add fields."""
    instructions: ClassVar[str] = "Call one tool or answer."
    """Last line of the system message, after the list of tools."""
    limits: ClassVar[Limits] = Limits()
    policy_fault_reward: ClassVar[float] = 0.0
    """What a rollout without an answer in budget earns; set it to the worst reward where rewards can be negative."""

    _tools: ClassVar[tuple[BoundTool, ...]] = ()
    _rewards: ClassVar[tuple[RewardPart, ...]] = ()

    def __init__(self, task: Task, config: Any) -> None:
        self.task = task
        self.config = config
        self.facts: Mapping[str, Any] = task.metadata
        self.calls: list[ToolCall] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        members = [(attribute, inspect.getattr_static(cls, attribute)) for attribute in _ordered_attributes(cls)]
        cls._tools = tuple(_bind_tool(cls, name, each) for name, each in members if hasattr(each, "__evergrad_tool__"))
        cls._rewards = tuple(_bind_reward(cls, name, each) for name, each in members if hasattr(each, "__evergrad_reward__"))

    @classmethod
    def tasks(cls, rng: Random, config: Any) -> Iterator[TaskRow]:
        """Makes tasks, as many as are asked for; equal ``rng`` states give equal tasks. May repeat itself, may end."""
        raise EnvError(f"environment '{cls.name}' makes no tasks", hint="define the classmethod tasks(cls, rng, config)")

    @classmethod
    def from_trace(cls, trace: Trace, config: Any) -> TaskRow | None:
        """The task that a live conversation was about, as :meth:`tasks` would have made it, or ``None`` where none can be made:
        facts come from what the tools answered in it, and from its outcome. Its texts are redacted."""
        return None

    @classmethod
    def limits_for(cls, config: Any) -> Limits:
        """The budget of a rollout under ``config``; the class's ``limits`` unless overridden."""
        return cls.limits

    async def setup(self) -> None:
        """Runs before the first turn; fails as an environment fault."""

    async def close(self) -> None:
        """Runs after the rollout, however it ended."""

    def lost(self) -> bool:
        """Whether nothing the model may still do can earn a reward; asked after each tool call. Ends the rollout there, which
        saves the tokens of what could only fail; the rewards are asked as always."""
        return False

    def demonstrate(self) -> Sequence[str] | None:
        """The replies of a perfect agent, in order, or ``None`` where nobody knows them. Warm starts and checks use it."""
        return None

    async def gold(self, answer: str) -> float | None:
        """What the rewards stand for, in [0, 1], judged by dearer means than they are: asked of a share of the rollouts, to see
        whether the rewards can still be trusted. ``None`` where there is no such judgement."""
        return None

    def hint(self) -> str | None:
        """What a teacher is told beyond the prompt, such as the answer or a way to it, or ``None``; the policy never reads it.
        Asked of a fresh instance, before ``setup``."""
        return None

    @classmethod
    def tools(cls, contract: str) -> tuple[BoundTool, ...]:
        """The tools of one contract version, in the order in which the class defines them."""
        return tuple(each for each in cls._tools if each.contract in (None, contract))

    @classmethod
    def contracts(cls) -> tuple[str, ...]:
        """All contract versions that the class knows."""
        return tuple(sorted({each.contract for each in cls._tools if each.contract} | {"v1"}))

    @classmethod
    def system_prompt(cls, contract: str) -> str:
        """The system message: the tools' signatures, one a line, then ``instructions``; empty without tools."""
        tools = cls.tools(contract)
        if not tools:
            return ""
        return "\n".join(["Tools:", *(each.spec.signature for each in tools), cls.instructions]).strip()

    @classmethod
    def contract(cls, contract: str = "v1") -> dict[str, Any]:
        """What the model is told of the tools, as plain data; two versions differ exactly when this differs."""
        tools = [
            {
                "name": each.spec.name,
                "description": each.spec.description,
                "parameters": dict(each.spec.parameters),
                "required": sorted(each.required),
            }
            for each in cls.tools(contract)
        ]
        return {"environment": cls.name, "instructions": cls.instructions if tools else "", "tools": tools}

    @classmethod
    def contract_hash(cls, contract: str = "v1") -> str:
        """16 hex digits over :meth:`contract`."""
        return content_hash(cls.contract(contract))


def content_hash(content: Any) -> str:
    """16 hex digits over plain JSON data, whatever the order of its keys.

    >>> content_hash({"a": 1, "b": [2]}) == content_hash({"b": [2], "a": 1})
    True
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _ordered_attributes(cls: type) -> list[str]:
    """Attribute names in the order of definition, base classes first, each once."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        names.update(dict.fromkeys(base.__dict__))
    return list(names)


def _bind_tool(cls: type[Environment], attribute: str, member: Any) -> BoundTool:
    where = f"{cls.__name__}.{attribute}"
    if not inspect.iscoroutinefunction(member):
        raise EnvError("a @tool must be an async method", where=where, hint=f"write 'async def {attribute}(self, …)'")
    try:
        hints = typing.get_type_hints(member)
    except NameError as error:
        raise EnvError(f"an annotation cannot be resolved: {error}", where=where) from error
    types: dict[str, Any] = {}
    required: set[str] = set()
    for parameter in list(inspect.signature(member).parameters.values())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvError(f"parameter '{parameter.name}' has no name the model could write", where=where)
        annotation = hints.get(parameter.name)
        if type_name(annotation) is None:
            raise EnvError(
                f"parameter '{parameter.name}' needs a type that a call can carry",
                where=where,
                hint="annotate it as str, int, float, bool or Literal",
            )
        types[parameter.name] = annotation
        if parameter.default is parameter.empty:
            required.add(parameter.name)
    name, contract = member.__evergrad_tool__
    description = " ".join((member.__doc__ or "").split())
    spec = ToolSpec(name, description, {key: str(type_name(value)) for key, value in types.items()})
    return BoundTool(spec, attribute, types, frozenset(required), contract)


def _bind_reward(cls: type[Environment], attribute: str, member: Any) -> RewardPart:
    where = f"{cls.__name__}.{attribute}"
    if not inspect.iscoroutinefunction(member):
        raise EnvError("a @reward must be an async method", where=where)
    if len(inspect.signature(member).parameters) != 2:
        hint = f"write 'async def {attribute}(self, answer: str) -> float'"
        raise EnvError("a @reward takes self and the answer", where=where, hint=hint)
    weight, per_turn = member.__evergrad_reward__
    return RewardPart(attribute, weight, per_turn)
