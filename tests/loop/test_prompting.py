"""Tasks by what they teach: slices get what they deserve, and a run that goes on draws what it would have drawn."""

from __future__ import annotations

import copy
from collections import Counter

import pytest

from evergrad.loop._folder import LoopState
from evergrad.loop._prompting import TaskChoice
from evergrad.loop.decisions import begin_next_cycle
from evergrad.rollouts.selection import DISCOUNT
from evergrad.types import Limits, Outcome, Rollout, RolloutGroup, Task, Usage

GROUPS = 8


def tasks_of(name: str, count: int = 100) -> list[Task]:
    return [Task(f"{name}-{index}", "e", (), (), Limits(), {"slice": name}) for index in range(count)]


def group_of(task: Task, successes: int, size: int = 8) -> RolloutGroup:
    usage = Usage(prompt_tokens=60, cached_tokens=20, completion_tokens=10)
    rollouts = tuple(
        Rollout(f"r{index}", "g", task.task_id, (), Outcome.SCORED, float(index < successes), {}, usage)
        for index in range(size)
    )
    return RolloutGroup("g", rollouts)


def step(choice: TaskChoice, state: LoopState) -> list[str]:
    """One synchronous step: easy tasks always succeed, hard ones in half of the tries."""
    drawn = []
    for number in range(state.group, state.group + GROUPS):
        task = choice.task(number)
        drawn.append(task.task_id)
        choice.see(number, group_of(task, 8 if task.task_id.startswith("easy") else 4))
    choice.end_step()
    state.group += GROUPS
    return drawn


def fresh(state: LoopState) -> TaskChoice:
    return TaskChoice(state, {"easy": tasks_of("easy"), "hard": tasks_of("hard")}, seed=7)


def test_hard_tasks_take_over_and_no_task_comes_twice() -> None:
    state = LoopState()
    choice = fresh(state)
    drawn = [step(choice, state) for _ in range(12)]
    late = Counter(task.partition("-")[0] for tasks in drawn[6:] for task in tasks)
    assert late["hard"] > 2.5 * late["easy"] > 0
    flat = [task for tasks in drawn for task in tasks]
    assert len(set(flat)) == len(flat) == 12 * GROUPS
    assert sum(state.slices_taken.values()) == len(flat)
    successes, failures, tokens = state.slices["hard"]
    assert successes == failures
    assert tokens / (successes + failures) == 50
    figures = choice.figures(8)
    assert figures["success_hard"] == pytest.approx(0.5)
    assert figures["success_easy"] > 0.9
    assert 0.7 < figures["informative_expected"] < 0.9


def test_a_run_that_goes_on_draws_what_it_would_have_drawn() -> None:
    state = LoopState()
    choice = fresh(state)
    for _ in range(3):
        step(choice, state)
    saved = copy.deepcopy(state)
    for number in range(state.group, state.group + 5):  # under way when the process was killed
        choice.task(number)
    again = fresh(saved)
    assert [step(choice, state) for _ in range(3)] == [step(again, saved) for _ in range(3)]
    assert state == saved


def test_what_has_not_ended_counts_when_it_has_and_earlier_contracts_never() -> None:
    state = LoopState()
    choice = fresh(state)
    early, late = choice.task(0), choice.task(2)
    choice.see(1, group_of(early, 4))
    choice.see(2, group_of(late, 4))
    choice.end_step()
    assert sum(state.slices_taken.values()) == 1
    choice.see(0, group_of(early, 4))
    choice.end_step()
    assert sum(state.slices_taken.values()) == 2
    assert sum(sum(numbers[:2]) for numbers in state.slices.values()) == pytest.approx(8 + 8 * DISCOUNT)


def test_the_next_cycle_begins_with_an_open_mind() -> None:
    state = LoopState(slices={"hard": [1.0, 1.0, 5.0]}, slices_taken={"hard": 3})
    begin_next_cycle(state, "schedule")
    assert (state.slices, state.slices_taken) == ({}, {})
