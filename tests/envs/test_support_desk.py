"""The desk pays for the right end state and the right fact, and for nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from evergrad.envs import SPLITS, Episode, Taskset, play
from evergrad.envs import test_environment as admit
from evergrad.types import Message, Task, Trace

CONTRACTS = ("v1", "v2")
LOOKUP = {"v1": "order(id={})", "v2": "find(num={})"}


def one(taskset: Taskset, case: str, seed: int = 0) -> tuple[Task, list[str]]:
    """A task of a case, and its demonstration."""
    task = next(task for task in taskset.stream("train", seed) if task.metadata["case"] == case)
    demonstration = taskset.open(task).demonstrate()
    assert demonstration is not None
    return task, list(demonstration)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("difficulty", ["easy", "hard", "all"])
def test_the_desk_passes_its_admission(contract: str, difficulty: str) -> None:
    report = admit("support_desk", {"contract": contract, "difficulty": difficulty})
    assert report.passed, report.rows()


def test_slices_cases_and_forms_come_as_stated() -> None:
    tasks = Taskset("support_desk").tasks("train", 2_000)
    cases = Counter(task.metadata["case"] for task in tasks)
    assert {case: round(count / 2_000, 1) for case, count in cases.items()} == pytest.approx(
        {"status": 0.25, "refund": 0.35, "cancel": 0.15, "decline": 0.25}, abs=0.06
    )
    slices = Counter(task.metadata["slice"] for task in tasks)
    assert slices["hard"] / 2_000 == pytest.approx(0.5, abs=0.05)
    for task in tasks:
        assert (task.metadata["said"] == task.metadata["id"]) == (task.metadata["slice"] == "easy")
        assert task.metadata["said"] in task.prompt[-1].content
    assert {task.metadata["slice"] for task in Taskset("support_desk", {"difficulty": "hard"}).tasks("train", 50)} == {"hard"}


def test_thousands_of_tasks_in_every_split() -> None:
    taskset = Taskset("support_desk")
    for split, count in (("train", 2_000), ("heldout", 500), ("gate", 500)):
        assert len({task.task_id for task in taskset.tasks(split, count)}) == count


def test_the_prompt_is_written_from_the_typed_functions() -> None:
    shown = {contract: Taskset("support_desk", {"contract": contract}).tasks("train", 1)[0].prompt[0] for contract in CONTRACTS}
    assert shown["v1"].role == "system"
    assert shown["v1"].content.splitlines() == [
        "Tools:",
        "order(id)",
        "refund(id, amount): if window open",
        "cancel(id): if not shipped",
        "Call one tool or answer.",
    ]
    assert "payback(num, amount, auth): if window open" in shown["v2"].content


def test_contracts_differ_in_every_name_and_share_their_scenarios() -> None:
    v1, v2 = (Taskset("support_desk", {"contract": contract}) for contract in CONTRACTS)
    assert v1.contract_hash != v2.contract_hash
    assert not {tool.name for tool in v1.tools} & {tool.name for tool in v2.tools}
    assert {"auth", "num"} <= set(v2.tools[1].parameters)
    for split in SPLITS:
        old, new = v1.tasks(split, 20, seed=1), v2.tasks(split, 20, seed=1)
        assert [task.metadata for task in old] == [task.metadata for task in new], "the same scenario stays in its split"
        assert not {task.task_id for task in old} & {task.task_id for task in new}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("case", ["status", "refund", "cancel", "decline"])
async def test_hard_tasks_are_recovered_from_through_the_tools_hint(contract: str, case: str) -> None:
    taskset = Taskset("support_desk", {"contract": contract, "difficulty": "hard"})
    task, texts = one(taskset, case)
    facts = task.metadata
    assert texts[0] == LOOKUP[contract].format(facts["said"])
    environment = taskset.open(task)
    from evergrad.envs import Episode

    shown = await Episode(environment).reply(texts[0])
    assert shown is not None
    assert shown.content == f"error: {LOOKUP[contract].format(facts['id'])}"
    assert (await play(taskset, task, texts)).reward == 1.0
    assert (await play(taskset, task, texts[1:])).reward == 1.0, "who knows the form needs no recovery"


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_what_must_not_pay(contract: str) -> None:
    taskset = Taskset("support_desk", {"contract": contract, "difficulty": "easy"})
    old = contract == "v1"
    refund, gold = one(taskset, "refund")
    facts = refund.metadata
    paid, code, ref = facts["changes"][0][2], facts["code"], facts["ref"]

    def pay(order: str, amount: Any, with_code: str = code) -> str:
        return f"refund(id={order}, amount={amount})" if old else f"payback(num={order}, amount={amount}, auth={with_code})"

    look, right, said = gold
    other = next(each for each in facts["orders"] if each != facts["id"])
    wrong: dict[str, list[str]] = {
        "no lookup, guessed reference": [f"Refunded, ref {(ref + 1) % 1000}."],
        "refunded twice": [look, right, right, said],
        "looked up twice": [look, look, right, said],
        "wrong amount": [look, pay(facts["id"], paid + 1), said],
        "other order": [look, pay(other, paid), said],
        "both orders": [look, right, pay(other, paid), said],
        "not refunded": [look, said],
        "declined": [look, "Sorry, no refund."],
        "refunded and sorry": [look, right, f"Sorry, refunded, ref {ref}."],
        "another number": [look, right, f"Refunded {paid}, ref {ref}."],
        "no fact": [look, right, "Refunded."],
        "longer number": [look, right, f"Refunded, ref {ref}0."],
        "no answer": [look, right],
    }
    if not old:
        wrong["wrong code"] = [look, pay(facts["id"], paid, "000"), said]
    for name, texts in wrong.items():
        assert (await play(taskset, refund, texts)).reward == 0.0, name
    assert (await play(taskset, refund, [look, right, f"I refunded it, ref {ref}"])).reward == 1.0

    decline, (look, said) = one(taskset, "decline")
    order = decline.metadata["id"]
    for name, texts in {
        "paid back a closed one": [look, pay(order, 50, decline.metadata["code"]), said],
        "not sorry": [look, f"Closed since {decline.metadata['answer']}."],
        "no date": [look, "Sorry, closed."],
    }.items():
        assert (await play(taskset, decline, texts)).reward == 0.0, name

    status, (look, said) = one(taskset, "status")
    for name, texts in {
        "stopped what was only asked about": [look, _stop(status.metadata, old), said],
        "sorry": [look, f"Sorry, it arrives {status.metadata['answer']}."],
        "two dates": [look, f"{said} Or June 3."],
    }.items():
        assert (await play(taskset, status, texts)).reward == 0.0, name

    cancel, (look, right, said) = one(taskset, "cancel")
    assert (await play(taskset, cancel, [look, pay(cancel.metadata["id"], 50, cancel.metadata["code"]), said])).reward == 0.0
    assert (await play(taskset, cancel, [right, said])).reward == 0.0, "cancelled by luck"
    assert (await play(taskset, cancel, [look, right, said])).reward == 1.0


def _stop(facts: Any, old: bool) -> str:
    return f"cancel(id={facts['id']})" if old else f"stop(num={facts['id']}, auth={facts['code']})"


@pytest.mark.parametrize(
    "written", ["id=id=46", "id=46", "id=", "id=K", "id=K46x", "id=xK46", "id=4K6", "id=K  46", "id=K_46", "id=KK46"]
)
async def test_only_the_exact_form_names_an_order_and_only_the_listed_slips_earn_a_hint(written: str) -> None:
    from evergrad.envs import Episode

    taskset = Taskset("support_desk", {"difficulty": "easy"})
    task, _ = one(taskset, "refund")
    order = task.metadata["id"]
    episode = Episode(taskset.open(task))
    text = f"order({written.replace('46', order[1:]).replace('K', order[0])})"
    shown = await episode.reply(text)
    assert shown is not None
    assert shown.content in ("error: no such order", "error: use order(id)")
    for change in (f"refund(id={order.lower()}, amount=50)", f"cancel(id={order[1:]}{order[0]})"):
        answered = await episode.reply(change)
        assert answered is not None
        assert answered.content == "error: no such order", "a change never takes a loose id, nor hints at it"
    assert episode.environment.changes == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_a_live_conversation_becomes_the_task_that_it_was_about(contract: str) -> None:
    """Each task played as its customer would see it, then made a task again from what was said alone."""
    taskset = Taskset("support_desk", {"contract": contract})
    for task in taskset.tasks("train", 60):
        messages = [*task.prompt]
        episode = Episode(taskset.open(task))
        await episode.start()
        for text in taskset.demonstration(task):
            shown = await episode.reply(text)
            messages.append(Message("assistant", text))
            if shown is not None:
                messages.append(shown)
        row = taskset.from_trace(Trace("t", tuple(messages)))
        assert row is not None
        again = taskset.task(row)
        assert again.prompt == task.prompt
        for fact in ("case", "id", "said", "changes", "answer", "sentence", "slice"):
            assert again.metadata[fact] == task.metadata[fact]
        assert (await play(taskset, again, taskset.demonstration(again))).reward == 1.0


@pytest.mark.parametrize("messages", [(), (Message("user", "Hello?"), Message("assistant", "Hello."))])
def test_what_is_no_case_becomes_no_task(messages: tuple[Message, ...]) -> None:
    assert Taskset("support_desk").from_trace(Trace("t", messages)) is None
