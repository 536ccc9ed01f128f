"""Families of reasoning_gym, strictly scored."""

from __future__ import annotations

from typing import Any

import pytest

from evergrad.config import ConfigError
from evergrad.envs import EnvError, Taskset, play
from evergrad.envs import test_environment as admit
from evergrad.envs.reasoning import CLEAN_FAMILIES, UNSAFE_FAMILIES

SUMS = {"families": {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}, "max_tokens": 12}


def test_sums_of_two_small_numbers_are_asked_in_a_few_words() -> None:
    taskset = Taskset("reasoning", SUMS)
    tasks = taskset.tasks("train", 500)
    for task in tasks:
        system, user = task.prompt
        assert (system.role, system.content, user.role) == ("system", "", "user")
        left, sign, right, equals = user.content.split()
        assert (sign in "+-", equals) == (True, "=")
        assert all(1 <= len(each) <= 2 for each in (left, right))
        gold = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert taskset.open(task).demonstrate() == [str(gold)]
        assert (task.limits.max_turns, task.limits.max_tokens_per_turn) == (1, 12)
    assert {task.metadata["slice"] for task in tasks} == {"chain_sum"}


async def test_near_misses_and_hedges_score_nothing() -> None:
    taskset = Taskset("reasoning", SUMS)
    for task in taskset.tasks("heldout", 20):
        gold = task.metadata["entry"]["answer"]
        assert (await play(taskset, task, [gold])).reward == 1.0
        for wrong in (f"{gold} or maybe 7", f"The answer is {gold}", f"{gold}5", f"{gold}/8", ""):
            assert (await play(taskset, task, [wrong])).reward == 0.0, wrong


@pytest.mark.parametrize("family", CLEAN_FAMILIES)
def test_each_default_family_passes_its_admission(family: str) -> None:
    report = admit("reasoning", {"families": {family: {}}, "max_tokens": 96}, n=25)
    failed = [row for row in report.rows() if row[1] == "FAIL"]
    assert not failed


async def test_not_a_number_is_no_number_of_any_list() -> None:
    taskset = Taskset("reasoning", {"families": {"number_sorting": {}}})
    for task in taskset.tasks("train", 5):
        count = len(task.metadata["entry"]["metadata"]["sorted_numbers"])
        for word in ("NaN", '"nan"', "Infinity"):
            assert (await play(taskset, task, ["[" + ", ".join([word] * count) + "]"])).reward == 0.0


def test_unsafe_families_are_refused_with_the_reason() -> None:
    for family, reason in UNSAFE_FAMILIES.items():
        with pytest.raises(ConfigError, match=reason):
            Taskset("reasoning", {"families": {family: {}}})
    with pytest.raises(EnvError, match="did you mean 'chain_sum'"):
        Taskset("reasoning", {"families": {"chain_sums": {}}}).tasks("train", 1)
    with pytest.raises(EnvError, match=r"parameters do not fit.*family chain_sum"):
        Taskset("reasoning", {"families": {"chain_sum": {"terms": 3}}}).tasks("train", 1)
    with pytest.raises(ConfigError, match="at least one"):
        Taskset("reasoning", {"families": {}})


def test_no_family_evaluates_what_the_model_wrote(tmp_path: Any) -> None:
    """Families that could run an answer as code are on the refused list: each other one is tried with an answer that would."""
    from reasoning_gym.factory import DATASETS

    assert set(UNSAFE_FAMILIES) <= set(DATASETS)
    target = tmp_path / "written"
    attack = f"open({str(target)!r}, 'w').close()"
    import reasoning_gym

    for family in ("basic_arithmetic", "propositional_logic", "number_sorting", "bitwise_arithmetic", "codeio", "chain_sum"):
        dataset = reasoning_gym.create_dataset(family, seed=0, size=1)
        for answer in (attack, f"[{attack}]", f"__import__('pathlib').Path({str(target)!r}).touch()"):
            try:
                dataset.score_answer(answer, dataset[0])
            except Exception:
                continue
    assert not target.exists()


def test_the_same_problem_drawn_twice_is_one_task() -> None:
    taskset = Taskset(
        "reasoning", {"families": {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}}
    )
    everything = [task for split in ("train", "heldout", "gate") for task in taskset.stream(split)]
    questions = [task.prompt[-1].content for task in everything]
    assert len(set(questions)) == len(questions) <= 200
