"""What a run needs, looked at before anything is started or written: what is refused here costs nobody a minute."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.config import nearest
from evergrad.envs import Taskset
from evergrad.evals import next_level
from evergrad.ledger import CPU_RESOURCE, PriceBook
from evergrad.loop._console import LoopConsole
from evergrad.loop._folder import LoopState, RunFolder, Stage
from evergrad.loop._learning import BASE_TRIES
from evergrad.loop._teaching import require_same_tokens
from evergrad.loop.certificate import KEY_VARIABLE, signing_key
from evergrad.loop.config import RunConfig
from evergrad.registry import Registry, base_model, parameter_count
from evergrad.rollouts import Renderer, derive_seed
from evergrad.types import EvergradError, InputError

if TYPE_CHECKING:
    from evergrad.loop._session import Session


def check_inputs(config: RunConfig, console: LoopConsole) -> None:
    """Prices, a chosen signing key, sinks, cores, the environment, its tasks under each setting, the gate, model, teachers.

    Raises:
        InputError: one of them cannot be as configured.
    """
    _check_prices(config)
    if os.environ.get(KEY_VARIABLE):
        signing_key()
    for sink in config.sinks:
        sink.build().check()
    if config.canary is not None and config.release_plan is None:
        console.note("watch.requests = 0: no traffic could judge a canary, so the alias moves when the gate says so")
    cores = len(os.sched_getaffinity(0))
    if config.placement.threads and config.placement.threads > cores:
        hint = f"set it to {cores} at most, or leave it out to use all"
        raise InputError(f"placement.threads = {config.placement.threads}, but there are {cores} cores", hint=hint)
    deployed = list(_deployed(config))
    for recipe in config.recipes:
        Taskset(config.environment.name, {**deployed[0], **recipe.warm_start.settings})
    suites = _suites(config, deployed)
    _check_audit(config)
    for guard in config.gate.guards:
        if guard not in suites:
            raise InputError(f"gate.guards names '{guard}', which this run never measures", hint=nearest(guard, suites))
    _check_tasks(config, deployed)
    _check_lengths(config, deployed)
    students = {base: base_model(base, None, _progress(console, base)) for base in config.bases}
    _check_smaller(config, students, console)
    for student in students.values():
        _check_teachers(config, student)
        _check_prompts(config, deployed, student)


def _progress(console: LoopConsole, base: str) -> Callable[[str, float], None]:
    return lambda what, share: console.note(f"  {base}: {what} ({share:.0%})")


def _check_smaller(config: RunConfig, folders: Mapping[str, Path], console: LoopConsole) -> None:
    """Base models of arms are smaller than the run's, and what their candidates must show can be shown."""
    sizes = {base: parameter_count(folder) for base, folder in folders.items()}
    for arm in (each for each in config.arms if each.base_model is not None):
        size, own = sizes[str(arm.base_model)], sizes[config.model]
        if size >= own:
            raise InputError(
                f"arm '{arm.name}' is to serve for less on '{arm.base_model}', which has {size:,} parameters, and "
                f"'{config.model}' has {own:,}",
                where=str(arm.base_model),
                hint="name a smaller base model, or leave the arm out",
            )
    margin, level = config.gate.guard_margin, next_level(config.gate.series, config.gate.alpha, [])
    if len(config.bases) > 1 and margin is not None and (1 - margin) ** config.eval.n > level:
        console.note(
            f"eval.n = {config.eval.n} tasks on which nothing differs do not show a smaller model to be no worse by "
            f"{margin:g} at the level of a first try, {level:.3g}: {math.ceil(math.log(level) / math.log1p(-margin))} do"
        )


def _check_audit(config: RunConfig) -> None:
    taskset = Taskset(config.environment.name, config.environment.settings)
    if config.audit is not None and not taskset.has_gold:
        raise InputError(
            f"an [audit] is configured, but environment '{taskset.name}' has no gold verifier",
            where=config.environment.name,
            hint="define 'async def gold(self, answer: str) -> float | None' in it, or leave [audit] out",
        )


def _check_teachers(config: RunConfig, student: Path) -> None:
    """Teachers read the tokens of a student's base model, and hints where they are to have any."""
    for recipe in config.recipes:
        distill = recipe.rl.distill
        if distill is None or not recipe.rl.steps:
            continue
        if distill.model is not None:
            require_same_tokens(student, base_model(distill.model))
        own = base_model(config.model)
        if distill.version is not None and student != own:  # the first cycle's versions are on the run's own base model
            require_same_tokens(student, own)
        taskset = Taskset(config.environment.name, config.environment.settings)
        if distill.hint and not taskset.has_hints:
            raise InputError(
                f"rl.distill.hint = true, but environment '{taskset.name}' gives no hints",
                where=config.environment.name,
                hint="define hint(self) in it, which returns what a teacher is told, or set rl.distill.hint = false",
            )
        taskset.hint(taskset.tasks("train", 1, config.seed)[0])


def _check_prompts(config: RunConfig, deployed: list[dict[str, Any]], student: Path) -> None:
    """The model reads system messages, and after each prompt that is to be tried there is room for a task and its answer."""
    texts = {text: arm.name for arm in config.arms for text in arm.prompts}
    if not texts:
        return
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(student))
    if not renderer.has_system:
        raise InputError(
            f"the chat template of '{config.model}' has no system message, to which prompts could be added",
            hint="leave the arms with prompts out, or put the text into the environment's own prompts",
        )
    for settings in deployed:
        task = Taskset(config.environment.name, settings).tasks("train", 1, config.seed)[0]
        for text, arm in texts.items():
            length, most = len(renderer.prompt(task.with_system_prompt(text).prompt)), task.limits.max_total_tokens
            if length >= most:
                raise InputError(
                    f"with the prompt '{text[:40]}…' of arm '{arm}' a task begins with {length} tokens, of {most} in a rollout",
                    hint="shorten the prompt, or raise limits.max_total_tokens in the environment",
                )


def _check_prices(config: RunConfig) -> None:
    book = PriceBook.load(Path(config.price_book) if config.price_book else None)
    if config.budget.usd is not None and book.unit_price(CPU_RESOURCE) is None:
        raise InputError(
            f"budget.usd = {config.budget.usd:g} cannot be kept: the price book has no price for '{CPU_RESOURCE}'",
            where=config.price_book,
            hint=f"add [prices.{CPU_RESOURCE}] to it, or limit the run by budget.minutes",
        )


def _deployed(config: RunConfig) -> Iterator[dict[str, Any]]:
    """The environment's settings, at first and after each change."""
    settings = dict(config.environment.settings)
    yield settings
    for change in config.traffic.changes:
        settings = {**settings, **change.settings}
        yield settings


def _suites(config: RunConfig, deployed: list[dict[str, Any]]) -> set[str]:
    """The names of what will be deployed; each stands for one set of settings, or reports on two would be taken for one.

    Raises:
        InputError: two settings have one name.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for index, settings in enumerate(deployed):
        taskset = Taskset(config.environment.name, settings)
        now = taskset.config.model_dump(mode="json")
        before = found.setdefault(taskset.suite, now)
        differing = sorted(key for key in now if now[key] != before[key])
        if differing:
            told = ", ".join(f"{key} = {now[key]!r} and {before[key]!r}" for key in differing)
            raise InputError(
                f"traffic.changes.{index - 1} deploys '{taskset.suite}' with other settings than before: {told}",
                hint="a suite is named by its contract: give the change a contract of its own",
            )
    return set(found)


def _check_tasks(config: RunConfig, deployed: list[dict[str, Any]]) -> None:
    """Draws what will be drawn, at first and after each change: the gate's tasks, demonstrations, first live requests."""
    look = derive_seed(config.seed, "eval", "base-model")
    _draw(config, deployed[0], "heldout", BASE_TRIES, look, "tries of the base model")
    for index, settings in enumerate(deployed):
        warm_start, cycle = config.recipe(index + 1).warm_start, index + 1
        seed = derive_seed(config.seed, "demonstrations", cycle)
        shown = {**settings, **warm_start.settings}
        _draw(config, settings, "gate", config.eval.n, config.seed, "eval.n")
        _draw(config, shown, "train", warm_start.demonstrations, seed, "warm_start.demonstrations")
        live = derive_seed(config.seed, "live", f"live-{cycle:03d}-000")
        _draw(config, settings, "heldout", config.watch.requests, live, "watch.requests")
        for known in deployed[:index]:
            shown = {**known, **warm_start.settings}
            _draw(config, shown, "train", warm_start.replay, seed, "warm_start.replay")


def _check_lengths(config: RunConfig, deployed: list[dict[str, Any]]) -> None:
    """A price of length begins somewhere that a rollout can come to."""
    for index, settings in enumerate(deployed):
        rl = config.recipe(index + 1).rl
        if rl.overlong is None or not rl.steps:
            continue
        limits = Taskset(config.environment.name, settings).tasks("train", 1, config.seed)[0].limits
        most = limits.max_turns * limits.max_tokens_per_turn
        free = rl.overlong.max_length - rl.overlong.cache
        if free >= most:
            raise InputError(
                f"rl.overlong takes nothing up to {free} tokens, and no rollout is longer than {most}",
                hint=f"set rl.overlong.max_length to {most} at most, or leave it out",
            )


def _draw(config: RunConfig, settings: Mapping[str, Any], split: str, count: int, seed: int, key: str) -> None:
    taskset = Taskset(config.environment.name, settings)
    try:
        taskset.tasks(split, count, seed)
    except EvergradError as error:
        raise InputError(f"{key} = {count} cannot be drawn on {taskset.suite}: {error}") from error


def notice_changed_environments(session: Session) -> None:
    """Tells when an environment's file is not what it was: a fault in it may be mended while a run goes on, but what was
    learned, and measured, before then was judged by the old one."""
    state = session.state
    for settings in (state.deployed, *state.known):
        suite, now = session.suite(settings), session.taskset(settings).fingerprint
        before = state.environments.get(suite, now)
        if before != now:
            session.event(f"the environment of {suite} has changed since this run began: {before} then, {now} now")
        state.environments[suite] = now


def check_folder(folder: RunFolder) -> None:
    """What a run goes on from is there as a whole, or not at all.

    Raises:
        EvergradError: some of it was removed; names what is missing.
    """
    path, missing = folder.path, None
    if (path / "state.json").exists():
        state = folder.load_state(LoopState())
        needed = ["registry.sqlite", "ledger.sqlite"]
        if state.checkpoint is not None and state.stage is not Stage.DONE:
            needed.append(f"checkpoints/{state.checkpoint}")
        missing = next((name for name in needed if not (path / name).exists()), None)
    elif (path / "registry.sqlite").exists():
        with Registry(path / "registry.sqlite") as registry:
            missing = "state.json" if registry.list() else None
    if missing is not None:
        raise EvergradError(
            f"{missing} is missing, without which this run cannot go on",
            where=str(path / missing),
            hint="put back a copy of it, or choose another --run-dir to start anew",
        )
