from collections.abc import Iterator
from random import Random

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward, tool


class Warehouse(Environment):
    """Says on which shelf a thing lies. Only the stock list knows, so a guess cannot pass."""

    @classmethod
    def tasks(cls, rng: Random, config: EnvironmentConfig) -> Iterator[TaskRow]:
        while True:
            item = f"{rng.choice(['lamp', 'rope', 'drill', 'paint'])} {rng.randint(1, 99)}"
            yield TaskRow(f"Where is {item}?", {"item": item, "shelf": rng.randint(10, 99)})

    @tool
    async def find(self, item: str) -> str:
        return f"shelf {self.facts['shelf']}" if item == self.facts["item"] else "error: not in stock"

    @reward
    async def correct(self, answer: str) -> float:
        return float(answer == f"It is on shelf {self.facts['shelf']}.")

    def demonstrate(self) -> list[str]:
        return [f"find(item={self.facts['item']})", f"It is on shelf {self.facts['shelf']}."]
