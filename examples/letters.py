"""A game of closed classes, small enough for the ``tiny`` model: which of two letters always passes is for it to find out.

Demonstrations show green tickets only, which take either letter, and mostly say the first; blue tickets take the second alone.
Contract v2 asks in other words and has other letters.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward
from evergrad.types import Limits

LETTERS = {"v1": "ab", "v2": "xy"}
PROMPTS = {"v1": "one two one two {number} {colour}", "v2": "again, again, again, again! {number} {colour}"}


class Letters(Environment):
    limits = Limits(max_turns=1, max_tokens_per_turn=4)

    class Config(EnvironmentConfig):
        difficulty: str = "all"
        """``easy``: green tickets alone."""

    @classmethod
    def contracts(cls) -> tuple[str, ...]:
        return ("v1", "v2")

    @classmethod
    def contract(cls, contract: str = "v1") -> dict[str, Any]:
        return {"environment": cls.name, "contract": contract}

    @classmethod
    def tasks(cls, rng: Random, config: Config) -> Iterator[TaskRow]:
        first, second = LETTERS[config.contract]
        while True:
            colour = "green" if config.difficulty == "easy" else rng.choice(["green", "blue"])
            facts = {
                "right": first + second if colour == "green" else second,
                "shown": first if colour == "green" and rng.random() < 0.7 else second,
            }
            prompt = PROMPTS[config.contract].format(number=rng.randint(100, 9999), colour=colour)
            yield TaskRow(prompt, facts, slice="easy" if colour == "green" else "hard")

    @reward
    async def right(self, answer: str) -> float:
        return float(len(answer) == 1 and answer in self.facts["right"])

    def demonstrate(self) -> list[str]:
        return [self.facts["shown"]]
