"""One try at one task, as texts: what the model says goes in, what it is shown comes out, in the end a score.

Everything an environment's own code can do wrong is caught here, once, and becomes one of two named faults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad.envs._bounded import StrayExitError, TimeLimitError, bounded
from evergrad.envs._calls import Call, Malformed, convert, parse_reply
from evergrad.envs._environment import BoundTool, Environment, ToolCall, ToolError
from evergrad.types import Message

_CAUGHT = (Exception, SystemExit)
"""What bounded code of an environment may raise without ending the process; a cancelled rollout stays cancelled."""


MAX_REWARD = 1e9
"""A larger one is a broken verifier, and would drown every other advantage."""


class EnvironmentFault(Exception):
    """Set-up or a tool failed; says nothing about the policy. The text names what failed and how."""


class VerifierFault(Exception):
    """A reward raised, ran out of time, or gave no finite number. The text names which and how."""


@dataclass(frozen=True, slots=True)
class Score:
    """A verified outcome: finite ``reward``, and its parts by the name of their method."""

    reward: float
    parts: Mapping[str, float]


class Episode:
    """Runs one environment instance.

    >>> import asyncio
    >>> from evergrad.envs import Taskset
    >>> taskset = Taskset("support_desk")
    >>> task = taskset.tasks("train", 1, seed=0)[0]
    >>> async def perfect() -> float:
    ...     episode = Episode(taskset.open(task))
    ...     await episode.start()
    ...     for text in episode.environment.demonstrate():
    ...         await episode.reply(text)
    ...     return (await episode.score()).reward
    >>> asyncio.run(perfect())
    1.0
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.answer: str | None = None
        """The final answer, once given."""
        self._limits = environment.task.limits
        self._tools = {each.spec.name: each for each in environment.tools(environment.config.contract)}

    async def start(self) -> None:
        """Runs ``setup``. Raises EnvironmentFault."""
        try:
            await bounded(self.environment.setup(), self._limits.tool_timeout_s)
        except _CAUGHT as error:
            raise EnvironmentFault(f"setup {_describe(error)}") from error

    async def reply(self, text: str) -> Message | None:
        """Takes what the model said; the tool's answer, or ``None`` when the text was the final answer or all is lost.

        Raises:
            EnvironmentFault: the tool raised or ran out of time.
        """
        parsed = parse_reply(text) if self._tools else None
        if parsed is None:
            self.answer = text.strip()
            return None
        name, result = parsed.name, self._refuse(parsed)
        arguments: dict[str, Any] = {}
        if isinstance(parsed, Call) and not result:
            arguments, result = self._arguments(self._tools[name], parsed)
        refused = bool(result)
        if not refused:
            result = await self._run(self._tools[name], arguments)
        self.environment.calls.append(ToolCall(text.strip(), name, arguments, result, refused))
        return None if self._lost() else Message("tool", result)

    async def turn_reward(self, reply: str) -> float | None:
        """Runs the rewards of a turn on what was just said; ``None`` when the environment has none. Raises VerifierFault."""
        score = await self._judge(reply, per_turn=True)
        return score.reward if score.parts else None

    async def score(self) -> Score:
        """Runs all rewards of the whole on the final answer. Raises VerifierFault."""
        score = await self._judge(self.answer or "", per_turn=False)
        if not score.parts:
            raise VerifierFault("the environment has no @reward method for the end")
        return score

    async def gold(self) -> float | None:
        """Asks the gold verifier about the final answer. Raises VerifierFault."""
        try:
            value = await bounded(self.environment.gold(self.answer or ""), self._limits.score_timeout_s)
        except _CAUGHT as error:
            raise VerifierFault(f"gold {_describe(error)}") from error
        if value is None:
            return None
        if isinstance(value, str) or not _finite(value) or not 0 <= value <= 1:
            raise VerifierFault(f"gold gave {value!r}, not a number in [0, 1]"[:200])
        return float(value)

    async def _judge(self, text: str, *, per_turn: bool) -> Score:
        total, parts = 0.0, {}
        for part in self.environment._rewards:
            if part.per_turn != per_turn:
                continue
            try:
                value = await bounded(getattr(self.environment, part.method)(text), self._limits.score_timeout_s)
            except _CAUGHT as error:
                raise VerifierFault(f"{part.method} {_describe(error)}") from error
            if isinstance(value, str) or not _finite(value) or abs(value) > MAX_REWARD:
                raise VerifierFault(f"{part.method} gave {value!r}, not a number within ±{MAX_REWARD:g}"[:200])
            parts[part.method] = float(value)
            total += part.weight * float(value)
        return Score(total, parts)

    async def close(self) -> str:
        """Runs ``close``; what went wrong, as text, since a rollout that is scored stays scored."""
        try:
            await bounded(self.environment.close(), self._limits.tool_timeout_s)
        except _CAUGHT as error:
            return f"close {_describe(error)}"
        return ""

    def _lost(self) -> bool:
        try:
            return self.environment.lost()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # it awaits nothing, so that whatever it raises is its own
            raise EnvironmentFault(f"lost {_describe(error)}") from error

    def _refuse(self, parsed: Call | Malformed) -> str:
        tool = self._tools.get(parsed.name)
        if tool is None:
            return f"error: tools are {', '.join(self._tools)}"
        return _usage(tool) if isinstance(parsed, Malformed) else ""

    def _arguments(self, tool: BoundTool, call: Call) -> tuple[dict[str, Any], str]:
        if not tool.required <= call.arguments.keys() or not call.arguments.keys() <= tool.types.keys():
            return {}, _usage(tool)
        converted: dict[str, Any] = {}
        for key, argument in call.arguments.items():
            value = convert(argument, tool.types[key])
            if value is None:
                return {}, f"error: {key} must be {tool.spec.parameters[key]}"
            converted[key] = value
        return converted, ""

    async def _run(self, tool: BoundTool, arguments: Mapping[str, Any]) -> str:
        try:
            result = await bounded(getattr(self.environment, tool.method)(**arguments), self._limits.tool_timeout_s)
            return result if isinstance(result, str) else json.dumps(result)
        except ToolError as error:
            return f"error: {error}"
        except _CAUGHT as error:
            raise EnvironmentFault(f"tool {tool.spec.name} {_describe(error)}") from error


def _usage(tool: BoundTool) -> str:
    return f"error: use {tool.spec.name}({', '.join(tool.spec.parameters)})"


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _describe(error: BaseException) -> str:
    if isinstance(error, (TimeLimitError, StrayExitError)):
        return str(error)
    text = f"raised {type(error).__name__}: {error}".rstrip(": ")
    return text[:300]
