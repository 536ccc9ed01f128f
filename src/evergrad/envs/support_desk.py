"""A shop's support desk: look the order up, then refund, cancel or decline by what the lookup says.

Easy tasks name the order as the shop writes it (``F50``); hard ones in a wrong form (``f50``, ``F-50``, ``f 50``, ``f-50``),
which the lookup refuses with the right one, so that the agent has to recover. Answers are facts that only the tools know, and
the shop's final state must be exactly what the case calls for. Under contract ``v2`` the same shop has other tool and argument
names, and every change needs an authorization, the code that comes with the lookup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from random import Random
from string import ascii_uppercase
from typing import Any, Literal

from evergrad.envs._calls import Value, format_call
from evergrad.envs._environment import Environment, EnvironmentConfig, TaskRow, ToolError, reward, tool
from evergrad.types import Limits, Trace

Case = Literal["status", "refund", "cancel", "decline"]

SHARES: Mapping[str, Mapping[Case, float]] = {
    "easy": {"status": 0.25, "refund": 0.35, "cancel": 0.15, "decline": 0.25},
    "hard": {"status": 0.08, "refund": 0.42, "cancel": 0.20, "decline": 0.30},
}
"""How often each case comes up. Who only asks where an order is has mostly copied its number; who wants money back has not."""

WRONG_FORMS: tuple[Callable[[str, str], str], ...] = (
    lambda letter, digits: f"{letter.lower()}{digits}",
    lambda letter, digits: f"{letter}-{digits}",
    lambda letter, digits: f"{letter.lower()} {digits}",
    lambda letter, digits: f"{letter.lower()}-{digits}",
)
"""How customers write an order id whose letter and digits are given."""

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_ORDER_IDS = tuple(f"{letter}{number}" for letter in ascii_uppercase for number in range(10, 100))
_LOOSE_ID = re.compile(r"([A-Za-z])[ -]?([0-9]{2})")
_REQUESTS: Mapping[bool, str] = {True: "Where is order {id}?", False: "Please refund order {id}."}
"""What customers say, by whether they only ask where it is."""
_ASKED = {status: re.compile(re.escape(text).replace(r"\{id\}", "(?P<id>.+)")) for status, text in _REQUESTS.items()}
_STATE = re.compile(
    r"(?:in transit, arrives (?P<arrives>\w+ \d+)|delivered, window open until (?P<open>\w+ \d+), paid (?P<paid>\d+)"
    r"|(?P<unshipped>not shipped)|delivered, window closed since (?P<closed>\w+ \d+))(?:, code (?P<code>\d+))?"
)
"""What a lookup says of an order, under either contract."""
_DONE = re.compile(r"done, ref (\d+)")


class SupportDesk(Environment):
    """Orders, refunds and cancellations of one shop."""

    class Config(EnvironmentConfig):
        """What the desk's tasks are like."""

        difficulty: Literal["all", "easy", "hard"] = "all"
        """``easy`` names orders as the shop does, ``hard`` in a wrong form, ``all`` half and half."""

    limits = Limits(max_turns=6, max_tokens_per_turn=28, max_total_tokens=288)

    def __init__(self, task: Any, config: Any) -> None:
        super().__init__(task, config)
        self.changes: list[list[Value]] = []
        """What was done to the shop, in order: ``["refund", id, amount]`` or ``["cancel", id]``."""
        self.looked_up: set[str] = set()

    @classmethod
    def tasks(cls, rng: Random, config: Any) -> Iterator[TaskRow]:
        while True:
            yield _draw(rng, config.difficulty)

    @classmethod
    def from_trace(cls, trace: Trace, config: Any) -> TaskRow | None:
        """The case as the lookup told it: what the customer wanted, and the state of the order that he meant."""
        asked = next((found for text in (False, True) if (found := _ASKED[text].fullmatch(trace.request.strip()))), None)
        state = next((found for result in trace.tool_results if (found := _STATE.fullmatch(result))), None)
        loose = _LOOSE_ID.fullmatch(asked["id"]) if asked else None
        if asked is None or state is None or loose is None:
            return None
        case = _case_of(state, wants_status=asked.re is _ASKED[True])
        if case is None:
            return None
        refs = [int(found[1]) for result in trace.tool_results if (found := _DONE.fullmatch(result))]
        order_id = (loose[1] + loose[2]).upper()
        date = state["arrives"] or state["open"] or state["closed"] or "January 1"
        return _row(
            case, order_id, asked["id"], date, int(state["paid"] or 11), refs[0] if refs else 100, state["code"] or "100", {}
        )

    @tool(contract="v1")
    async def order(self, id: str) -> str:
        return self._look_up("order", "id", id)

    @tool(contract="v1")
    async def refund(self, id: str, amount: int) -> str:
        """if window open"""
        return self._change("refund", id, amount)

    @tool(contract="v1")
    async def cancel(self, id: str) -> str:
        """if not shipped"""
        return self._change("cancel", id)

    @tool(contract="v2")
    async def find(self, num: str) -> str:
        return self._look_up("find", "num", num)

    @tool(contract="v2")
    async def payback(self, num: str, amount: int, auth: str) -> str:
        """if window open"""
        return self._change("refund", num, amount, code=auth)

    @tool(contract="v2")
    async def stop(self, num: str, auth: str) -> str:
        """if not shipped"""
        return self._change("cancel", num, code=auth)

    @reward
    async def resolved(self, answer: str) -> float:
        """1 when the order was looked up, the shop is as it should be, the answer says the fact and no other number, "sorry"
        stands in it exactly when declining, and no call was made twice."""
        declined = self.facts["case"] == "decline"
        return float(
            self.facts["id"] in self.looked_up  # a lucky cancellation is no help
            and self.changes == self.facts["changes"]
            and _says(answer, self.facts["answer"])
            and ("sorry" in answer.lower()) == declined
            and not self._repeated()
        )

    def lost(self) -> bool:
        """A change that was not asked for cannot be undone, and a call made twice scores 0 whatever follows."""
        return self._repeated() or self.changes != self.facts["changes"][: len(self.changes)]

    def demonstrate(self) -> list[str]:
        """As the customer writes the id first, then as the shop does; then what the lookup calls for."""
        facts = self.facts
        v2 = self.config.contract == "v2"
        lookup, key = ("find", "num") if v2 else ("order", "id")
        said = [facts["said"]] if facts["said"] != facts["id"] else []
        replies = [format_call(lookup, {key: each}) for each in [*said, facts["id"]]]
        for kind, order_id, *amount in facts["changes"]:
            name = {"refund": "payback", "cancel": "stop"}[kind] if v2 else kind
            arguments: dict[str, Value] = {key: order_id}
            arguments.update({"amount": amount[0]} if amount else {})
            arguments.update({"auth": facts["code"]} if v2 else {})
            replies.append(format_call(name, arguments))
        return [*replies, facts["sentence"]]

    def _repeated(self) -> bool:
        made = [(each.name, tuple(sorted(each.arguments.items())) or each.text) for each in self.calls]
        return len(set(made)) < len(made)

    def _look_up(self, name: str, key: str, order_id: str) -> str:
        state: str | None = self.facts["orders"].get(order_id)
        if state is None:
            known = self._recognize(order_id)
            # The right call and no word besides: small models copy what stands first, so that one in some tries goes on from
            # here, and reinforcement has something to reinforce. After "try order(…)" one in a hundred thousand did.
            raise ToolError(format_call(name, {key: known}) if known else "no such order")
        self.looked_up.add(order_id)
        with_code = self.config.contract == "v2" and not state.startswith("in transit")
        return f"{state}, code {self.facts['code']}" if with_code else state

    def _recognize(self, order_id: str) -> str | None:
        """The order that a wrong form means. One letter and two digits or nothing: a looser reading gets exploited."""
        loose = _LOOSE_ID.fullmatch(order_id)
        if loose is None:
            return None
        known = (loose[1] + loose[2]).upper()
        return known if known in self.facts["orders"] else None

    def _change(self, kind: str, order_id: str, *amount: int, code: str | None = None) -> str:
        if order_id not in self.facts["orders"]:
            raise ToolError("no such order")
        if code is not None and code != self.facts["code"]:
            raise ToolError("wrong code")
        self.changes.append([kind, order_id, *amount])
        return f"done, ref {self.facts['ref']}"


def _says(answer: str, fact: str) -> bool:
    """Whether ``answer`` holds ``fact`` as whole words, and no number that is not in it."""
    whole = re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", answer) is not None
    return whole and re.findall(r"\d+", answer) == re.findall(r"\d+", fact)


def _draw(rng: Random, difficulty: str) -> TaskRow:
    """One case. Every number is drawn whatever the case and difficulty, so that both leave ``rng`` in a like state."""
    hard = rng.random() < 0.5 if difficulty == "all" else difficulty == "hard"
    shares = SHARES["hard" if hard else "easy"]
    case = rng.choices(list(shares), weights=list(shares.values()))[0]
    order_id, *other_ids = rng.sample(_ORDER_IDS, 3)
    date, other_date = _date(rng), _date(rng)
    paid, ref, code = rng.randint(11, 99), rng.randint(100, 999), str(rng.randint(100, 999))
    wrong_form = rng.choice(WRONG_FORMS)
    said = wrong_form(order_id[0], order_id[1:]) if hard else order_id
    others = dict.fromkeys(other_ids, f"in transit, arrives {other_date}")
    return _row(case, order_id, said, date, paid, ref, code, others)


def _row(case: Case, order_id: str, said: str, date: str, paid: int, ref: int, code: str, others: Mapping[str, str]) -> TaskRow:
    """A case as a task; ``others`` are the shop's other orders and their states."""
    state, sentence, answer, changes = _outcome(case, order_id, date, paid, ref)
    facts = {
        "case": case,
        "id": order_id,
        "said": said,
        "orders": {order_id: state, **others},
        "ref": ref,
        "code": code,
        "changes": changes,
        "answer": answer,
        "sentence": sentence,
    }
    return TaskRow(_REQUESTS[case == "status"].format(id=said), facts, slice="easy" if said == order_id else "hard")


def _case_of(state: re.Match[str], *, wants_status: bool) -> Case | None:
    """Which case a lookup's result makes of a request; ``None`` for one that the desk has no rule for."""
    if wants_status:
        return "status" if state["arrives"] else None
    return "refund" if state["open"] else "cancel" if state["unshipped"] else "decline" if state["closed"] else None


def _date(rng: Random) -> str:
    return f"{rng.choice(_MONTHS)} {rng.randint(1, 28)}"


def _outcome(case: Case, order_id: str, date: str, paid: int, ref: int) -> tuple[str, str, str, list[list[Value]]]:
    """What the lookup says of the order, the sentence that ends the case well, its fact, and the changes called for."""
    if case == "status":
        return f"in transit, arrives {date}", f"It arrives {date}.", date, []
    if case == "refund":
        state = f"delivered, window open until {date}, paid {paid}"
        return state, f"Refunded, ref {ref}.", str(ref), [["refund", order_id, paid]]
    if case == "cancel":
        return "not shipped", f"Canceled, ref {ref}.", str(ref), [["cancel", order_id]]
    return f"delivered, window closed since {date}", f"Sorry, closed since {date}.", date, []
