"""The loop: turns cycles until the budget ends.

One cycle, and the room each stop lies in::

    trigger ─▶ WARM_START ─▶ LEARN ─────────────▶ MEASURE ──────────────▶ WATCH ─▶ trigger of the next cycle
               training      envs, rollouts,      registry, evals,        inference (serving),
               (SFT)         training, transfer,  ledger, gate,           envs (traffic)
                             inference            promote

    WARM_START  consumes demonstrations;            waits for the trainer;   unblocks LEARN by publishing version 1.
    LEARN       consumes tasks, then batches;       waits for slots, then    unblocks itself: each update frees slots.
                see ``_learning.py``                for whole batches;
    MEASURE     consumes the last weights;          waits for paired evals;  unblocks serving by moving the alias.
    WATCH       consumes live rollouts;             waits for traffic;       unblocks the next cycle by a trigger.

Every stage can be entered again: its progress is in ``state.json``, which is saved together with each checkpoint. A worker
that dies takes the same way as a killed controller: everything stops, and the loop goes on from the last saved state.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from evergrad.config import load_config
from evergrad.envs import Taskset
from evergrad.ledger import CPU_RESOURCE, Ledger, PriceBook
from evergrad.loop._console import LoopConsole
from evergrad.loop._folder import LoopState, RunFolder, Stage
from evergrad.loop._learning import learn, warm_start
from evergrad.loop._measuring import measure
from evergrad.loop._reporting import report
from evergrad.loop._session import Session
from evergrad.loop._watching import begin_next_cycle, watch
from evergrad.loop.config import RunConfig
from evergrad.loop.placement import WorkerDied
from evergrad.loop.report import read_report
from evergrad.registry import base_model
from evergrad.types import EvergradError, InputError


def run_loop(config_path: Path, overrides: list[str] | None = None, run_dir: Path | None = None) -> Path:
    """Runs or goes on with the run that ``config_path`` describes; returns its folder.

    Raises:
        EvergradError: bad configuration, a folder in use or of another run, a worker that keeps dying, a full disk.
    """
    config = load_config(RunConfig, config_path, overrides or ())
    console = LoopConsole()
    _check_inputs(config, console)
    folder = RunFolder(run_dir or Path("runs") / config.name, config)
    try:
        finished = _finished(config, folder)
        if finished is None:
            asyncio.run(_run(config, folder, console))
        else:
            console.note(f"{folder.path} is finished: {finished}; to start anew choose another --run-dir")
        console.summary(read_report(folder.path))
    except OSError as error:
        raise EvergradError(
            f"could not write: {error}",
            where=str(folder.path),
            hint="free space, then run again: it goes on from the last whole state",
        ) from error
    finally:
        folder.close()
    return folder.path


def _finished(config: RunConfig, folder: RunFolder) -> str | None:
    """Why nothing is left to do, or ``None``; a larger budget opens a finished run again."""
    state = folder.load_state(LoopState())
    if state.stage is not Stage.DONE:
        return None
    if state.cycle >= config.budget.cycles:
        return "all cycles are done, and budget.cycles opens it again"
    with Ledger(folder.path / "ledger.sqlite", _price_book(config)) as ledger:
        usd = ledger.total_usd()
    spent = config.budget.spent(None if usd is None else float(usd), state.wall_s)
    if spent is not None:
        return f"{spent}, and a larger one opens it again"
    begin_next_cycle(state, "schedule")
    state.stage, state.step = Stage.WARM_START, 0
    folder.save_state(state)
    return None


def _price_book(config: RunConfig) -> PriceBook:
    return PriceBook.load(Path(config.price_book) if config.price_book else None)


def _check_inputs(config: RunConfig, console: LoopConsole) -> None:
    """Fails here, before anything is started or written: prices, the sinks, the environment under each setting to come,
    the model."""
    if config.budget.usd is not None and _price_book(config).unit_price(CPU_RESOURCE) is None:
        raise InputError(
            f"budget.usd = {config.budget.usd:g} cannot be kept: the price book has no price for '{CPU_RESOURCE}'",
            where=config.price_book,
            hint=f"add [prices.{CPU_RESOURCE}] to it, or limit the run by budget.minutes",
        )
    for sink in config.sinks:
        sink.build().check()
    settings = dict(config.environment.settings)
    for recipe in (config.learn, config.adapt or config.learn):
        Taskset(config.environment.name, {**settings, **recipe.warm_start.settings})
    for change in [None, *config.traffic.changes]:
        settings |= change.settings if change else {}
        Taskset(config.environment.name, settings)
    base_model(config.model, None, lambda what, share: console.note(f"  {config.model}: {what} ({share:.0%})"))


async def _run(config: RunConfig, folder: RunFolder, console: LoopConsole) -> None:
    restarts = 0
    while True:
        try:
            async with Session(config, folder, console) as session:
                await _supervised(session)
            return
        except WorkerDied as death:
            restarts += 1
            console.note(f"{death}", style="red")
            if restarts > config.placement.max_restarts:
                raise
            console.note(f"going on from the last saved state (restart {restarts} of {config.placement.max_restarts})")


async def _supervised(session: Session) -> None:
    """Turns cycles beside a watch over the workers; the first to fail ends both, and a death names the cause."""
    work = asyncio.create_task(_turn_cycles(session), name="cycles")
    deaths = asyncio.create_task(session.placement.watch(), name="workers")
    try:
        await asyncio.wait({work, deaths}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and work.exception() is not None:
            # A request that failed and the death behind it are seen in either order; the death says more.
            await asyncio.wait({deaths}, timeout=2.0)
        if deaths.done():
            deaths.result()
        await work
    finally:
        for task in (work, deaths):
            task.cancel()
        await asyncio.gather(work, deaths, return_exceptions=True)


async def _turn_cycles(session: Session) -> None:
    state = session.state
    stages: dict[Stage, Any] = {Stage.WARM_START: warm_start, Stage.LEARN: learn, Stage.MEASURE: measure, Stage.WATCH: watch}
    while state.stage is not Stage.DONE:
        _begin_cycle(session, state)
        following = await stages[state.stage](session)
        session.enter(following)
        report(session)


def _begin_cycle(session: Session, state: LoopState) -> None:
    session.clock.subject = f"cycle-{state.cycle}"
    if state.cycle_started.get("cycle") == state.cycle:
        return
    usd = session.spent_usd()
    state.cycle_started = {"cycle": state.cycle, "usd": usd, "wall_s": session.wall_s()}
    session.event(f"cycle {state.cycle} begins: {state.trigger}")
