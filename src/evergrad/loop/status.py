"""What a run is doing, what it last decided and why, what it has spent, and what comes next: read from its folder alone."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.config import parse_config
from evergrad.ledger import Ledger
from evergrad.loop._choosing import MergePlan
from evergrad.loop._folder import LoopState, Stage, read_state
from evergrad.loop._serving import PRODUCTION
from evergrad.loop.config import RunConfig
from evergrad.loop.pausing import is_running, pause_of
from evergrad.registry import Registry
from evergrad.types import EvergradError, InputError


@dataclass(frozen=True, slots=True)
class Status:
    """A run as it stands."""

    running: str
    """``running``, ``pausing`` (asked for, not taken yet), ``paused``, ``stopped`` (goes on when run again) or ``finished``."""
    doing: str
    cycle: int
    stage: str
    trigger: str
    """What set this cycle off."""
    serves: str | None
    last: Mapping[str, Any] | None
    """The last decision."""
    usd: float | None
    """Spent; ``None`` where something has no price."""
    budget_usd: float | None
    minutes: float
    """Up to the last saved state."""
    budget_minutes: float | None
    cycles: int
    """Of the budget."""
    following: str
    """What comes next."""


def status_of(run: Path) -> Status:
    """
    Raises:
        EvergradError: the folder holds no run of the loop, or a broken one.
    """
    config, state = _config(run), state_of(run)
    running = _running(run, state)
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        usd = ledger.total_usd()
    with Registry(run / "registry.sqlite") as registry:
        serves = registry.resolve(PRODUCTION)
    return Status(
        running=running,
        doing=_doing(config, state),
        cycle=state.cycle,
        stage=state.stage.value,
        trigger=state.trigger,
        serves=serves,
        last=state.decisions[-1] if state.decisions else None,
        usd=None if usd is None else float(usd),
        budget_usd=config.budget.usd,
        minutes=state.wall_s / 60,
        budget_minutes=config.budget.minutes,
        cycles=config.budget.cycles,
        following=_following(run, config, state, running),
    )


def state_of(run: Path) -> LoopState:
    """
    Raises:
        EvergradError: the run has not saved a state yet, or a broken one.
    """
    path = run / "state.json"
    if not path.exists():
        raise EvergradError("the run has saved no state yet", where=str(path), hint="wait until its workers have started")
    return read_state(path)


def decision_of(run: Path, number: int) -> dict[str, Any]:
    """The record of one decision, counted from 1.

    Raises:
        InputError: there is no such decision.
    """
    decisions = state_of(run).decisions
    if not 1 <= number <= len(decisions):
        has = f"it has {len(decisions)}" if decisions else "it has none yet"
        raise InputError(f"no decision {number}", where=str(run), hint=f"{has}: 'evergrad loop explain' lists them")
    return decisions[number - 1]


def _config(run: Path) -> RunConfig:
    path = run / "config.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EvergradError(f"no configuration of a run: {error}", where=str(path), hint="put back a copy of it") from error
    return parse_config(RunConfig, data, where=str(path))


def _running(run: Path, state: LoopState) -> str:
    paused, alive = pause_of(run), is_running(run)
    if state.stage is Stage.DONE and not alive:
        return "finished"
    if paused is not None:
        return "pausing" if alive else "paused"
    return "running" if alive else "stopped"


def _doing(config: RunConfig, state: LoopState) -> str:
    recipe, version = config.recipe(state.cycle, state.arm), f"{config.name}-c{state.cycle}"
    on = f" on {state.base_model}" if state.base_model not in ("", config.model) else ""
    return {
        Stage.DECIDE: "deciding whether this cycle trains",
        Stage.WARM_START: f"supervised steps{on}, {state.step} done and saved",
        Stage.LEARN: f"reinforcement learning{on}, {state.step} of up to {recipe.rl.steps} steps",
        Stage.MERGE: f"merging weights {MergePlan(**state.merge).told}" if state.merge else "",
        Stage.MEASURE: f"measuring the candidate {version}{on} and what serves, on the same tasks",
        Stage.RELEASE: f"the canary of {version}",
        Stage.WATCH: f"watching live traffic, {config.watch.requests} requests a check",
        Stage.DONE: "nothing",
    }[state.stage]


def _following(run: Path, config: RunConfig, state: LoopState, running: str) -> str:
    pause = pause_of(run)
    if running in ("pausing", "paused") and pause is not None:
        return f"nothing until 'evergrad loop resume' (paused: {pause.reason})"
    if running == "stopped":
        return "'evergrad loop resume' goes on from here"
    last = state.cycle >= config.budget.cycles
    return {
        Stage.DECIDE: "supervised steps, a system prompt or a merge to measure, or live traffic where none would buy anything",
        Stage.WARM_START: "reinforcement learning",
        Stage.LEARN: "the candidate is measured against what serves",
        Stage.MERGE: "the candidate is measured against what serves",
        Stage.MEASURE: "the gate's ruling, then live traffic",
        Stage.RELEASE: "the whole of the traffic for it, or a rollback",
        Stage.WATCH: "the run ends after this" if last else f"cycle {state.cycle + 1}, at the next trigger",
        Stage.DONE: "nothing: a larger budget opens the run again",
    }[state.stage]
