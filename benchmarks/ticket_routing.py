"""A task of closed classes with the long instructions of a real agent: which desk gets a ticket.

The tiny model cannot read the instructions; it has to find out from rewards which verb belongs to which desk. Demonstrations
are of the weeks in which the rules changed: six in ten follow the old ones, under which each verb belonged to the next desk.
So the start reads the verb and mostly answers wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward
from evergrad.types import Limits

DESKS = {"refund": "red", "cancel": "green", "find": "blue", "status": "white"}
OLD_DESKS = dict(zip(DESKS, [*DESKS.values()][1:] + [*DESKS.values()][:1], strict=True))
ITEMS = ("lamp", "cup", "book", "chair", "ring", "shoes")
INSTRUCTIONS = (
    "You send each ticket to one desk. The red desk pays refunds while the window is open. The green desk can cancel an order "
    "that is not delivered. The blue desk will find what was lost. The white desk answers what the status of an order is, and "
    "when it arrives. Read the ticket, then answer with the colour of the desk, one word and nothing else. Do not call a tool. "
    "Do not say sorry, do not say thank you, do not ask for the number of the order."
)


class TicketRouting(Environment):
    """One turn, one word."""

    limits = Limits(max_turns=1, max_tokens_per_turn=6)

    class Config(EnvironmentConfig):
        shown: bool = False
        """Demonstrations: what counts as right is mostly the old rules' desk."""

    @classmethod
    def system_prompt(cls, contract: str = "v1") -> str:
        return INSTRUCTIONS

    @classmethod
    def tasks(cls, rng: Random, config: Config) -> Iterator[TaskRow]:
        while True:
            verb, desk = rng.choice(list(DESKS.items()))
            prompt = f"Please {verb} the {rng.choice(ITEMS)} of order K{rng.randint(10, 999)}."
            old = config.shown and rng.random() < 0.6
            yield TaskRow(prompt, {"desk": OLD_DESKS[verb] if old else desk})

    @reward
    async def right(self, answer: str) -> float:
        return float(answer == self.facts["desk"])

    def demonstrate(self) -> list[str]:
        return [self.facts["desk"]]
