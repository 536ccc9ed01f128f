"""The loop: turns cycles until the budget ends.

One cycle, and the room each stop lies in::

    DECIDE ─▶ WARM_START ─▶ LEARN ─────────────▶ MEASURE ─ (RELEASE) ──▶ WATCH ─▶ DECIDE of the next cycle
              training      envs, rollouts,      registry, evals,        inference (serving),
              (SFT)         training, transfer,  ledger, gate,           envs (traffic)
                            inference            promote

    DECIDE      consumes the trigger;               waits for nothing;       unblocks WARM_START, MEASURE where a prompt is
                                                                             tried, MERGE where two versions are merged, or
                                                                             WATCH where nothing would buy anything.
    WARM_START  consumes demonstrations;            waits for the trainer;   unblocks LEARN by publishing version 1.
    LEARN       consumes tasks, then batches;       waits for slots, then    unblocks itself: each update frees slots.
                see ``_learning.py``                for whole batches;
    MERGE       consumes the weights of two         waits for nothing;       unblocks MEASURE by publishing what lies between
                versions;                                                    them; only where an arm merges.
    MEASURE     consumes the last weights;          waits for paired evals;  unblocks serving by moving the alias,
                                                                             or RELEASE by beginning one.
    RELEASE     consumes live rollouts;             waits for outcomes;      unblocks serving as MEASURE does; only there
                see ``_releasing.py``                                        with a [canary].
    WATCH       consumes live rollouts;             waits for traffic;       unblocks the next cycle by a trigger.

Every stage ends in a decision, which is put on record with its evidence (``decisions.py``). Every stage can be entered again:
its progress is in ``state.json``, which is saved together with each checkpoint. A worker that dies takes the same way as a
killed controller: everything stops, and the loop goes on from the last saved state. So does a pause (``pausing.py``).
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from evergrad.config import load_config
from evergrad.ledger import Ledger, PriceBook
from evergrad.loop._checking import check_folder, check_inputs, notice_changed_environments
from evergrad.loop._console import LoopConsole
from evergrad.loop._deciding import decide
from evergrad.loop._folder import LoopState, RunFolder, Stage
from evergrad.loop._learning import learn, warm_start
from evergrad.loop._measuring import measure
from evergrad.loop._merging import merge
from evergrad.loop._releasing import announce_release, release
from evergrad.loop._replicas import Restarts
from evergrad.loop._reporting import Reporter, rebuild_report
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.loop._watching import watch
from evergrad.loop.certificate import run_signing_key
from evergrad.loop.config import RunConfig
from evergrad.loop.decisions import Decision, begin_next_cycle
from evergrad.loop.pausing import Pause, Paused, pause_of
from evergrad.loop.placement import WorkerDied
from evergrad.loop.report import read_report, write_timeline
from evergrad.registry import Registry
from evergrad.types import EvergradError


def run_loop(config_path: Path, overrides: list[str] | None = None, run_dir: Path | None = None) -> Path:
    """Runs or goes on with the run that ``config_path`` describes; returns its folder.

    Raises:
        EvergradError: bad configuration, a folder in use or of another run, a worker that keeps dying, a full disk.
        KeyboardInterrupt: Ctrl-C, or SIGTERM; workers are stopped and the last whole state is saved by then.
    """
    config = load_config(RunConfig, config_path, overrides or ())
    console = LoopConsole()
    check_inputs(config, console)
    folder = RunFolder(run_dir or Path("runs") / config.name, config)
    try:
        check_folder(folder)
        run_signing_key(folder.path, lambda text: console.note(text, whole=True))
        finished = _finished(config, folder)
        if finished is not None:
            console.note(f"{folder.path} is finished: {finished}; to start anew choose another --run-dir", whole=True)
        else:
            paused = pause_of(folder.path) or _run_and_draw(config, folder, console)
            if paused is not None:
                _tell_pause(folder, console, paused)
        if (folder.path / "state.json").exists():
            # Once more, since ending the workers took time, and the report is to say what the ledger says.
            _draw(config, folder)
            console.summary(read_report(folder.path), folder.path)
    except (KeyboardInterrupt, asyncio.CancelledError):
        _leave(config, folder, console)
        raise KeyboardInterrupt from None
    except OSError as error:
        raise EvergradError(
            f"could not write: {error}",
            where=str(folder.path),
            hint="free space, then run again: it goes on from the last whole state",
        ) from error
    finally:
        folder.close()
    return folder.path


def _run_and_draw(config: RunConfig, folder: RunFolder, console: LoopConsole) -> Pause | None:
    """Runs; one that ends in an error leaves a report of what was saved, whose page is as new as its figures."""
    try:
        return asyncio.run(_run(config, folder, console))
    except Exception:
        # The error is what is to be told, whether or not a report can still be written.
        with suppress(EvergradError, OSError):
            if (folder.path / "state.json").exists():
                _draw(config, folder)
        raise


def _draw(config: RunConfig, folder: RunFolder) -> None:
    rebuild_report(config, folder)
    write_timeline(folder.path)


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
    state.stage, state.step = Stage.DECIDE, 0
    folder.save_state(state)
    return None


def _tell_pause(folder: RunFolder, console: LoopConsole, pause: Pause) -> None:
    console.note(f"paused since {pause.at}: {pause.reason}", whole=True)
    console.note(f"to go on: evergrad loop resume --run {folder.path}", whole=True)


def _price_book(config: RunConfig) -> PriceBook:
    return PriceBook.load(Path(config.price_book) if config.price_book else None)


def _leave(config: RunConfig, folder: RunFolder, console: LoopConsole) -> None:
    """After an interruption: a report of what was saved, and what of it can be used already."""
    if not (folder.path / "state.json").exists():
        return
    _draw(config, folder)
    with Registry(folder.path / "registry.sqlite") as registry:
        served = registry.resolve(PRODUCTION)
    if served is None:
        console.note("stopped; nothing was promoted so far")
    else:
        console.note(f"stopped; {served} can serve already: evergrad serve --run {folder.path}", whole=True)


def _stop_on_sigterm() -> None:
    """SIGTERM cancels the run as Ctrl-C does; a second one ends the process at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        task.cancel()

    if threading.current_thread() is threading.main_thread():  # no other may handle signals
        loop.add_signal_handler(signal.SIGTERM, stop)


async def _run(config: RunConfig, folder: RunFolder, console: LoopConsole) -> Pause | None:
    """Turns cycles to the end, or to a pause, which is returned."""
    _stop_on_sigterm()
    restarts = Restarts(config.placement.max_restarts)
    while True:
        try:
            async with Session(config, folder, console, restarts) as session:
                await _supervised(session)
            return None
        except Paused as stop:
            if pause_of(folder.path) is not None:
                return stop.pause
            # Lifted while the workers ended: whoever did so found this process in the folder, and left the rest to it.
        except WorkerDied as death:
            console.note(f"{death}", style="red")
            if not restarts.take():
                raise
            console.note(f"going on from the last saved state ({restarts})")


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
    state, reporter = session.state, Reporter()
    stages: dict[Stage, Callable[[Session], Awaitable[Decision]]] = {
        Stage.DECIDE: decide,
        Stage.WARM_START: warm_start,
        Stage.LEARN: learn,
        Stage.MERGE: merge,
        Stage.MEASURE: measure,
        Stage.RELEASE: release,
        Stage.WATCH: watch,
    }
    while state.stage is not Stage.DONE:
        session.safe_point()
        _begin_cycle(session, state)
        announced = _announcement(session)
        if announced:
            session.console.note(f"  {announced}")
        await session.follow_base()
        decision = await stages[state.stage](session)
        deciding = state.stage is Stage.DECIDE
        session.enter(decision)
        if not deciding:  # nothing has happened that a report would show
            with session.clock.phase("store"):
                reporter.report(session)


def _announcement(session: Session) -> str:
    """What the stage that begins is about to do; empty where the stage says it itself."""
    state, recipe, watching = session.state, session.recipe, session.config.watch.requests
    if state.stage is Stage.WARM_START:
        shown = recipe.warm_start.demonstrations + recipe.warm_start.replay * len(session.known)
        steps = recipe.warm_start.epochs * math.ceil(shown / recipe.warm_start.batch_size)
        return f"warm start: {shown} demonstrations in {steps} steps"
    if state.stage is Stage.LEARN and recipe.rl.steps:
        return f"RL: up to {recipe.rl.steps} steps of {recipe.rl.groups_per_step} × {recipe.rl.group_size} rollouts"
    if state.stage is Stage.RELEASE:
        return announce_release(session)
    return f"live traffic: {watching} requests a check" if state.stage is Stage.WATCH and watching else ""


def _begin_cycle(session: Session, state: LoopState) -> None:
    session.clock.subject = f"cycle-{state.cycle}"
    notice_changed_environments(session)
    serves = session.registry.resolve(PRODUCTION)
    session.clock.parents = () if serves is None else (serves,)
    if state.cycle_started.get("cycle") == state.cycle:
        return
    usd = session.spent_usd()
    state.cycle_started = {"cycle": state.cycle, "usd": usd, "wall_s": session.wall_s()}
    session.event(f"cycle {state.cycle} begins: {state.trigger}")
