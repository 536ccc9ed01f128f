"""``evergrad eval``: one version on tasks of one split, greedily, one try a task."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from evergrad.config import nearest, parse_overrides
from evergrad.envs import SPLITS, Taskset
from evergrad.evals import evaluate, mean_interval
from evergrad.loop.looks import record_look
from evergrad.loop.report import percent
from evergrad.loop.traffic.converting import KEPT_ASIDE
from evergrad.registry import base_model
from evergrad.rollouts import Renderer, greedy_rollout
from evergrad.service._engines import RunningEngine, engine_on
from evergrad.service._models import open_registry
from evergrad.service._runs import run_config
from evergrad.service._screen import console, print_json, table
from evergrad.service._traffic import live_tasks
from evergrad.types import EvalReport, InputError, ModelVersion, Rollout, Task


def evaluate_version(
    run: Path, name: str, *, tasks: int, split: str, overrides: Sequence[str], seed: int, as_json: bool
) -> None:
    """Measures a version on an engine of its own, and prints success by slice and outcome.

    Raises:
        EvergradError: no such version, split or setting; fewer tasks than asked for; an engine that fails.
    """
    if split not in (*SPLITS, KEPT_ASIDE):
        raise InputError(f"unknown split '{split}'", hint=nearest(split, [*SPLITS, KEPT_ASIDE]))
    with open_registry(run) as registry:
        version = registry.find(name)
    environment = run_config(run)["environment"]
    taskset = Taskset(environment["name"], {**environment.get("settings", {}), **parse_overrides(overrides)})
    drawn = _live(run, taskset, tasks) if split == KEPT_ASIDE else taskset.tasks(split, tasks, seed)
    if split == "gate":
        # Before it begins: whoever interrupts it has seen some of it.
        record_look(run, version.version_id, [task.task_id for task in drawn])
    report = asyncio.run(_measure(run, version, taskset, drawn, split))
    if as_json:
        print_json({**dataclasses.asdict(report), "mean": report.mean, "ci95": mean_interval(list(report.scores.values()))})
    else:
        _print_report(report)


def _live(run: Path, taskset: Taskset, most: int) -> Sequence[Task]:
    """The newest tasks of live traffic that nothing was trained on, ``most`` at most: there are as many as customers made."""
    found = live_tasks(run, taskset)[-most:]
    if not found:
        raise InputError(f"no live task of {taskset.suite} is kept aside", hint=f"evergrad traffic tasks --run {run}")
    return found


async def _measure(run: Path, version: ModelVersion, taskset: Taskset, tasks: Sequence[Task], split: str) -> EvalReport:
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(base_model(version.base_model)))
    suite = f"{taskset.suite}/{split}"
    async with engine_on(run, version, [version.version_id]) as engine:
        play = _player(engine, version, taskset, renderer, len(tasks))
        return await evaluate(version.version_id, suite, tasks, play, fingerprint=taskset.fingerprint)


def _player(engine: RunningEngine, version: ModelVersion, taskset: Taskset, renderer: Renderer, total: int) -> Any:
    ticks = iter(track(range(total), description="evaluating", console=console(stderr=True), transient=True))

    async def play(task: Task) -> Rollout:
        asked = task.with_system_prompt(version.system_prompt)
        rollout = await greedy_rollout(
            asked, taskset, engine.client, renderer, rollout_id=task.task_id, group_id="eval", source="eval"
        )
        next(ticks, None)
        return rollout

    return play


def _print_report(report: EvalReport) -> None:
    by_slice: dict[str, list[float]] = {}
    for task_id, score in report.scores.items():
        by_slice.setdefault(report.slices.get(task_id, ""), []).append(score)
    rows = [_row("all", list(report.scores.values()))]
    rows += [_row(name, scores) for name, scores in sorted(by_slice.items()) if len(by_slice) > 1]
    screen = console()
    title = f"{report.version_id} on {report.suite}"
    screen.print(table(("slice", "tasks", "mean", "95% interval"), rows, right=("tasks", "mean"), title=title))
    screen.print("outcomes: " + _counts(report.outcomes))
    if report.missing:
        screen.print(f"{len(report.missing)} tasks have no score, through no fault of the model; they count neither way.")


def _row(name: str, scores: Sequence[float]) -> tuple[str, str, str, str]:
    mean = sum(scores) / len(scores) if scores else None
    interval = mean_interval(scores)
    shown = f"{percent(interval[0])} to {percent(interval[1])}" if interval else "–"
    return name, str(len(scores)), percent(mean), shown


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items()))
