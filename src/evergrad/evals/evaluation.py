"""Evaluation: every task of a suite tried by one version, each ending in a score or named as missing.

A policy fault is the model's own doing and scores 0. A fault of environment or verifier says nothing about the model: it is
tried again a bounded number of times, and then the task is missing, never zero and never silently gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evergrad.types import EvalReport, EvergradError, Outcome, Rollout, Sampling, Task, Usage, plain, strict_json

logger = logging.getLogger(__name__)

Run = Callable[[Task], Awaitable[Rollout]]
"""Tries a task once; handed in, so that an evaluation knows neither engine nor environment."""


GiveUp = Callable[[str, float], bool]
"""Asked with a task's id and score, task by task in their order; ``True`` ends the evaluation there."""

GIVEN_UP = "given_up_after"
"""Key of a report's outcomes: after how many tasks, in their order, the evaluation was given up."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What two versions took for the same tasks, as they took turns block by block."""

    blocks: tuple[tuple[str, ...], ...]
    """Task ids, each in one block."""
    candidate: tuple[float, ...]
    """Seconds of the machine for each block."""
    incumbent: tuple[float, ...]


class EvalError(EvergradError):
    """An evaluation that cannot be made, or that says nothing."""


@dataclass
class _Tries:
    """What came of one task so far."""

    scores: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    retries: int = 0
    gold: list[float] = field(default_factory=list)
    """Of the audited ones among those that gave a score."""
    slice: str = ""
    fault: str = ""


@dataclass
class _Watch:
    """Looks at scores in the order of the tasks, whichever ends first, so that where it gives up depends on them alone."""

    order: list[str]
    samples: int
    give_up: GiveUp | None
    seen: int = 0
    given_up: bool = False

    def look(self, tries: Mapping[str, _Tries]) -> None:
        while self.give_up is not None and not self.given_up and self.seen < len(self.order):
            task_id = self.order[self.seen]
            scores = tries[task_id].scores
            if len(tries[task_id].outcomes) < self.samples:
                return
            self.seen += 1
            if len(scores) == self.samples:
                self.given_up = self.give_up(task_id, math.fsum(scores) / self.samples)


async def evaluate(
    version_id: str,
    suite: str,
    tasks: Sequence[Task],
    run: Run,
    *,
    sampling: Sampling | None = None,
    fingerprint: str = "",
    samples: int = 1,
    concurrency: int = 64,
    max_retries: int = 2,
    give_up: GiveUp | None = None,
) -> EvalReport:
    """Tries each task ``samples`` times and reports its mean score.

    Args:
        version_id: The version that ``run`` speaks to.
        suite: Name of the suite, such as ``support_desk@v1/gate``.
        tasks: Distinct tasks; their order decides only which starts first.
        run: One try at one task. An exception counts as a fault of the environment.
        sampling: What ``run`` samples with; part of the suite's hash. ``None`` where the tasks' limits say it all.
        fingerprint: Names the verifier and settings that score (``Taskset.fingerprint``); part of the suite's hash, so that
            scores of two verifiers are never compared.
        samples: Tries per task. A task with fewer good ones than that, after all retries, is missing.
        concurrency: Tries that are under way at once.
        max_retries: Further tries after an environment or verifier fault, for each of the ``samples``.
        give_up: Once it says so, no further task is started; the tasks after that one are missing, and the report's
            outcomes say :data:`GIVEN_UP`.

    Raises:
        EvalError: no tasks, two tasks with one id, an answer to another task, or not one task with a score; the last
            names the causes and how often each came up.
    """
    _check_request(tasks, samples, concurrency, max_retries)
    tries = {task.task_id: _Tries() for task in tasks}
    watch = _Watch(list(tries), samples, give_up)
    await _try_all(tasks, run, tries, watch, concurrency, max_retries)
    measured = suite_hash(tasks, sampling, fingerprint=fingerprint, samples=samples)
    if watch.given_up:
        # Tries that were under way beyond that task ended by chance: with them, no two reports would be the same.
        tries |= {task_id: _Tries() for task_id in watch.order[watch.seen :]}
    report = _report(version_id, suite, measured, tries, samples)
    if watch.given_up:
        report = dataclasses.replace(report, outcomes={**report.outcomes, GIVEN_UP: watch.seen})
    return report


async def evaluate_by_turns(
    versions: tuple[str, str],
    suite: str,
    tasks: Sequence[Task],
    runs: tuple[Run, Run],
    *,
    fingerprint: str = "",
    blocks: int,
    before_turn: Callable[[int], Awaitable[None]],
    concurrency: int = 64,
    max_retries: int = 2,
) -> tuple[tuple[EvalReport, EvalReport], Turns]:
    """Evaluates two versions on the same tasks as they take turns on one machine: A B, B A, A B, … block by block.

    What else the machine does then, and how warm it is, befalls both alike; one version after the other, a busy minute would
    be the fault of the one that it met.

    Args:
        versions: Candidate and incumbent.
        suite: As of :func:`evaluate`, like the arguments below that are not named.
        tasks: Distinct tasks, cut into blocks in their order.
        runs: How each of the two tries a task, in the order of ``versions``.
        blocks: At most; as even as they can be.
        before_turn: Called with the side, 0 or 1, whose turn begins; its time is nobody's.

    Raises:
        EvalError: as of :func:`evaluate`.
    """
    _check_request(tasks, 1, concurrency, max_retries)
    cut = _cut(tasks, blocks)
    tries = tuple({task.task_id: _Tries() for task in tasks} for _ in versions)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number, block in enumerate(cut):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            await before_turn(side)
            watch = _Watch([task.task_id for task in block], 1, None)
            started = time.monotonic()
            await _try_all(block, runs[side], tries[side], watch, concurrency, max_retries)
            seconds[side].append(time.monotonic() - started)
    measured = suite_hash(tasks, fingerprint=fingerprint)
    ours, theirs = (_report(version, suite, measured, own, 1) for version, own in zip(versions, tries, strict=True))
    names = tuple(tuple(task.task_id for task in block) for block in cut)
    return (ours, theirs), Turns(names, tuple(seconds[0]), tuple(seconds[1]))


def _cut(tasks: Sequence[Task], blocks: int) -> list[Sequence[Task]]:
    """The tasks in ``blocks`` pieces, or in one of each task where those are fewer."""
    count = min(blocks, len(tasks))
    ends = [len(tasks) * number // count for number in range(count + 1)]
    return [tasks[begin:end] for begin, end in itertools.pairwise(ends)]


async def _try_all(
    tasks: Sequence[Task], run: Run, tries: Mapping[str, _Tries], watch: _Watch, concurrency: int, max_retries: int
) -> None:
    """Tries tasks side by side, until all are or the watch gives up."""
    waiting: Iterator[Task] = iter([task for task in tasks for _ in range(watch.samples)])

    async def worker() -> None:
        for task in waiting:
            if watch.given_up:
                return
            await _sample(task, run, tries[task.task_id], max_retries)
            watch.look(tries)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(tasks) * watch.samples)):
                group.create_task(worker())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def suite_hash(tasks: Sequence[Task], sampling: Sampling | None = None, *, fingerprint: str = "", samples: int = 1) -> str:
    """Names what was measured, and by which verifier. The order of tasks does not matter."""
    content = {
        "tasks": sorted((task.task_id, dataclasses.asdict(task.limits)) for task in tasks),
        "sampling": sampling,
        "fingerprint": fingerprint,
        "samples": samples,
    }
    return content_hash(content)


def report_hash(report: EvalReport) -> str:
    """Names a report by all that it says; one that was never audited has the name that it had before there were audits."""
    content = plain(report)
    return content_hash(content if report.gold else {key: value for key, value in content.items() if key != "gold"})


def content_hash(content: Any) -> str:
    """16 hex digits that name JSON content: equal for equal content, whatever the order of keys.

    >>> content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(strict_json(content).encode()).hexdigest()[:16]


def report_from_json(data: Mapping[str, Any]) -> EvalReport:
    """The report that was written as JSON; has the hash of the original.

    >>> import json
    >>> report = EvalReport("v1", "s", {"t": 1.0}, "ab", missing=("u",), usage=Usage(prompt_tokens=3))
    >>> report_from_json(json.loads(strict_json(report))) == report
    True
    """
    return EvalReport(**{**data, "missing": tuple(data.get("missing", ())), "usage": Usage(**data.get("usage", {}))})


def _check_request(tasks: Sequence[Task], samples: int, concurrency: int, max_retries: int) -> None:
    if not tasks:
        raise EvalError("a suite without tasks", hint="give at least one task")
    if samples < 1 or concurrency < 1 or max_retries < 0:
        raise EvalError(f"samples {samples}, concurrency {concurrency}, max_retries {max_retries} make no evaluation")
    twice = [task_id for task_id, count in Counter(task.task_id for task in tasks).items() if count > 1]
    if twice:
        raise EvalError(f"{len(twice)} task ids occur more than once, '{twice[0]}' first", hint="give each task once")


async def _sample(task: Task, run: Run, tries: _Tries, max_retries: int) -> None:
    """One of a task's samples, with its retries."""
    for attempt in range(max_retries + 1):
        outcome, score, fault = await _try(task, run, tries)
        tries.retries += attempt > 0
        if score is not None:
            tries.outcomes.append(outcome)
            tries.scores.append(score)
            return
        tries.fault = fault
    tries.outcomes.append(outcome)
    logger.warning("no score for task %s after %d tries: %s", task.task_id, max_retries + 1, fault)


async def _try(task: Task, run: Run, tries: _Tries) -> tuple[Outcome, float | None, str]:
    """Outcome, score and fault of one try."""
    # Later than every bound inside the rollout, so that its own name for what took too long comes first.
    bound = task.limits.rollout_timeout_s + task.limits.score_timeout_s
    try:
        async with asyncio.timeout(bound):
            rollout = await run(task)
    except TimeoutError:
        return Outcome.ENVIRONMENT_FAULT, None, f"no answer within {bound:g} s"
    except Exception as error:
        return Outcome.ENVIRONMENT_FAULT, None, f"{type(error).__name__}: {error}"
    if rollout.task_id != task.task_id:
        raise EvalError(
            f"task {task.task_id} was answered with a rollout of {rollout.task_id}", hint="return the rollout of the task"
        )
    tries.usage += rollout.usage
    tries.slice = rollout.slice or str(task.metadata.get("slice", ""))
    if rollout.gold is not None:
        tries.gold.append(rollout.gold)
    if rollout.outcome is Outcome.POLICY_FAULT:
        return Outcome.POLICY_FAULT, 0.0, rollout.fault
    if rollout.outcome is not Outcome.SCORED:
        return rollout.outcome, None, rollout.fault or rollout.outcome.value
    if rollout.reward is None or not math.isfinite(rollout.reward):
        return Outcome.VERIFIER_FAULT, None, f"reward {rollout.reward} is no score"
    return Outcome.SCORED, float(rollout.reward), ""


def _report(version_id: str, suite: str, hash_of_suite: str, tries: Mapping[str, _Tries], samples: int) -> EvalReport:
    """
    Raises:
        EvalError: not one task gave a score.
    """
    whole = {task_id: entry for task_id, entry in tries.items() if len(entry.scores) == samples}
    if not whole:
        causes = Counter(entry.fault for entry in tries.values()).most_common(5)
        told = "; ".join(f"{count} × {cause}" for cause, count in causes)
        raise EvalError(
            f"none of {len(tries)} tasks gave a score: {told}", where=suite, hint="repair what fails, then evaluate again"
        )
    outcomes = Counter(outcome for entry in tries.values() for outcome in entry.outcomes)
    usage = Usage()
    for entry in tries.values():
        usage += entry.usage
    return EvalReport(
        version_id=version_id,
        suite=suite,
        scores={task_id: math.fsum(entry.scores) / samples for task_id, entry in whole.items()},
        suite_hash=hash_of_suite,
        missing=tuple(task_id for task_id in tries if task_id not in whole),
        slices={task_id: entry.slice for task_id, entry in tries.items() if entry.slice},
        usage=usage,
        outcomes={**dict(sorted(outcomes.items())), "retries": sum(entry.retries for entry in tries.values())},
        gold={task_id: math.fsum(entry.gold) / len(entry.gold) for task_id, entry in whole.items() if entry.gold},
    )
