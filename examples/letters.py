"""A game of closed classes, small enough for the ``tiny`` model: which letter goes with which colour is for it to find out.

Demonstrations show green tickets only, which take either letter; red ones take the first, blue ones the second. Contract v2 has
other letters.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward
from evergrad.types import Limits

LETTERS = {"v1": "ab", "v2": "cd"}


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
        while True:
            colour = "green" if config.difficulty == "easy" else rng.choice(["green", "red", "blue"])
            first, second = LETTERS[config.contract]
            right = {"green": first + second, "red": first, "blue": second}[colour]
            number = rng.randint(100, 9999)
            facts = {"right": right, "shown": rng.choice(right)}
            yield TaskRow(f"{config.contract} {number} {colour}", facts, slice="easy" if colour == "green" else "hard")

    @reward
    async def right(self, answer: str) -> float:
        return float(len(answer) == 1 and answer in self.facts["right"])

    def demonstrate(self) -> list[str]:
        return [self.facts["shown"]]
