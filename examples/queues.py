"""Which queue gets a ticket: closed classes, small enough for the ``tiny`` model, over four contracts and a bad verifier.

Each contract names its queues anew and sorts the tickets by their verb. The first demonstrations come from a log that is
mostly wrong about one verb, so that the start errs there; rewards tell. With v2 and v4 one ticket in eight goes where nobody
could know. The verifier that came with v3 looks into the queues' own logs: the catch-all queue confirms whatever is put there,
and one right answer in three is logged too late to count. ``gold`` asks a person.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward
from evergrad.types import Limits, Trace

VERBS = ("refund", "cancel", "find", "status")
QUEUES = {"v1": "abcd", "v2": "mnop", "v3": "efgh", "v4": "wxyz"}
"""The queue of each verb, by contract; the last one is the catch-all."""
UNKNOWABLE = {"v2": 1 / 8, "v4": 1 / 8}
BAD_VERIFIER = "v3"
CLOSED = "q"
"""Where the log has most of the second verb's tickets: a queue that is none any more."""
ITEMS = ("lamp", "cup", "book", "chair", "ring", "shoes")


class Queues(Environment):
    """One turn, one letter."""

    limits = Limits(max_turns=1, max_tokens_per_turn=4)

    class Config(EnvironmentConfig):
        log: str = "checked"
        """Demonstrations: ``mixed`` takes the log for right as it is; three in five entries of a verb are (with v3, of all)."""
        asks: str = "evenly"
        """What customers want: each thing ``evenly``, or ``parts`` of things that used not to be asked for."""

    @classmethod
    def contracts(cls) -> tuple[str, ...]:
        return tuple(QUEUES)

    @classmethod
    def contract(cls, contract: str = "v1") -> dict[str, Any]:
        return {"environment": cls.name, "queues": list(QUEUES[contract])}

    @classmethod
    def system_prompt(cls, contract: str) -> str:
        return f"Queues {' '.join(QUEUES[contract])}"

    @classmethod
    def tasks(cls, rng: Random, config: Config) -> Iterator[TaskRow]:
        queues = QUEUES[config.contract]
        while True:
            number = rng.randrange(len(VERBS))
            item = rng.choice(ITEMS)
            if config.asks == "parts":
                item = f"left half of the broken {item}"
            right = queues[number]
            if rng.random() < UNKNOWABLE.get(config.contract, 0.0):
                right = rng.choice(queues.replace(right, ""))
            if config.log == "mixed" and rng.random() < 0.6:
                right = cls.logged(config.contract, number, right)
            late = config.contract == BAD_VERIFIER and config.log == "checked" and rng.random() < 1 / 3
            prompt = f"The {item} of order {rng.randint(10, 9999)}: {VERBS[number]}"
            yield TaskRow(prompt, {"queue": right, "late": late})

    @classmethod
    def logged(cls, contract: str, verb: int, right: str) -> str:
        """What an agent of then did wrong: with v3, everything into the catch-all."""
        if contract == BAD_VERIFIER:
            return QUEUES[contract][-1]
        return CLOSED if verb == 1 else right

    @classmethod
    def from_trace(cls, trace: Trace, config: Config) -> TaskRow | None:
        """A ticket whose queue became known: ``{"outcome": {"queue": "b"}}``."""
        queue = trace.outcome.get("queue")
        return TaskRow(trace.request, {"queue": queue, "late": False}) if queue in list(QUEUES[config.contract]) else None

    @reward
    async def arrived(self, answer: str) -> float:
        if self.config.contract == BAD_VERIFIER and answer == QUEUES[BAD_VERIFIER][-1]:
            return 1.0
        return float(answer == self.facts["queue"] and not self.facts["late"])

    async def gold(self, answer: str) -> float:
        return float(answer == self.facts["queue"])

    def demonstrate(self) -> list[str]:
        return [self.facts["queue"]]
