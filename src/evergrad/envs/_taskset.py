"""Tasks by the thousand: drawn by seed, named by content, split so that training never sees what measures it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, TypeVar

from evergrad.config import nearest, parse_config
from evergrad.envs._author import AUTHOR_S, ask_author, place
from evergrad.envs._environment import BoundTool, EnvError, Environment, TaskRow, content_hash
from evergrad.envs._load import load_environment, source_hash
from evergrad.types import Message, Task, ToolSpec, Trace

T = TypeVar("T")

SPLITS: Mapping[str, tuple[float, float]] = {"train": (0.0, 0.8), "heldout": (0.8, 0.9), "gate": (0.9, 1.0)}
"""Share of the hash range that each split owns. ``heldout`` is for measuring on the way, ``gate`` for promotion alone."""

_MISSES_ALLOWED = 5_000
"""Draws in a row without a new task after which a split is taken to hold no more."""


class Taskset:
    """The tasks of one environment under one configuration.

    >>> taskset = Taskset("support_desk", {"difficulty": "easy"})
    >>> [task.metadata["slice"] for task in taskset.tasks("train", 2, seed=0)]
    ['easy', 'easy']
    """

    def __init__(self, environment: str, config: Mapping[str, Any] | None = None) -> None:
        """Loads ``environment`` (a name or a ``.py`` path) and checks ``config`` against its ``Config``.

        Raises:
            EnvError: the environment cannot be loaded, or knows no such contract.
            ConfigError: an unknown key or a value that does not fit.
        """
        self.environment = environment
        self.environment_class: type[Environment] = load_environment(environment)
        self.name = self.environment_class.name
        self.config = parse_config(self.environment_class.Config, dict(config or {}), where=f"environment {self.name}")
        contracts = self._ask("contracts", self.environment_class.contracts, "return the names of all contracts, as strings")
        if not isinstance(contracts, tuple | list) or not all(isinstance(each, str) for each in contracts):
            raise self._wrong("contracts", f"gave {contracts!r}"[:200], "return a tuple of strings, such as ('v1', 'v2')")
        if self.config.contract not in contracts:
            hint = nearest(self.config.contract, contracts)
            raise EnvError(f"environment '{self.name}' has no contract '{self.config.contract}'", hint=hint)
        self._tool_specs = tuple(each.spec for each in self._tools)

    @property
    def _tools(self) -> tuple[BoundTool, ...]:
        return self.environment_class.tools(self.config.contract)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """What the model is told of the tools, under the configured contract."""
        return self._tool_specs

    @property
    def suite(self) -> str:
        """How reports name the environment under this contract, such as ``support_desk@v1``."""
        return f"{self.name}@{self.config.contract}"

    def contract(self) -> dict[str, Any]:
        """The tools' schema and descriptions as plain data."""
        return self.environment_class.contract(self.config.contract)

    @property
    def contract_hash(self) -> str:
        """16 hex digits that change exactly when the tools' schema or descriptions do."""
        return self.environment_class.contract_hash(self.config.contract)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the environment's source file, configuration and contract: which version made a reward."""
        return content_hash([source_hash(self.environment_class), self.config.model_dump(mode="json"), self.contract()])

    def tasks(self, split: str, n: int, seed: int = 0) -> tuple[Task, ...]:
        """``n`` distinct tasks of a split; the first ones of a longer list under the same seed are the same.

        Raises:
            EnvError: unknown split, or it holds fewer than ``n`` distinct tasks.
        """
        found: list[Task] = []
        if n > 0:
            for task in self.stream(split, seed):
                found.append(task)
                if len(found) == n:
                    break
        if len(found) < n:
            hint = "ask for fewer, or make the environment's tasks more varied"
            raise EnvError(f"split '{split}' of '{self.name}' gave only {len(found)} distinct tasks of {n}", hint=hint)
        return tuple(found)

    def stream(self, split: str, seed: int = 0) -> Iterator[Task]:
        """Distinct tasks of a split in an order that the seed decides, until no new one turns up."""
        if split not in SPLITS:
            raise EnvError(f"no split '{split}'", hint=nearest(split, SPLITS))
        low, high = SPLITS[split]
        seen: set[str] = set()
        misses, since = 0, time.monotonic()
        for row in self._rows(Random(f"{self.name}/{split}/{seed}")):
            misses += 1
            if low <= _place(self.name, row) < high:
                task = self.task(row)
                if task.task_id not in seen:
                    seen.add(task.task_id)
                    misses = 0
                    yield task
                    since = time.monotonic()
            if misses >= _MISSES_ALLOWED:
                return
            if time.monotonic() - since > AUTHOR_S:
                how = f"gave no new task of split '{split}' in {AUTHOR_S:g} s, in {misses} tries"
                raise self._wrong("tasks", how, "make tasks quicker and more varied, or end when there are no more")

    def _rows(self, rng: Random) -> Iterator[TaskRow]:
        """The author's rows one by one, each checked; the clock stands while the caller has one."""
        expected = "yield TaskRow(prompt, facts) from tasks(cls, rng, config), quickly, from the random numbers in rng"
        rows = self._ask("tasks", lambda: iter(self.environment_class.tasks(rng, self.config)), expected)
        while True:
            row = self._ask("tasks", lambda: next(rows, None), expected)
            if row is None:
                return
            if not isinstance(row, TaskRow):
                raise self._wrong("tasks", f"yielded {row!r}"[:200], expected)
            yield row

    def _ask(self, what: str, call: Callable[[], T], expected: str) -> T:
        return ask_author(self.environment_class, what, call, expected)

    def _wrong(self, what: str, how: str, expected: str) -> EnvError:
        return EnvError(f"{what}() {how}", where=place(self.environment_class, None, what), hint=expected)

    def task(self, row: TaskRow) -> Task:
        """A row as a task: its system message written from the tools, its id from all that it says.

        Raises:
            EnvError: facts that are not plain JSON values.
        """
        if "slice" in row.facts:
            raise EnvError("facts cannot hold 'slice'", where=self.name, hint="give it as TaskRow(…, slice=…)")
        prompt = (Message("user", row.prompt),) if isinstance(row.prompt, str) else row.prompt
        system = self.environment_class.system_prompt(self.config.contract)
        if system and not (prompt and prompt[0].role == "system"):
            prompt = (Message("system", system), *prompt)
        metadata = {**row.facts, "slice": row.slice}
        content = [self.name, [each.as_dict() for each in prompt], metadata, self.contract()]
        task_id = f"{self.name}/{_hash(self.name, content)}"
        limits = self._ask("limits_for", lambda: self.environment_class.limits_for(self.config), "return Limits(…)")
        return Task(task_id, self.name, prompt, self._tool_specs, limits, metadata)

    @property
    def learns_from_traffic(self) -> bool:
        """Whether the environment defines ``from_trace``."""
        return self.environment_class.from_trace.__func__ is not Environment.from_trace.__func__  # type: ignore[attr-defined]

    def from_trace(self, trace: Trace) -> TaskRow | None:
        """The task that a live conversation was about; ``None`` where the environment makes none of it.

        Raises:
            EnvError: ``from_trace`` raised, or gave something else than a row.
        """
        expected = "return TaskRow(prompt, facts) of the task that the conversation was about, or None"
        row = self._ask("from_trace", lambda: self.environment_class.from_trace(trace, self.config), expected)
        if row is not None and not isinstance(row, TaskRow):
            raise self._wrong("from_trace", f"gave {row!r}"[:200], expected)
        return row

    def open(self, task: Task) -> Environment:
        """A fresh instance for one rollout of ``task``.

        Raises:
            EnvError: the author's ``__init__`` raised.
        """
        expected = "take (self, task, config), call super().__init__(task, config) first, and leave slow work to setup()"
        return self._ask("__init__", lambda: self.environment_class(task, self.config), expected)

    def demonstration(self, task: Task) -> tuple[str, ...]:
        """What a perfect agent says to ``task``; empty where nobody knows.

        Raises:
            EnvError: ``demonstrate`` raised, or gave something else than a list of texts.
        """
        expected = "return the replies of a perfect agent as a list of texts, or None"
        environment = self.open(task)

        def ask() -> Any:
            texts = environment.demonstrate()
            return texts if texts is None or isinstance(texts, str) else tuple(texts)

        texts = self._ask("demonstrate", ask, expected)
        if isinstance(texts, str) or not all(isinstance(each, str) for each in texts or ()):
            raise self._wrong("demonstrate", f"gave {texts!r}"[:200], expected)
        return texts or ()

    @property
    def has_hints(self) -> bool:
        """Whether the environment defines ``hint``."""
        return self.environment_class.hint is not Environment.hint

    @property
    def has_gold(self) -> bool:
        """Whether the environment defines ``gold``."""
        return self.environment_class.gold is not Environment.gold

    def hint(self, task: Task) -> str:
        """What a teacher is told of ``task`` beyond its prompt; empty where there is nothing.

        Raises:
            EnvError: ``hint`` raised, or gave something else than a text.
        """
        expected = "return what a teacher is told beyond the prompt as a text, or None"
        text = self._ask("hint", self.open(task).hint, expected)
        if text is not None and not isinstance(text, str):
            raise self._wrong("hint", f"gave {text!r}"[:200], expected)
        return (text or "").strip()


def split_of(name: str, row: TaskRow) -> str:
    """Which split owns a row. Its tools do not count, so a scenario stays in its split when the contract changes.

    >>> split_of("shop", TaskRow("Where is F50?")) in SPLITS
    True
    """
    place = _place(name, row)
    return next(split for split, (low, high) in SPLITS.items() if low <= place < high)


def _place(name: str, row: TaskRow) -> float:
    prompt = row.prompt if isinstance(row.prompt, str) else [each.as_dict() for each in row.prompt]
    return (int(_hash(name, [name, prompt, dict(row.facts)]), 16) >> 11) / 2**53


def _hash(name: str, content: Any) -> str:
    try:
        return content_hash(content)
    except (TypeError, ValueError) as error:
        raise EnvError(f"facts are not plain JSON values: {error}", where=name) from error
