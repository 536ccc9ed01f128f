"""One task, one rollout; one task, one group of them.

::

    Task ─▶ Episode.start ─▶ ┌ generate ─▶ text ─▶ Episode.reply ┐ ─▶ Episode.score ─▶ Rollout
                             └──────── extend the prompt ◀───────┘

Every wait has a limit, every ending has a name, and nothing that happens in one rollout is seen by its siblings. An exception
leaves ``run_rollout`` only when the rollout is cancelled, or when what was asked for makes no sense.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evergrad.envs import EnvError, EnvironmentFault, Episode, Taskset, VerifierFault
from evergrad.rollouts._renderer import Renderer, RendererError
from evergrad.types import (
    Completion,
    EvergradError,
    FinishReason,
    Message,
    Outcome,
    Rollout,
    RolloutGroup,
    Sampling,
    Task,
    Turn,
    Usage,
)

_log = logging.getLogger(__name__)


class Generate(Protocol):
    """Samples one completion of a prompt. Engines, routers, scripts and fakes all are one of these."""

    async def __call__(self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion: ...


class Sessions(Protocol):
    """An engine's lockstep sessions: while open, it waits for each session's next request before it steps."""

    async def open_sessions(self, ids: Sequence[str]) -> Any: ...

    async def close_sessions(self, ids: Sequence[str]) -> Any: ...


class _PolicyFault(Exception):
    """The model's own doing; the text is the fault's name and detail."""


class _EngineFault(Exception):
    """The engine failed or returned what cannot be a completion."""


@dataclass(slots=True)
class _Trace:
    """What has happened so far; survives whatever ends the rollout."""

    turns: list[Turn] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)


def derive_seed(seed: int, *parts: str | int) -> int:
    """A seed of its own for each rollout and turn, equal for equal parts, in ``[0, 2**63)``.

    >>> derive_seed(7, "colors/ab12", 0) != derive_seed(7, "colors/ab12", 1)
    True
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def check_training_sampling(sampling: Sampling) -> None:
    """Refuses settings whose samples cannot be trained on without bias.

    Raises:
        EvergradError: greedy decoding, or a truncated distribution, which the trainer does not score under.
    """
    if sampling.greedy:
        hint = "set a temperature above 0; greedy is for evals"
        raise EvergradError("temperature 0 cannot be trained on", where="sampling", hint=hint)
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        hint = "set top_p = 1 and top_k = 0; they are for evals and serving"
        raise EvergradError("top_p and top_k cut the distribution that the trainer scores under", where="sampling", hint=hint)


async def run_rollout(
    task: Task,
    taskset: Taskset,
    generate: Generate,
    renderer: Renderer,
    sampling: Sampling,
    *,
    rollout_id: str,
    group_id: str,
    source: str = "train",
    audit: bool = False,
) -> Rollout:
    """Runs one try at ``task`` to its end.

    Args:
        sampling: ``max_tokens`` is cut to the task's limits; each turn draws with a seed derived from ``sampling.seed``.
        source: what the rollout is for; ``train`` refuses sampling that cannot be trained on.
        audit: asks the gold verifier, too. One that ended as a policy fault gave no answer, so its gold is 0.

    Returns:
        A rollout whose outcome names how it ended; see ``types.Outcome``.

    Raises:
        EvergradError: ``sampling`` does not fit ``source``.
    """
    if source == "train":
        check_training_sampling(sampling)
    start = time.perf_counter()
    trace = _Trace()
    parts: Mapping[str, float] = {}
    reward: float | None = None
    gold: float | None = None
    outcome, fault = Outcome.SCORED, ""
    episode: Episode | None = None
    try:
        episode = _open(taskset, task)
        await _play(episode, task, generate, renderer, sampling, trace, rollout_id)
        score = await episode.score()
        gold = await episode.gold() if audit else None
        reward, parts = score.reward, score.parts
    except _PolicyFault as error:
        outcome, fault = Outcome.POLICY_FAULT, str(error)
        reward = taskset.environment_class.policy_fault_reward
        gold = 0.0 if audit else None
    except EnvironmentFault as error:
        outcome, fault = Outcome.ENVIRONMENT_FAULT, f"environment: {error}"
    except _EngineFault as error:
        outcome, fault = Outcome.ENVIRONMENT_FAULT, f"engine: {error}"
    except RendererError as error:
        outcome, fault = Outcome.ENVIRONMENT_FAULT, f"renderer: {error}"
    except VerifierFault as error:
        outcome, fault = Outcome.VERIFIER_FAULT, f"verifier: {error}"
    finally:
        if episode is not None and (problem := await episode.close()):
            _log.warning("rollout %s: %s", rollout_id, problem)
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        task_id=task.task_id,
        turns=tuple(trace.turns),
        outcome=outcome,
        reward=reward,
        reward_parts=parts,
        usage=replace(trace.usage, seconds=time.perf_counter() - start),
        source=source,
        slice=str(task.metadata.get("slice", "")),
        fault=fault,
        temperature=sampling.temperature,
        gold=gold,
        contract=taskset.contract_hash,
    )


async def greedy_rollout(
    task: Task,
    taskset: Taskset,
    generate: Generate,
    renderer: Renderer,
    *,
    rollout_id: str,
    group_id: str,
    source: str = "eval",
    audit: bool = False,
) -> Rollout:
    """One try with the likeliest token each time, within the task's own limits: how versions are measured and served."""
    sampling = Sampling(temperature=0.0, max_tokens=task.limits.max_tokens_per_turn)
    return await run_rollout(
        task, taskset, generate, renderer, sampling, rollout_id=rollout_id, group_id=group_id, source=source, audit=audit
    )


def _open(taskset: Taskset, task: Task) -> Episode:
    try:
        return Episode(taskset.open(task))
    except EnvError as error:
        raise EnvironmentFault(str(error)[:300]) from error
    except Exception as error:
        raise EnvironmentFault(f"opening raised {type(error).__name__}: {error}"[:300]) from error


async def _play(
    episode: Episode,
    task: Task,
    generate: Generate,
    renderer: Renderer,
    sampling: Sampling,
    trace: _Trace,
    session_id: str,
) -> None:
    """Turns until the final answer. The rollout's time limit covers these; scoring has its own after them."""
    limits = task.limits
    try:
        async with asyncio.timeout(limits.rollout_timeout_s) as scope:
            await episode.start()
            conversation, new = list(task.prompt), task.prompt
            prompt = renderer.prompt(conversation)
            for turn in range(limits.max_turns):
                room = min(limits.max_tokens_per_turn, limits.max_total_tokens - len(prompt), sampling.max_tokens)
                if room < 1:
                    raise _PolicyFault(f"out_of_tokens: the prompt of turn {turn + 1} has {len(prompt)}")
                drawn = replace(
                    sampling,
                    max_tokens=room,
                    seed=None if sampling.seed is None else derive_seed(sampling.seed, turn),
                    stop_token_ids=renderer.stop_token_ids,
                )
                completion = await _generate(generate, prompt, drawn, session_id, limits.generate_timeout_s)
                said = Message("assistant", renderer.text(completion))
                trace.turns.append(Turn((*new, said), prompt, completion))
                trace.usage += completion.usage
                if completion.finish_reason is not FinishReason.STOP:
                    raise _PolicyFault(f"truncated: turn {turn + 1} hit its {room} tokens")
                shown = await episode.reply(said.content)
                trace.turns[-1] = replace(trace.turns[-1], reward=await _turn_reward(episode, said.content, scope))
                if shown is None:
                    return
                prompt = renderer.extend(conversation, prompt, completion, [shown])
                conversation += [said, shown]
                new = (shown,)
            raise _PolicyFault(f"out_of_turns: no answer within {limits.max_turns}")
    except TimeoutError:
        if scope.expired():
            raise EnvironmentFault(f"rollout took more than {limits.rollout_timeout_s:g} s") from None
        raise


async def _turn_reward(episode: Episode, reply: str, scope: asyncio.Timeout) -> float | None:
    """The reward of the turn just taken; judging has a limit of its own, and takes nothing of the rollout's."""
    now, deadline = asyncio.get_running_loop().time, scope.when()
    started = now()
    scope.reschedule(None)
    try:
        return await episode.turn_reward(reply)
    finally:
        if deadline is not None:
            scope.reschedule(deadline + now() - started)


async def _generate(
    generate: Generate, prompt: tuple[int, ...], sampling: Sampling, session_id: str, timeout_s: float
) -> Completion:
    start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s) as scope:
            completion = await generate(prompt, sampling, session_id=session_id)
        problem = _problem(completion, sampling)
    except TimeoutError as error:
        if scope.expired():
            raise _EngineFault(f"no answer within {timeout_s:g} s") from None
        raise _EngineFault(f"raised TimeoutError: {error}".rstrip(": ")) from error
    except Exception as error:
        raise _EngineFault(f"raised {type(error).__name__}: {error}"[:300]) from error
    if problem:
        raise _EngineFault(problem)
    if completion.usage == Usage():
        spent = Usage(len(prompt), 0, len(completion.token_ids), time.perf_counter() - start)
        completion = replace(completion, usage=spent)
    return completion


def _problem(completion: Completion, sampling: Sampling) -> str:
    """Why a completion cannot be trusted; empty when it can."""
    ids, logprobs = completion.token_ids, completion.logprobs
    if completion.finish_reason is FinishReason.ABORT:
        return "aborted the request"
    if not ids:
        return "returned no tokens"
    if len(ids) > sampling.max_tokens:
        return f"returned {len(ids)} tokens of at most {sampling.max_tokens}"
    if len(logprobs) != len(ids):
        return f"returned {len(logprobs)} logprobs for {len(ids)} tokens"
    for value in logprobs:
        # The smallest excess over 0 is rounding; more is another token's or no probability at all.
        if value is None or not math.isfinite(value) or value > 1e-4:
            return f"returned the logprob {value}"
    covered = 0
    for span in completion.policy_spans:
        if span.start != covered or span.end < span.start:
            break
        covered = span.end
    if covered != len(ids):
        return "returned policy spans that do not cover the tokens"
    return ""


async def run_group(
    task: Task,
    taskset: Taskset,
    generate: Generate,
    renderer: Renderer,
    sampling: Sampling,
    *,
    group_id: str,
    size: int,
    seed: int,
    source: str = "train",
    retries: int = 1,
    slots: asyncio.Semaphore | None = None,
    sessions: Sessions | None = None,
    audit: Callable[[str], bool] | None = None,
) -> RolloutGroup:
    """Runs ``size`` tries at one task side by side.

    Rollout ``index`` draws from a seed of its own that depends on ``(seed, task, index)`` alone, so that a second run repeats
    the first and siblings differ. A try that ends in an environment or verifier fault is made again, at most ``retries`` times,
    in a fresh environment and under a new id; the faulted one stays in the group as a record and never enters a gradient.

    Args:
        slots: bounds how many rollouts run at once, over all groups that share it.
        sessions: the engine's lockstep sessions, opened here for the group and closed one by one as rollouts end.
        audit: says by a rollout's id whether the gold verifier is asked about it; nobody's when absent.

    Returns:
        The group, ordered by index and attempt; ``group_id/index`` and ``group_id/index~attempt`` are the rollouts' ids.
    """
    (group,) = await run_groups(
        [task],
        taskset,
        generate,
        renderer,
        sampling,
        group_ids=[group_id],
        size=size,
        seed=seed,
        source=source,
        retries=retries,
        slots=slots,
        sessions=sessions,
        audit=audit,
    )
    return group


async def run_groups(
    tasks: Sequence[Task],
    taskset: Taskset,
    generate: Generate,
    renderer: Renderer,
    sampling: Sampling,
    *,
    group_ids: Sequence[str],
    size: int,
    seed: int,
    source: str = "train",
    retries: int = 1,
    slots: asyncio.Semaphore | None = None,
    sessions: Sessions | None = None,
    audit: Callable[[str], bool] | None = None,
) -> tuple[RolloutGroup, ...]:
    """Runs one group per task, all side by side; see :func:`run_group`.

    All lockstep sessions open before the first rollout starts, so that the engine's batches, hence every bit of the result,
    depend on the tasks and seeds alone. When they cannot be opened, the engine's error is raised.
    """
    if size < 1:
        raise EvergradError(f"a group of {size} rollouts", where="run_groups", hint="set size to at least 1")
    if len(set(group_ids)) != len(tasks):
        raise EvergradError(f"{len(set(group_ids))} group ids for {len(tasks)} tasks", where="run_groups")
    if source == "train":
        check_training_sampling(sampling)

    async def one(task: Task, group_id: str, index: int) -> list[Rollout]:
        attempts: list[Rollout] = []
        for attempt in range(retries + 1):
            rollout_id = _rollout_id(group_id, index, attempt)
            drawn = replace(sampling, seed=derive_seed(seed, task.task_id, index, attempt))
            if attempt > 0:
                await _open_sessions(sessions, [rollout_id])
            async with _closing(sessions, rollout_id), slots or nullcontext():
                attempts.append(
                    await run_rollout(
                        task,
                        taskset,
                        generate,
                        renderer,
                        drawn,
                        rollout_id=rollout_id,
                        group_id=group_id,
                        source=source,
                        audit=audit is not None and audit(rollout_id),
                    )
                )
            if attempts[-1].outcome.trainable:
                break
        return attempts

    await _open_sessions(sessions, [_rollout_id(group_id, index, 0) for group_id in group_ids for index in range(size)])
    async with asyncio.TaskGroup() as running:
        tries = [
            [running.create_task(one(task, group_id, index)) for index in range(size)]
            for task, group_id in zip(tasks, group_ids, strict=True)
        ]
    return tuple(
        RolloutGroup(group_id, tuple(rollout for each in group for rollout in each.result()))
        for group_id, group in zip(group_ids, tries, strict=True)
    )


def _rollout_id(group_id: str, index: int, attempt: int) -> str:
    return f"{group_id}/{index}" + (f"~{attempt}" if attempt else "")


@asynccontextmanager
async def _closing(sessions: Sessions | None, session_id: str) -> AsyncIterator[None]:
    """Closes a lockstep session however its rollout ends, so that the engine does not hold for it."""
    try:
        yield
    finally:
        if sessions is not None:
            try:
                await sessions.close_sessions([session_id])
            except Exception as error:
                # The rollout is good. The engine holds for the session a while, lets it go, and counts that as a miss.
                _log.warning("the lockstep session of rollout %s did not close: %s", session_id, error)


async def _open_sessions(sessions: Sessions | None, ids: Sequence[str]) -> None:
    """A failure leaves by exception: without its session a rollout would be sampled all the same, but never twice alike."""
    if sessions is not None:
        await sessions.open_sessions(ids)
