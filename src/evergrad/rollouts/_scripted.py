"""Things that speak like an engine without being one: scripts for demonstrations, a fake for tests and overhead benches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from random import Random

from evergrad.envs import Taskset
from evergrad.rollouts._renderer import Renderer
from evergrad.rollouts._run import Generate, run_rollout
from evergrad.types import Completion, EvergradError, FinishReason, PolicySpan, RolloutGroup, Sampling, Task, Usage


def scripted(texts: Iterable[str], renderer: Renderer, *, policy_version: int = 0) -> Generate:
    """A ``Generate`` that says ``texts`` in order, each session from the beginning; how demonstrations become rollouts.

    Completions hold the ids a model should have sampled, end of turn included, at logprob 0.
    """
    script = tuple(texts)
    said: dict[str, int] = {}

    async def generate(prompt_token_ids: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        turn = said.get(session_id, 0)
        if turn >= len(script):
            raise EvergradError(f"the script has {len(script)} replies and was asked for another", where=session_id)
        said[session_id] = turn + 1
        return complete(script[turn], renderer, sampling, policy_version=policy_version, prompt_tokens=len(prompt_token_ids))

    return generate


async def demonstrate(tasks: Iterable[Task], taskset: Taskset, renderer: Renderer) -> tuple[RolloutGroup, ...]:
    """Plays each task's own demonstration through its environment; one group of one verified rollout per task.

    With the estimator ``constant`` they become the samples of a supervised warm start.

    Raises:
        EvergradError: a task that nobody can demonstrate, or whose demonstration does not earn a full reward.
    """
    groups = []
    for task in tasks:
        texts = taskset.demonstration(task)
        if not texts:
            raise EvergradError(
                "nobody can demonstrate this task",
                where=task.task_id,
                hint="define demonstrate() in the environment, or set warm_start.demonstrations = 0",
            )
        rollout = await run_rollout(
            task,
            taskset,
            scripted(texts, renderer),
            renderer,
            Sampling(max_tokens=task.limits.max_tokens_per_turn),
            rollout_id=f"demonstration/{task.task_id}",
            group_id=f"demonstration/{task.task_id}",
            source="demonstration",
        )
        if not rollout.success:
            fault = rollout.fault or f"reward {rollout.reward}"
            raise EvergradError(f"its demonstration fails: {fault}", where=task.task_id, hint=_hint(fault))
        groups.append(RolloutGroup(rollout.group_id, (rollout,)))
    return tuple(groups)


def _hint(fault: str) -> str:
    if fault.startswith("truncated"):
        return "shorten the reply, or raise limits.max_tokens_per_turn in the environment"
    if fault.startswith("out_of_turns"):
        return "demonstrate in fewer turns, or raise limits.max_turns in the environment"
    if fault.startswith("out_of_tokens"):
        return "shorten the prompt or the tools' results, or raise limits.max_total_tokens in the environment"
    return "'evergrad env test' shows what fails"


def complete(
    text: str, renderer: Renderer, sampling: Sampling, *, policy_version: int = 0, logprob: float = 0.0, prompt_tokens: int = 0
) -> Completion:
    """``text`` as a completion, cut at ``sampling.max_tokens`` like an engine would cut it."""
    ids = renderer.reply(text)
    finish = FinishReason.STOP if len(ids) <= sampling.max_tokens else FinishReason.LENGTH
    ids = ids[: sampling.max_tokens]
    span = PolicySpan(policy_version, 0, len(ids))
    return Completion(ids, (logprob,) * len(ids), finish, (span,), Usage(prompt_tokens, 0, len(ids)))


class FakeEngine:
    """A deterministic engine for tests: ``answer(prompt_text, rng)`` says what it replies.

    Equal prompts and seeds give equal completions. ``policy_version`` and ``delay_s`` may be changed at any time; a completion
    is stamped with the version at which it was asked for.
    """

    def __init__(
        self, renderer: Renderer, answer: Callable[[str, Random], str], *, policy_version: int = 0, delay_s: float = 0.0
    ) -> None:
        self.renderer, self.answer = renderer, answer
        self.policy_version, self.delay_s = policy_version, delay_s
        self.running = self.most_running = self.requests = 0

    async def __call__(self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        version = self.policy_version
        self.requests += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        prompt = self.renderer.decode(prompt_token_ids)
        text = self.answer(prompt, Random(f"{sampling.seed}/{sampling.temperature}"))
        return complete(
            text, self.renderer, sampling, policy_version=version, logprob=-0.5, prompt_tokens=len(prompt_token_ids)
        )
