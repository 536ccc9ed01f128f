"""How rollouts end: every fault has its name, and nobody else is hurt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from evergrad.envs import Taskset
from evergrad.rollouts import FakeEngine, Renderer, complete, run_group, run_groups, run_rollout, scripted
from evergrad.types import Completion, EvergradError, FinishReason, Outcome, PolicySpan, Rollout, RolloutGroup, Sampling, Task

SAMPLING = Sampling(seed=7, max_tokens=200)


async def say(taskset: Taskset, renderer: Renderer, *texts: str, task: Task | None = None, **options: Any) -> Rollout:
    task = task or taskset.tasks("train", 1)[0]
    options = {"rollout_id": "r", "group_id": "g", **options}
    return await run_rollout(task, taskset, scripted(texts, renderer), renderer, SAMPLING, **options)


async def test_gold_demonstrations_score_one_with_every_token_counted(desk: Taskset, renderer: Renderer) -> None:
    for task in desk.tasks("train", 40, seed=3):
        texts = desk.open(task).demonstrate()
        assert texts is not None
        rollout = await say(desk, renderer, *texts, task=task, source="demonstration")
        assert (rollout.outcome, rollout.reward, rollout.fault) == (Outcome.SCORED, 1.0, "")
        assert [renderer.text(turn.completion) for turn in rollout.turns] == list(texts)
        sampled = sum(len(renderer.reply(text)) for text in texts)
        assert rollout.usage.completion_tokens == sampled
        assert rollout.usage.prompt_tokens == sum(len(turn.prompt_token_ids) for turn in rollout.turns)


@pytest.mark.parametrize(
    ("texts", "outcome", "fault"),
    [
        (["act(what=raise)"], Outcome.ENVIRONMENT_FAULT, "environment: tool act raised RuntimeError: the shelf fell"),
        (["act(what=exit)"], Outcome.ENVIRONMENT_FAULT, "environment: tool act raised SystemExit: 3"),
        (["act(what=wait)"], Outcome.ENVIRONMENT_FAULT, "environment: tool act took more than 0.2 s"),
        (["act(what=spin)"], Outcome.ENVIRONMENT_FAULT, "environment: tool act blocked for more than 0.2 s"),
        (["raise"], Outcome.VERIFIER_FAULT, "verifier: judged raised ValueError: judge fell ill"),
        (["wait"], Outcome.VERIFIER_FAULT, "verifier: judged took more than 0.2 s"),
        (["spin"], Outcome.VERIFIER_FAULT, "verifier: judged blocked for more than 0.2 s"),
        (["swallow"], Outcome.VERIFIER_FAULT, "verifier: judged took more than 0.2 s"),
        (["nan"], Outcome.VERIFIER_FAULT, "verifier: judged gave nan, not a number within ±1e+09"),
        (["none"], Outcome.VERIFIER_FAULT, "verifier: judged gave None, not a number within ±1e+09"),
        (["inf"], Outcome.VERIFIER_FAULT, "verifier: judged gave inf, not a number within ±1e+09"),
        (["text"], Outcome.VERIFIER_FAULT, "verifier: judged gave '1.0', not a number within ±1e+09"),
        (["huge"], Outcome.VERIFIER_FAULT, "verifier: judged gave 1e+300, not a number within ±1e+09"),
        (["list"], Outcome.VERIFIER_FAULT, "verifier: judged gave [1.0], not a number within ±1e+09"),
        (["act(what=a)"] * 3, Outcome.POLICY_FAULT, "out_of_turns: no answer within 3"),
        (["act(what"] * 3, Outcome.POLICY_FAULT, "out_of_turns: no answer within 3"),
        (["x" * 500], Outcome.POLICY_FAULT, "truncated: turn 1 hit its 80 tokens"),
        (["act(what=a)"], Outcome.ENVIRONMENT_FAULT, "engine: raised EvergradError"),
    ],
)
async def test_each_fault_has_its_name(
    troubled: Taskset, renderer: Renderer, texts: list[str], outcome: Outcome, fault: str
) -> None:
    rollout = await say(troubled, renderer, *texts)
    assert rollout.outcome is outcome
    assert rollout.fault.startswith(fault)
    assert rollout.reward == (0.0 if outcome is Outcome.POLICY_FAULT else None)
    assert len(rollout.turns) == len(texts), "the turns up to the fault are kept"


STEPWISE = """
import asyncio
from evergrad.envs import Environment, TaskRow, reward, tool
from evergrad.types import Limits

class Stepwise(Environment):
    limits = Limits(max_turns=3, max_tokens_per_turn=80, max_total_tokens=600)

    @classmethod
    def tasks(cls, rng, config):
        for number in range(1000):
            yield TaskRow(f"Say {number}.", {"number": number})

    @tool
    async def look(self) -> str:
        return "seen"

    @reward
    async def right(self, answer: str) -> float:
        return float(answer == str(self.facts["number"]))

    @reward(per_turn=True, weight=0.5)
    async def looked(self, reply: str) -> float:
        if reply == "nan":
            return float("nan")
        if reply == "raise":
            raise ValueError("cannot say")
        return float(reply == "look()" and self.calls[-1].result == "seen")

    @reward(per_turn=True, weight=-1.0)
    async def slow(self, reply: str) -> float:
        if reply == "think":
            await asyncio.sleep(1.2)
        return 0.125
"""


async def test_a_turn_has_a_reward_of_its_own_beside_the_verified_one(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "stepwise.py"
    path.write_text(STEPWISE)
    taskset = Taskset(str(path))
    right = str(taskset.tasks("train", 1)[0].metadata["number"])
    rollout = await say(taskset, renderer, "look()", "look(", right)
    assert [turn.reward for turn in rollout.turns] == [0.375, -0.125, -0.125]
    assert (rollout.outcome, rollout.reward, rollout.reward_parts) == (Outcome.SCORED, 1.0, {"right": 1.0})
    # Cut off before the environment heard it: no reward for that turn, and the others keep theirs.
    rollout = await say(taskset, renderer, "look()", "x" * 500)
    assert [turn.reward for turn in rollout.turns] == [0.375, None]
    assert rollout.outcome is Outcome.POLICY_FAULT
    for text, fault in (("nan", "looked gave nan, not a number"), ("raise", "looked raised ValueError: cannot say")):
        rollout = await say(taskset, renderer, "look()", text)
        assert (rollout.outcome, rollout.reward) == (Outcome.VERIFIER_FAULT, None)
        assert rollout.fault.startswith(f"verifier: {fault}")
        assert [turn.reward for turn in rollout.turns] == [0.375, None]


async def test_judging_a_turn_takes_nothing_of_the_rollouts_time(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "stepwise.py"
    path.write_text(STEPWISE)
    taskset = Taskset(str(path))
    task = taskset.tasks("train", 1)[0]
    task = replace(task, limits=replace(task.limits, rollout_timeout_s=1.0, score_timeout_s=30.0))
    rollout = await say(taskset, renderer, "think", task=task)
    assert (rollout.outcome, rollout.turns[0].reward) == (Outcome.SCORED, -0.125)
    task = replace(task, limits=replace(task.limits, score_timeout_s=0.5))
    rollout = await say(taskset, renderer, "think", task=task)
    assert rollout.fault == "verifier: slow took more than 0.5 s"


async def test_rewards_of_turns_alone_do_not_make_a_score(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "endless.py"
    path.write_text(STEPWISE.replace("    @reward\n", ""))
    rollout = await say(Taskset(str(path)), renderer, "0")
    assert rollout.outcome is Outcome.VERIFIER_FAULT
    assert "no @reward method for the end" in rollout.fault


async def test_a_slip_is_told_to_the_model_which_can_recover(troubled: Taskset, renderer: Renderer) -> None:
    task = troubled.tasks("train", 1)[0]
    slips = {
        "act(what": "error: use act(what)",
        "act(what=a, why=b)": "error: use act(what)",
        "fly(to=moon)": "error: tools are act",
        "act(what=refuse)": "error: not that",
    }
    for slip, answer in slips.items():
        rollout = await say(troubled, renderer, slip, str(task.metadata["number"]))
        assert rollout.reward == 1.0
        assert rollout.turns[1].messages[0].content == answer
        assert rollout.turns[1].messages[0].role == "tool"


async def test_a_flooding_tool_ends_the_rollout_without_a_negative_budget(troubled: Taskset, renderer: Renderer) -> None:
    rollout = await say(troubled, renderer, "act(what=flood)", "1")
    assert rollout.outcome is Outcome.POLICY_FAULT
    assert rollout.fault.startswith("out_of_tokens")
    assert len(rollout.turns) == 1


async def test_every_environment_is_closed_however_its_rollout_ends(troubled: Taskset, renderer: Renderer) -> None:
    kind: Any = troubled.environment_class
    before = kind.opened - kind.closed
    for texts in (["act(what=raise)"], ["raise"], ["0"], ["x" * 500]):
        await say(troubled, renderer, *texts)
    task = asyncio.create_task(say(troubled, renderer, "act(what=wait)"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kind.opened - kind.closed == before


def _damaged(completion: Completion, damage: str) -> Completion:
    ids, logprobs = completion.token_ids, completion.logprobs
    return {
        "nan logprob": replace(completion, logprobs=(float("nan"), *logprobs[1:])),
        "no logprob": replace(completion, logprobs=(None, *logprobs[1:])),  # type: ignore[arg-type]
        "positive logprob": replace(completion, logprobs=(0.3, *logprobs[1:])),
        "short logprobs": replace(completion, logprobs=logprobs[1:]),
        "no tokens": replace(completion, token_ids=(), logprobs=()),
        "gap in spans": replace(completion, policy_spans=(PolicySpan(0, 1, len(ids)),)),
        "aborted": replace(completion, finish_reason=FinishReason.ABORT),
        "nothing": None,  # type: ignore[dict-item]
        "too many": replace(completion, token_ids=ids * 99, logprobs=logprobs * 99),
    }[damage]


@pytest.mark.parametrize(
    "damage",
    [
        "nan logprob",
        "no logprob",
        "positive logprob",
        "short logprobs",
        "no tokens",
        "gap in spans",
        "aborted",
        "nothing",
        "too many",
    ],
)
async def test_a_damaged_completion_is_an_engine_fault(desk: Taskset, renderer: Renderer, damage: str) -> None:
    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        return _damaged(complete("hello", renderer, sampling), damage)

    task = desk.tasks("train", 1)[0]
    rollout = await run_rollout(task, desk, generate, renderer, SAMPLING, rollout_id="r", group_id="g")
    assert rollout.outcome is Outcome.ENVIRONMENT_FAULT
    assert rollout.fault.startswith("engine: ")


@pytest.mark.parametrize("failing", [0, 3, 7])
@pytest.mark.parametrize("how", ["engine", "tool", "verifier"])
async def test_siblings_of_a_fault_are_unharmed_and_keep_their_own_rewards(
    troubled: Taskset, renderer: Renderer, failing: int, how: str
) -> None:
    task = troubled.tasks("train", 1)[0]
    number = str(task.metadata["number"])

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        index = int(session_id.split("/")[-1].split("~")[0])
        if index != failing:
            return complete(number if index % 2 else "wrong", renderer, sampling)
        if how == "engine":
            raise ConnectionError("gone")
        return complete("act(what=raise)" if how == "tool" else "raise", renderer, sampling)

    group = await run_group(task, troubled, generate, renderer, SAMPLING, group_id="g", size=8, seed=1, retries=0)
    assert [rollout.rollout_id for rollout in group.rollouts] == [f"g/{index}" for index in range(8)]
    expected = [None if index == failing else float(index % 2) for index in range(8)]
    assert [rollout.reward for rollout in group.rollouts] == expected


async def test_a_fault_is_retried_in_a_fresh_environment_and_both_tries_stay_on_record(
    troubled: Taskset, renderer: Renderer
) -> None:
    task = troubled.tasks("train", 1)[0]
    broken: set[str] = set()

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        asked_before = "act" in renderer.decode(prompt).rsplit("user", 1)[-1]
        if session_id == "g/1" and asked_before:
            broken.add(session_id)
            raise ConnectionError("dropped in the middle")
        text = str(task.metadata["number"]) if asked_before else "act(what=a)"
        return complete(text, renderer, sampling)

    group = await run_group(task, troubled, generate, renderer, SAMPLING, group_id="g", size=3, seed=1, retries=2)
    assert broken == {"g/1"}
    outcomes = {rollout.rollout_id: rollout.outcome for rollout in group.rollouts}
    scored = Outcome.SCORED
    assert outcomes == {"g/0": scored, "g/1": Outcome.ENVIRONMENT_FAULT, "g/1~1": scored, "g/2": scored}
    again = group.rollouts[2]
    assert len(again.turns) == 2, "the retry began anew: it carries nothing of the broken try"
    assert again.turns[0].prompt_token_ids == group.rollouts[0].turns[0].prompt_token_ids


async def test_retries_are_bounded(troubled: Taskset, renderer: Renderer) -> None:
    task = troubled.tasks("train", 1)[0]
    asked = 0

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        nonlocal asked
        asked += 1
        raise ConnectionError("gone")

    group = await run_group(task, troubled, generate, renderer, SAMPLING, group_id="g", size=2, seed=1, retries=3)
    assert asked == len(group.rollouts) == 8
    assert {rollout.outcome for rollout in group.rollouts} == {Outcome.ENVIRONMENT_FAULT}


async def test_a_hanging_engine_is_a_fault_within_the_limit(desk: Taskset, renderer: Renderer) -> None:
    task = desk.tasks("train", 1)[0]

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        await asyncio.sleep(3_600)
        raise AssertionError

    for limits in (replace(task.limits, generate_timeout_s=0.05), replace(task.limits, rollout_timeout_s=0.05)):
        rollout = await run_rollout(
            replace(task, limits=limits), desk, generate, renderer, SAMPLING, rollout_id="r", group_id="g"
        )
        assert rollout.outcome is Outcome.ENVIRONMENT_FAULT
        assert "0.05 s" in rollout.fault


async def test_a_rollout_that_used_its_whole_time_is_still_scored(troubled: Taskset, renderer: Renderer) -> None:
    task = troubled.tasks("train", 1)[0]
    task = replace(task, limits=replace(task.limits, rollout_timeout_s=0.3, score_timeout_s=5.0))

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        await asyncio.sleep(0.25)
        return complete(str(task.metadata["number"]), renderer, sampling)

    rollout = await run_rollout(task, troubled, generate, renderer, SAMPLING, rollout_id="r", group_id="g")
    assert (rollout.outcome, rollout.reward) == (Outcome.SCORED, 1.0)


async def test_cancelling_is_not_a_wrong_answer(troubled: Taskset, renderer: Renderer) -> None:
    task = asyncio.create_task(say(troubled, renderer, "wait"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def _words(prompt: str, rng: Random) -> str:
    return f"It arrives {rng.choice(['May', 'June', 'July'])} {rng.randint(1, 28)}."


def _said(renderer: Renderer, group: RolloutGroup) -> list[list[str]]:
    return [[renderer.text(turn.completion) for turn in rollout.turns] for rollout in group.rollouts]


async def test_siblings_differ_and_a_second_run_repeats_them(desk: Taskset, renderer: Renderer) -> None:
    task, other = desk.tasks("train", 2)
    options: dict[str, Any] = {"group_id": "g", "size": 8, "seed": 7}
    engine = FakeEngine(renderer, _words)
    first = await run_group(task, desk, engine, renderer, SAMPLING, **options)
    second = await run_group(task, desk, engine, renderer, SAMPLING, **{**options, "group_id": "h"})
    elsewhere = await run_group(other, desk, engine, renderer, SAMPLING, **options)
    assert len({texts[0] for texts in _said(renderer, first)}) > 1
    assert _said(renderer, first) == _said(renderer, second)
    assert _said(renderer, first) != _said(renderer, elsewhere)


async def test_turns_of_a_rollout_do_not_share_their_random_numbers(desk: Taskset, renderer: Renderer) -> None:
    seeds: list[int | None] = []

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        seeds.append(sampling.seed)
        return complete(f"order(id=F5{len(seeds)})" if len(seeds) < 3 else "done", renderer, sampling)

    task = desk.tasks("train", 1)[0]
    await run_rollout(task, desk, generate, renderer, SAMPLING, rollout_id="r", group_id="g")
    assert len(set(seeds)) == 3


async def test_a_concurrency_limit_holds_over_groups(desk: Taskset, renderer: Renderer) -> None:
    engine = FakeEngine(renderer, _words, delay_s=0.001)
    slots = asyncio.Semaphore(5)
    tasks = desk.tasks("train", 4)
    await asyncio.gather(
        *(
            run_group(task, desk, engine, renderer, SAMPLING, group_id=task.task_id, size=6, seed=0, slots=slots)
            for task in tasks
        )
    )
    assert engine.requests == 24
    assert engine.most_running == 5


class _Recorded:
    """Records what a lockstep engine would be told; one route may be dead."""

    def __init__(self, dead: str = "") -> None:
        self.open: set[str] = set()
        self.seen: list[str] = []
        self.dead = dead

    async def open_sessions(self, ids: Any) -> None:
        if self.dead == "open":
            raise ConnectionError("gone")
        self.open.update(ids)
        self.seen.extend(ids)

    async def close_sessions(self, ids: Any) -> None:
        if self.dead == "close":
            raise ConnectionError("gone")
        self.open.difference_update(ids)


async def test_lockstep_sessions_open_together_and_close_as_rollouts_end(troubled: Taskset, renderer: Renderer) -> None:
    sessions = _Recorded()
    task = troubled.tasks("train", 1)[0]
    open_at_request: list[set[str]] = []

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        open_at_request.append(set(sessions.open))
        if session_id == "g/1":
            raise ConnectionError("dropped")
        return complete("0", renderer, sampling)

    await run_group(task, troubled, generate, renderer, SAMPLING, group_id="g", size=3, seed=0, sessions=sessions)
    assert open_at_request[0] == {"g/0", "g/1", "g/2"}
    assert sessions.seen == ["g/0", "g/1", "g/2", "g/1~1"]
    assert not sessions.open


async def test_sessions_of_all_groups_open_before_the_first_request(desk: Taskset, renderer: Renderer) -> None:
    sessions = _Recorded()
    open_at_request: list[int] = []

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        open_at_request.append(len(sessions.open))
        return complete("done", renderer, sampling)

    tasks = desk.tasks("train", 3)
    options: dict[str, Any] = {"group_ids": ["a", "b", "c"], "size": 2, "seed": 0, "sessions": sessions}
    groups = await run_groups(tasks, desk, generate, renderer, SAMPLING, **options)
    assert open_at_request[0] == 6
    assert [[rollout.task_id for rollout in group.rollouts] for group in groups] == [[task.task_id] * 2 for task in tasks]
    with pytest.raises(EvergradError, match="2 group ids for 3 tasks"):
        await run_groups(tasks, desk, generate, renderer, SAMPLING, **{**options, "group_ids": ["a", "b", "a"]})


async def test_without_its_sessions_nothing_is_sampled(troubled: Taskset, renderer: Renderer) -> None:
    task, engine = troubled.tasks("train", 1)[0], FakeEngine(renderer, lambda prompt, rng: "0")
    options: dict[str, Any] = {"group_id": "g", "size": 2, "seed": 0, "sessions": _Recorded(dead="open")}
    with pytest.raises(ConnectionError, match="gone"):
        await run_group(task, troubled, engine, renderer, SAMPLING, **options)
    assert engine.requests == 0


async def test_a_session_that_does_not_close_is_told_and_costs_no_rollout(
    troubled: Taskset, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    task, engine = troubled.tasks("train", 1)[0], FakeEngine(renderer, lambda prompt, rng: "0")
    options: dict[str, Any] = {"group_id": "g", "size": 2, "seed": 0, "sessions": _Recorded(dead="close")}
    group = await run_group(task, troubled, engine, renderer, SAMPLING, **options)
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.SCORED] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"the lockstep session of rollout g/{index} did not close: gone" for index in range(2)
    ]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_p=0.5), Sampling(top_k=40)])
async def test_sampling_that_cannot_be_trained_on_is_refused_for_training_only(
    desk: Taskset, renderer: Renderer, sampling: Sampling
) -> None:
    task = desk.tasks("train", 1)[0]
    engine = FakeEngine(renderer, _words)
    with pytest.raises(EvergradError, match=r"temperature 0|top_p"):
        await run_group(task, desk, engine, renderer, sampling, group_id="g", size=2, seed=0)
    group = await run_group(task, desk, engine, renderer, sampling, group_id="g", size=2, seed=0, source="eval")
    assert [rollout.source for rollout in group.rollouts] == ["eval", "eval"]


async def test_a_stopped_prompt_asks_with_the_stated_settings(desk: Taskset, renderer: Renderer) -> None:
    seen: list[Sampling] = []

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        seen.append(sampling)
        return complete("done", renderer, sampling)

    task = desk.tasks("train", 1)[0]
    asked = Sampling(temperature=0.6, top_p=0.9, top_k=5, max_tokens=11, seed=3)
    await run_rollout(task, desk, generate, renderer, asked, rollout_id="r", group_id="g", source="eval")
    (got,) = seen
    assert (got.temperature, got.top_p, got.top_k, got.max_tokens) == (0.6, 0.9, 5, 11)
    assert got.stop_token_ids == renderer.stop_token_ids


async def test_a_policy_fault_earns_what_the_environment_says(
    troubled: Taskset, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(troubled.environment_class, "policy_fault_reward", -1.0)
    rollout = await say(troubled, renderer, "x" * 500)
    assert (rollout.outcome, rollout.reward, rollout.success) == (Outcome.POLICY_FAULT, -1.0, False)
