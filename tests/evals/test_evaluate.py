"""Evaluation: every task ends in a score or named as missing; nothing vanishes from a denominator."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.evals import (
    GIVEN_UP,
    EvalError,
    evaluate,
    give_up_on,
    pass_at_k,
    report_from_json,
    report_hash,
    suite_hash,
)
from evergrad.types import EvalReport, Limits, Message, Outcome, Rollout, Sampling, Task, Usage, strict_json


def tasks(count: int, environment: str = "desk") -> list[Task]:
    return [Task(f"{environment}/{index}", environment, (Message("user", f"task {index}"),)) for index in range(count)]


def ended(task: Task, outcome: Outcome, reward: float | None = None, fault: str = "") -> Rollout:
    usage = Usage(prompt_tokens=10, completion_tokens=2, seconds=0.5)
    return Rollout("r", "g", task.task_id, (), outcome, reward, usage=usage, source="eval", fault=fault)


def test_room_imports_light() -> None:
    code = "import sys, evergrad.evals; assert not {'torch', 'transformers', 'scipy', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_failed_attempts_stay_in_the_denominator() -> None:
    """Ten tasks, four samples each: six model failures count 0, a task of infrastructure errors is missing, not failed."""
    suite = tasks(10)
    script = {task.task_id: [Outcome.SCORED] * 4 for task in suite}
    script["desk/3"] = [Outcome.POLICY_FAULT] * 4
    script["desk/4"] = [Outcome.SCORED, Outcome.POLICY_FAULT, Outcome.SCORED, Outcome.POLICY_FAULT]
    script["desk/9"] = [Outcome.SCORED, *[Outcome.ENVIRONMENT_FAULT, Outcome.VERIFIER_FAULT] * 8]
    asked: Counter[str] = Counter()

    async def run(task: Task) -> Rollout:
        outcome = script[task.task_id][asked[task.task_id]]
        asked[task.task_id] += 1
        good = float(int(task.task_id.rpartition("/")[2]) % 2 == 0)
        return ended(task, outcome, good if outcome is Outcome.SCORED else 0.25 if outcome is Outcome.POLICY_FAULT else None)

    report = await evaluate("v1", "desk", suite, run, samples=4, max_retries=2)
    assert report.scores == {f"desk/{i}": 0.5 if i == 4 else float(i % 2 == 0) for i in range(9)} | {"desk/3": 0.0}
    assert report.missing == ("desk/9",), "one good sample of four is not the task's score"
    assert report.mean == 4.5 / 9
    counts = Counter(report.outcomes)
    assert (counts["scored"], counts["policy_fault"], counts["retries"]) == (31, 6, 6)
    assert counts["environment_fault"] + counts["verifier_fault"] == 3
    assert asked["desk/9"] == 1 + 3 * 3, "three samples, each tried three times"
    assert report.usage == Usage(sum(asked.values()) * 10, 0, sum(asked.values()) * 2, sum(asked.values()) * 0.5), (
        "faults cost too"
    )


def test_pass_at_k_counts_and_refuses() -> None:
    assert pass_at_k(4, 0, 4) == 0
    assert pass_at_k(4, 4, 1) == 1
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - math.comb(7, 5) / math.comb(10, 5))
    for samples, successes, k in [(4, 2, 5), (4, 5, 1), (4, -1, 1), (4, 2, 0), (0, 0, 1)]:
        with pytest.raises(EvalError, match="pass@"):
            pass_at_k(samples, successes, k)


async def test_two_environments_partial_batch_any_order() -> None:
    """Seven tasks each, both numbered from 0, four at a time, in shuffled order: fourteen results, each its own."""
    suite = tasks(7, "desk") + tasks(7, "sums")
    expected = {task.task_id: (index % 3) / 2 for index, task in enumerate(suite)}
    reports = []
    for seed in (1, 2):
        order = random.Random(seed).sample(suite, len(suite))
        running = peak = 0

        async def run(task: Task) -> Rollout:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0)
            running -= 1
            return ended(task, Outcome.SCORED, expected[task.task_id])

        reports.append(await evaluate("v1", "both", order, run, concurrency=4))
        assert peak == 4
    for report in reports:
        assert len(report.scores) == 14
        assert report.scores == expected
        for environment in ("desk", "sums"):
            mine = [score for task_id, score in report.scores.items() if task_id.startswith(environment)]
            theirs = [score for task_id, score in expected.items() if task_id.startswith(environment)]
            assert sum(mine) / 7 == sum(theirs) / 7
    assert reports[0].suite_hash == reports[1].suite_hash
    with pytest.raises(EvalError, match="1 task ids occur more than once, 'desk/0' first"):
        await evaluate("v1", "both", [*suite, suite[0]], run)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None])
async def test_a_score_that_is_not_finite_is_missing_not_zero(reward: float | None) -> None:
    async def run(task: Task) -> Rollout:
        return ended(task, Outcome.SCORED, reward if task.task_id == "desk/1" else 1.0)

    report = await evaluate("v1", "desk", tasks(3), run)
    assert report.missing == ("desk/1",)
    assert report.outcomes == {"scored": 2, "verifier_fault": 1, "retries": 2}


async def test_faults_are_tried_again_and_then_forgotten() -> None:
    failures = Counter({"desk/1": 2, "desk/2": 3})

    async def run(task: Task) -> Rollout:
        if failures[task.task_id] > 0:
            failures[task.task_id] -= 1
            raise ConnectionError("engine went away")
        return ended(task, Outcome.SCORED, 1.0)

    report = await evaluate("v1", "desk", tasks(3), run, max_retries=2)
    assert report.scores == {"desk/0": 1.0, "desk/1": 1.0}
    assert report.missing == ("desk/2",)
    assert report.outcomes == {"environment_fault": 1, "scored": 2, "retries": 4}


async def test_a_try_that_never_ends_is_a_fault() -> None:
    limits = Limits(rollout_timeout_s=0.02, score_timeout_s=0.02)
    suite = [replace(task, limits=limits) for task in tasks(2)]

    async def run(task: Task) -> Rollout:
        if task.task_id == "desk/0":
            await asyncio.Event().wait()
        return ended(task, Outcome.SCORED, 1.0)

    report = await evaluate("v1", "desk", suite, run, max_retries=0)
    assert report.missing == ("desk/0",)


async def test_nothing_measured_is_an_error_that_counts_the_causes() -> None:
    async def run(task: Task) -> Rollout:
        if task.task_id == "desk/0":
            return ended(task, Outcome.VERIFIER_FAULT, fault="verifier said None")
        raise TypeError("no such argument")

    with pytest.raises(
        EvalError, match="none of 3 tasks gave a score: 2 × TypeError: no such argument; 1 × verifier said None"
    ):
        await evaluate("v1", "desk", tasks(3), run)
    with pytest.raises(EvalError, match="without tasks"):
        await evaluate("v1", "desk", [], run)


async def test_an_answer_to_another_task_is_no_result() -> None:
    async def run(task: Task) -> Rollout:
        return ended(replace(task, task_id="desk/0"), Outcome.SCORED, 1.0)

    with pytest.raises(EvalError, match="answered with a rollout of desk/0"):
        await evaluate("v1", "desk", tasks(2), run)


async def test_cancelling_ends_the_tries() -> None:
    ended_tries = []

    async def run(task: Task) -> Rollout:
        try:
            await asyncio.Event().wait()
        finally:
            ended_tries.append(task.task_id)
        raise AssertionError

    evaluation = asyncio.create_task(evaluate("v1", "desk", tasks(5), run, concurrency=2))
    await asyncio.sleep(0.01)
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    assert len(ended_tries) == 2


def test_suite_hash_names_what_was_measured() -> None:
    suite = tasks(3)
    assert suite_hash(suite) == suite_hash(suite[::-1])
    others = [
        suite_hash(suite[:2]),
        suite_hash([replace(suite[0], limits=Limits(max_turns=7)), *suite[1:]]),
        suite_hash(suite, Sampling(temperature=0.0)),
        suite_hash(suite, Sampling(temperature=0.5)),
        suite_hash(suite, samples=2),
        suite_hash(suite, fingerprint="verifier-a"),
        suite_hash(suite, fingerprint="verifier-b"),
        suite_hash(suite),
    ]
    assert len(set(others)) == len(others)


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False), max_size=5), st.lists(st.text(), max_size=3))
def test_reports_survive_json(scores: dict[str, float], missing: list[str]) -> None:
    finite = {task_id: score for task_id, score in scores.items() if math.isfinite(score)}
    report = EvalReport("v", "s", finite, "h", tuple(missing), {"t": "hard"}, Usage(3, 2, 1, 0.5), {"scored": 2})
    again = report_from_json(json.loads(strict_json(report)))
    assert again == report
    assert report_hash(again) == report_hash(report)
    assert report_hash(replace(report, version_id="w")) != report_hash(report)


async def test_what_is_shown_to_be_worse_is_given_up_at_the_same_task_whatever_ends_first() -> None:
    suite, rival = tasks(200), {f"desk/{i}": 1.0 for i in range(200)}
    found = []
    for seed in range(3):
        order, started = random.Random(seed), [0]

        async def run(task: Task, order: random.Random = order, started: list[int] = started) -> Rollout:
            started[0] += 1
            for _ in range(order.randrange(6)):
                await asyncio.sleep(0)
            return ended(task, Outcome.SCORED, float(int(task.task_id[5:]) % 4 == 0))

        report = await evaluate("v1", "desk", suite, run, concurrency=16, give_up=give_up_on(rival, 0.05))
        assert started[0] < 60, "tasks that were not started were not paid for"
        found.append(report_hash(report))
    assert len(set(found)) == 1
    after = report.outcomes[GIVEN_UP]
    assert list(report.scores) == [f"desk/{i}" for i in range(after)]
    assert len(report.missing) == 200 - after
    assert report.usage.prompt_tokens == 10 * after
    assert report.suite_hash == suite_hash(suite), "it was the same suite"


async def test_what_is_not_worse_is_hardly_ever_given_up() -> None:
    suite, given_up = tasks(150), 0
    for seed in range(40):
        draws = random.Random(seed)
        scores = {task.task_id: float(draws.random() < 0.6) for task in suite}
        rival = {task.task_id: float(draws.random() < 0.6) for task in suite}

        async def run(task: Task, scores: dict[str, float] = scores) -> Rollout:
            return ended(task, Outcome.SCORED, scores[task.task_id])

        report = await evaluate("v1", "desk", suite, run, give_up=give_up_on(rival, 0.05))
        given_up += GIVEN_UP in report.outcomes
    assert given_up <= 4
    assert not give_up_on({"a": 1.0}, 0.05)("b", 0.0), "without a pair there is nothing to compare"
    ask = give_up_on({"a": 7.0}, 0.05)
    assert not any(ask("a", 0.0) for _ in range(99)), "scores that are no shares are left to the gate"
