"""WARM_START and LEARN: the two stages that change weights.

LEARN is two loops around the buffer::

    _roll  ── acquire ─▶ groups of rollouts ─▶ put ──▶ Buffer ──▶ take_batch ─▶ (teach) ─▶ step ─▶ publish ─▶ advance ── learn
      ▲                                                                                                          │
      └────────────────────────────────────── policy_version, free slots ◀───────────────────────────────────────┘

    _roll   consumes tasks in a fixed order;   waits for slots;          unblocked by ``advance``.
    learn   consumes whole batches;            waits for ``take_batch``; unblocked by ``put``.

With ``max_off_policy_steps = 0`` the two take turns, every rollout is sampled from the weights that its batch updates, and the
engine steps in lockstep with the open rollouts, so that a run repeats bit for bit. Otherwise groups wait in the buffer at the
end of a step: its checkpoint holds them, and a resumed run trains them, and first begins anew what had not ended.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import methodcaller
from random import Random
from typing import Any

from evergrad.loop._figures import step_details
from evergrad.loop._folder import Stage
from evergrad.loop._gold_audit import audited_figures, audits_training, distrusted_by_training, keep_audited
from evergrad.loop._measuring import introduce
from evergrad.loop._playing import play
from evergrad.loop._prompting import TaskChoice
from evergrad.loop._registering import register_trained
from evergrad.loop._serving import PRODUCTION
from evergrad.loop._session import Session
from evergrad.loop._spending import Stop, no_longer_pays
from evergrad.loop.decisions import Decision
from evergrad.loop.traffic import LiveTask
from evergrad.rollouts import (
    ESTIMATORS,
    Buffer,
    NothingToLearn,
    Ticket,
    assign_advantages,
    demonstrate,
    derive_seed,
    run_group,
    with_hint,
)
from evergrad.training import LossConfig
from evergrad.types import EvergradError, Sampling, Task, TrainingBatch, TrainingSample

SFT_CHECKPOINT_EVERY = 16
NONFINITE_STEPS = 3
BASE_TRIES = 24


async def warm_start(session: Session) -> Decision:
    """Supervised steps on demonstrations; then the result is published, and in the first cycle introduced to serving."""
    state, recipe = session.state, session.recipe.warm_start
    if state.step == 0:
        served = session.registry.resolve(PRODUCTION)
        # Weights that serve on another base model are nothing to start from.
        own_base = served is not None and session.registry.get(served).base_model == session.base
        await session.reset_trainer(served if own_base else None)
        if state.policy_version == 0:
            await _look_at_the_base(session)
    batches = await _demonstration_batches(session)
    with session.console.stage(f"cycle {state.cycle}: warm start", len(batches), state.step):
        while state.step < len(batches):
            batch = batches[state.step]
            started = time.monotonic()
            metrics = await session.train(batch, LossConfig(name="cross_entropy"), recipe.lr)
            state.step += 1
            session.record_step("sft", {**metrics, "seconds": time.monotonic() - started})
            _require_finite(session)
            session.console.advance(f"loss {metrics['loss']:.3f}  {session.money()}")
            if state.step % SFT_CHECKPOINT_EVERY == 0 and state.step < len(batches):
                await session.checkpoint()
                session.safe_point()
    await session.publish()
    await session.checkpoint()
    version = await register_trained(session, "sft")
    if session.registry.resolve(PRODUCTION) in (None, version.version_id):
        await introduce(session, version)
    losses = [step["loss"] for step in state.steps if (step["kind"], step["cycle"]) == ("sft", state.cycle)]
    text = f"{version.version_id} after {len(losses)} supervised steps" + (
        f", the last loss {losses[-1]:.3f}" if losses else ""
    )
    return Decision(Stage.LEARN, "warmed up", text, {"steps": len(losses), "loss": losses[-1] if losses else None})


async def _look_at_the_base(session: Session) -> None:
    """What the base model does before anything was learned: the first rewards that the user sees."""
    suite = session.suite(session.state.deployed)
    await session.begin_precision()
    with session.clock.phase("eval"):
        rollouts = await play(session, session.state.deployed, BASE_TRIES, session.engine, name="base-model", source="eval")
    judged = [rollout for rollout in rollouts if rollout.outcome.trainable]
    session.event(f"the base model on {suite}: {sum(rollout.success for rollout in judged)}/{len(judged)} succeed")


async def learn(session: Session) -> Decision:
    """Reinforcement learning until its steps are done or the reward has reached ``stop_at_reward``."""
    state, rl = session.state, session.recipe.rl
    if not rl.steps:
        served = session.serving.version
        serves = served is not None and served.version_id == session.version_id("sft")
        return Decision(Stage.WATCH if serves else Stage.MEASURE, "no RL", "the recipe has no RL steps")
    if state.step == 0:
        await session.reset_trainer(session.version_id("sft"))
        state.live_tasks = session.traffic.last_task() if session.traffic is not None else 0
        _tell_live_tasks(session)
    await session.begin_precision()
    await session.start_teacher()
    informative = rl.tasks == "informative"
    slices = session.training_slices(state.deployed) if informative else {}
    session.task_choice = TaskChoice(state, slices, session.config.seed) if informative else None
    buffer = Buffer(
        max_off_policy_steps=rl.max_off_policy_steps,
        groups_per_batch=rl.groups_per_step,
        policy_version=state.policy_version,
        estimator=rl.advantage,
        total_batches=rl.steps - state.step,
        resamples_per_batch=rl.replace_groups,
        overlong=rl.overlong,
        turn_discount=rl.turn_discount,
        start=session.waiting_groups(),
    )
    rolling = asyncio.create_task(_roll(session, buffer), name="rollouts")
    stopped: str | None = None
    unpaid: Stop | None = None
    try:
        with session.console.stage(f"cycle {state.cycle}: RL", rl.steps, state.step):
            while state.step < rl.steps and not _good_enough(session):
                session.safe_point()
                unpaid = await no_longer_pays(session)
                stopped = session.out_of_budget() or distrusted_by_training(session) or (unpaid.why if unpaid else None)
                if stopped:
                    break
                await _step(session, buffer)
    except NothingToLearn as reason:
        stopped = str(reason)
    finally:
        rolling.cancel()
        await asyncio.gather(rolling, return_exceptions=True)
    if stopped:
        session.event(f"RL stops after {state.step} steps: {stopped}")
    return _learned(session, stopped, unpaid.evidence if unpaid else {})


def _tell_live_tasks(session: Session) -> None:
    share, count = session.recipe.rl.traffic_share, len(session.live_tasks())
    if share and count:
        session.event(f"of live traffic, {count} tasks are trained on: {share:.0%} of the groups")


def _learned(session: Session, stopped: str | None, numbers: Mapping[str, Any]) -> Decision:
    rewards = [step["reward"] for step in session.state.steps if (step["kind"], step["cycle"]) == ("rl", session.state.cycle)]
    goal = session.recipe.rl.stop_at_reward
    ended = stopped or (f"the reward has reached {goal:g}" if _good_enough(session) else "all steps are done")
    evidence = {"steps": len(rewards), "reward_first": rewards[0], "reward_last": rewards[-1]} if rewards else {"steps": 0}
    text = f"RL ended after {len(rewards)} steps: {ended}"
    return Decision(Stage.MEASURE, "stopped" if stopped else "learned", text, {**evidence, **numbers})


async def _step(session: Session, buffer: Buffer) -> None:
    state, rl = session.state, session.recipe.rl
    started = time.monotonic()
    with session.clock.phase("rollout"):
        batch = await buffer.take_batch()
    rolled = time.monotonic()
    if ESTIMATORS[rl.advantage].needs_critic:
        batch = await session.appraise(batch)
    batch = await session.teach(batch)
    metrics = await session.train(batch, rl.loss, rl.lr_at(state.step), rl.updates)
    trained = time.monotonic()
    receipt = await session.publish()
    if session.task_choice is not None:
        session.task_choice.end_step()
    await buffer.advance(state.policy_version)
    # What waits in the buffer now is in the files of steps that are complete: no await before the file of this one is.
    left = buffer.state()
    state.step += 1
    state.group = left.next_index
    session.writer.complete(state.rl_step)
    state.rl_step += 1
    record = session.record_step(
        "rl",
        {
            **batch.metrics,
            **metrics,
            **audited_figures(session),
            **(session.task_choice.figures(rl.group_size) if session.task_choice is not None else {}),
            "rollout_s": rolled - started,
            "train_s": trained - rolled,
            "sync_s": time.monotonic() - trained,
            "pause_s": receipt["pause_s"],
            **{f"sync_{key}": receipt["transfer"][key] for key in ("bytes", "gb_per_s", "link_share")},
            "lockstep_misses": session.engine.take_lockstep_misses(),
            "seconds": time.monotonic() - started,
        },
    )
    _require_finite(session)
    await session.checkpoint(left)
    half = record["reward_ci95"]
    interval = f" ± {half:.2f}" if math.isfinite(half) else ""
    text = (
        f"reward {record['reward']:.2f}{interval}  stale {record['staleness_mean']:.1f}  "
        f"{record['sampled_tokens'] / record['rollout_s']:.0f} tok/s  {session.money()}"
    )
    session.console.advance(text)
    if state.step == 1 or state.step % 4 == 0 or state.step == rl.steps:
        session.console.note(f"  cycle {state.cycle} step {state.step:3d}: {text}")
        session.console.note(f"    {step_details(record)}", style="dim")


def _require_finite(session: Session) -> None:
    """Says it when an update was left out because its gradient was no number; steps in a row without any other end the run.

    Raises:
        EvergradError: each of the last ``NONFINITE_STEPS`` steps left all its updates out.
    """

    def in_a_row(holds: Callable[[dict[str, Any]], bool]) -> int:
        return sum(1 for _ in takewhile(holds, reversed(session.state.steps)))

    for key, what in (("skipped_nonfinite", "an update"), ("critic_skipped", "an update of the critic")):
        if in_a_row(methodcaller("get", key)) == 1:
            session.event(f"{what} was left out: its gradient is not finite, and the weights are as before it")
    lost = in_a_row(lambda step: bool(step.get("skipped_nonfinite")) and not step["updated"])
    if lost >= NONFINITE_STEPS:
        raise EvergradError(
            f"{lost} steps in a row had a gradient that is not finite; nothing is being learned",
            where=session.state.stage.value,
            hint="lower the lr of this stage, and start anew with another --run-dir",
        )


async def _roll(session: Session, buffer: Buffer) -> None:
    """Keeps every free slot filled with a running group, or in synchronous mode runs wave after wave of them."""
    try:
        if session.recipe.rl.max_off_policy_steps == 0:
            while await _wave(session, buffer):
                pass
            return
        async with asyncio.TaskGroup() as groups:
            while ticket := await buffer.acquire():
                groups.create_task(_run_one(session, buffer, ticket, _plan(session, ticket.index)))
    except BaseException as error:
        # The other loop waits for batches; it must learn that none will come, and why.
        await buffer.fail(error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error)
        raise


async def _wave(session: Session, buffer: Buffer) -> bool:
    """Runs a group in every free slot and waits for all of them; False when none is to be run any more.

    What runs together decides the engine's batches, and with them the last bit of a log-probability. A wave that starts when
    the one before has wholly ended is the same in every session of the run, whoever finishes first.
    """
    first = await buffer.acquire()
    if first is None:
        return False
    more = [await buffer.acquire() for _ in range(buffer.free_slots)]
    tickets = [ticket for ticket in (first, *more) if ticket is not None]
    planned = [_plan(session, ticket.index) for ticket in tickets]
    await session.engine.reset_prefix_cache()
    await session.engine.open_sessions(
        f"{plan.group_id}/{index}" for plan in planned for index in range(session.recipe.rl.group_size)
    )
    async with asyncio.TaskGroup() as groups:
        for ticket, plan in zip(tickets, planned, strict=True):
            groups.create_task(_run_one(session, buffer, ticket, plan))
    return True


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one group will try."""

    group_id: str
    task: Task
    settings: Mapping[str, Any]
    live: LiveTask | None = None
    """What of live traffic the task was made of."""


def _plan(session: Session, number: int) -> _Plan:
    """Group ``number`` of this cycle, the same in every session of the run.

    Live tasks get ``traffic_share`` of the groups until each has come once, and of the others earlier contracts get
    ``replay_share``, each spread evenly; each goes through its own tasks in order.
    """
    state, rl, known, live = session.state, session.recipe.rl, session.known, session.live_tasks()
    group_id = f"c{state.cycle}-g{number}"
    before, turn = _spread(number, rl.traffic_share if live else 0.0)
    if turn and before < len(live):
        chosen = live[before]
        return _Plan(group_id, session.taskset(state.deployed).task(chosen.row), state.deployed, chosen)
    other = number - min(before, len(live))
    before, turn = _spread(other, rl.replay_share if known else 0.0)
    settings, position = (known[before % len(known)], before // len(known)) if turn else (state.deployed, other - before)
    if session.task_choice is not None and settings is state.deployed:
        return _Plan(group_id, session.task_choice.task(number), settings)
    return _Plan(group_id, session.training_task(settings, position), settings)


def _spread(number: int, share: float) -> tuple[int, bool]:
    """How many of the first ``number`` places belong to ``share`` of them, and whether the next one does.

    >>> [_spread(number, 0.25) for number in range(5)]
    [(0, False), (0, False), (0, False), (0, True), (1, False)]
    """
    before = math.floor(number * share)
    return before, math.floor((number + 1) * share) > before


async def _run_one(session: Session, buffer: Buffer, ticket: Ticket, plan: _Plan) -> None:
    rl, group_id, settings = session.recipe.rl, plan.group_id, plan.settings
    task = plan.task.with_system_prompt(session.state.system_prompt)
    if plan.live is not None and session.traffic is not None:
        # Before anything is learned from it: whoever asks to be forgotten is told of every version that may have.
        session.traffic.record_use(session.version_id("rl"), plan.live)
    sessions = session.engine if rl.max_off_policy_steps == 0 else None
    try:
        group = await run_group(
            task,
            session.taskset(settings),
            session.engine,
            session.renderer,
            Sampling(temperature=rl.temperature, max_tokens=task.limits.max_tokens_per_turn),
            group_id=group_id,
            size=rl.group_size,
            seed=derive_seed(session.config.seed, group_id),
            sessions=sessions,
            audit=audits_training(session, settings),
        )
        keep_audited(session, group)
        if session.task_choice is not None:
            session.task_choice.see(int(group_id.rpartition("-g")[2]), group)
        for rollout in group.rollouts:
            session.writer.write(session.state.rl_step, rollout)
        if rl.distill is not None and rl.distill.hint:
            group = with_hint(group, session.taskset(settings).hint(task), session.renderer)
        await buffer.put(ticket, group)
    finally:
        await buffer.release(ticket)


def _good_enough(session: Session) -> bool:
    """The mean reward of the last three steps of this phase has reached ``stop_at_reward``."""
    state, goal = session.state, session.recipe.rl.stop_at_reward
    recent = [step["reward"] for step in state.steps if step["kind"] == "rl" and step["cycle"] == state.cycle][-3:]
    return goal is not None and len(recent) == 3 and bool(sum(recent) / 3 >= goal)


async def _demonstration_batches(session: Session) -> list[TrainingBatch]:
    """All supervised batches of the stage, in an order that the seed decides."""
    state, recipe = session.state, session.recipe.warm_start
    samples = await _demonstrations(session, state.deployed, recipe.demonstrations)
    for settings in session.known:
        samples += await _demonstrations(session, settings, recipe.replay)
    rng = Random(derive_seed(session.config.seed, "warm_start", state.cycle))
    batches: list[TrainingBatch] = []
    for _ in range(recipe.epochs):
        rng.shuffle(samples)
        batches += [_batch(samples[i : i + recipe.batch_size]) for i in range(0, len(samples), recipe.batch_size)]
    return batches


async def _demonstrations(session: Session, settings: Mapping[str, Any], count: int) -> list[list[TrainingSample]]:
    """``count`` perfect rollouts as samples; each cycle shows tasks of its own."""
    state, recipe = session.state, session.recipe.warm_start
    taskset = session.taskset({**settings, **recipe.settings})
    tasks = taskset.tasks("train", count, seed=derive_seed(session.config.seed, "demonstrations", state.cycle))
    asked = [task.with_system_prompt(state.system_prompt) for task in tasks]
    groups = await demonstrate(asked, taskset, session.renderer)
    return [list(assign_advantages(group, "constant")) for group in groups]


def _batch(demonstrations: Sequence[Sequence[TrainingSample]]) -> TrainingBatch:
    samples = tuple(sample for each in demonstrations for sample in each)
    return TrainingBatch(samples, sum(sum(sample.loss_mask) for sample in samples))
