"""Time to a held-out success: this engine and trainer against TRL's ``GRPOTrainer``, from the same start on the same task.

The task is ``ticket_routing.py``, the model ``tiny`` after a warm start on demonstrations of older rules. Both then make
the same number of steps of 8 groups × 8 samples on the same tasks in the same order, with the same loss (DAPO's), advantages
(centred on the group's mean), AdamW and learning rate. Ours runs as a user runs it: engine and trainer are processes of their
own, each step rolls out, trains and moves the weights into the engine. TRL generates the whole batch at once and trains in the
same process, without gradient checkpointing and with the faster of its cuts into micro-batches. Each side computes on one core
or on all of them, whichever a few steps beforehand show to be faster for it. The clock counts generation, rewards, training and
weight updates; it stands while programs start and while weights are put aside after each step.

Afterwards one engine plays the held-out tasks greedily with all weights that were put aside. A run's time to the goal is that
of its first step whose weights reach it; the figure is the ratio of the sums over seeds. Wilson intervals of the last step's
success, over all seeds, show that both learned the same.

The last line of output is one JSON object; the same is kept under ``benchmarks/results/``. Needs the extra ``trl``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks import record
from transformers import AutoTokenizer

from evergrad.envs import Taskset
from evergrad.evals import wilson_interval
from evergrad.inference import EngineClient, EngineConfig
from evergrad.loop.placement import LocalPlacement
from evergrad.rollouts import Renderer, assign_advantages, demonstrate, greedy_rollout, run_groups, run_rollout
from evergrad.training import LossConfig, TrainerClient, TrainerConfig
from evergrad.training.config import OptimizerConfig
from evergrad.types import Completion, FinishReason, PolicySpan, Sampling, Task, TrainingBatch, TrainingSample

ENVIRONMENT = str(Path(__file__).parent / "ticket_routing.py")
GROUPS, GROUP_SIZE = 8, 8
LOSS = LossConfig(name="dapo", options={"clip_high": 0.2})
OPTIMIZER = OptimizerConfig(betas=(0.9, 0.95))
WARM_STEPS, WARM_SIZE, WARM_LR = 450, 32, 3e-3
HELDOUT = 128
TRL_ROWS = (64, 16)
"""Samples of a micro-batch of TRL's; all that are tried make the same step."""
TRIED_STEPS = 5


@dataclass(frozen=True)
class Plan:
    """One run of one side."""

    start: Path
    """The model that both begin with."""
    output: Path
    """Where weights are put aside: a folder for each step, from 1."""
    seed: int
    steps: int
    lr: float
    threads: int
    rows: int = GROUPS * GROUP_SIZE
    """Samples of a micro-batch; read by TRL's side."""

    def tasks(self) -> tuple[Task, ...]:
        return Taskset(ENVIRONMENT).tasks("train", GROUPS * self.steps, seed=self.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a known name or a folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--goal", type=float, default=0.95, help="held-out success that ends the clock")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--threads", type=int, default=record.cores())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments, Path(scratch))
    record.keep(result, arguments.threads)


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from evergrad.registry import base_model

    start = asyncio.run(warm_start(base_model(arguments.model), scratch / "start", arguments.threads))
    plans = {side: fastest(sorted({1, arguments.threads}), side, arguments.lr, scratch, start) for side in SIDES}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for seed in range(arguments.seeds):
        for side, run in SIDES.items():
            plan = replace(plans[side], output=scratch / f"{side}-{seed}", seed=seed, steps=arguments.steps)
            seconds = alone(run, plan)
            scores = asyncio.run(scores_of(plan))
            runs[side].append(summary(seconds, scores, arguments.goal))
            print(f"seed {seed}, {side}: {runs[side][-1]}", flush=True)
    totals = {side: [run["seconds_to_goal"] for run in each] for side, each in runs.items()}
    reached = all(value is not None for each in totals.values() for value in each)
    return {
        "benchmark": "learn",
        "ratio_trl": round(sum(totals["trl"]) / sum(totals["ours"]), 3) if reached else None,
        "goal": arguments.goal,
        **{side: final(each) for side, each in runs.items()},
        "model": arguments.model,
        "task": "ticket_routing",
        "prompt_tokens": len(renderer(start).prompt(Taskset(ENVIRONMENT).tasks("train", 1)[0].prompt)),
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "steps": arguments.steps,
        "lr": arguments.lr,
        "heldout_tasks": HELDOUT,
        "threads_ours": plans["ours"].threads,
        "threads_trl": plans["trl"].threads,
        "rows_trl": plans["trl"].rows,
    }


def fastest(threads: Sequence[int], side: str, lr: float, scratch: Path, start: Path) -> Plan:
    """Of the ways in which one side can make the same steps."""
    rows = TRL_ROWS if side == "trl" else TRL_ROWS[:1]
    seconds: dict[Plan, float] = {}
    for count, cut in itertools.product(threads, rows):
        plan = Plan(start, scratch / f"tried-{side}-{count}-{cut}", 0, TRIED_STEPS, lr, count, cut)
        seconds[plan] = statistics.median(alone(SIDES[side], plan)[1:])
        print(f"{side} on {count} threads, {cut} rows: {seconds[plan]:.3f} s a step", flush=True)
    return min(seconds, key=lambda plan: seconds[plan])


def alone(run: Callable[[Plan], list[float]], plan: Plan) -> list[float]:
    """What ``run`` gives in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, plan).result()


def summary(seconds: list[float], scores: list[float], goal: float) -> dict[str, Any]:
    """One run: ``scores`` begins with the start's."""
    step = next((number for number, score in enumerate(scores[1:], 1) if score >= goal), None)
    return {
        "steps_to_goal": step,
        "seconds_to_goal": None if step is None else round(sum(seconds[:step]), 2),
        "seconds_per_step": round(sum(seconds) / len(seconds), 3),
        "start": scores[0],
        "final": scores[-1],
    }


def final(runs: list[dict[str, Any]]) -> dict[str, Any]:
    successes = round(sum(run["final"] for run in runs) * HELDOUT)
    low, high = wilson_interval(successes, HELDOUT * len(runs))
    return {
        "final": round(successes / (HELDOUT * len(runs)), 4),
        "final_ci95": [round(low, 4), round(high, 4)],
        "steps_to_goal": [run["steps_to_goal"] for run in runs],
        "seconds_to_goal": [run["seconds_to_goal"] for run in runs],
        "seconds_per_step": [run["seconds_per_step"] for run in runs],
        "start": runs[0]["start"],
    }


def renderer(folder: Path) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(folder))


@asynccontextmanager
async def trainer_on(model: Path, threads: int, seed: int, placement: LocalPlacement) -> AsyncIterator[TrainerClient]:
    config = TrainerConfig(model=str(model), method="full", optimizer=OPTIMIZER, threads=threads, seed=seed)
    worker = await placement.start("trainer", "evergrad.training", config)
    async with TrainerClient(worker.base_url, worker.token) as trainer:
        yield trainer


@asynccontextmanager
async def engine_on(model: Path, threads: int, seed: int, placement: LocalPlacement) -> AsyncIterator[EngineClient]:
    worker = await placement.start("engine", "evergrad.inference", EngineConfig(model=str(model), threads=threads, seed=seed))
    async with EngineClient(worker.base_url, worker.token) as engine:
        yield engine


async def warm_start(model: Path, output: Path, threads: int) -> Path:
    """Supervised steps on what followed the old rules, mostly; the start of all runs."""
    taskset = Taskset(ENVIRONMENT, {"shown": True})
    shown = await demonstrate(taskset.tasks("train", WARM_SIZE * WARM_STEPS, seed=1000), taskset, renderer(model))
    async with LocalPlacement(output.parent / "logs") as placement, trainer_on(model, threads, 0, placement) as trainer:
        for first in range(0, len(shown), WARM_SIZE):
            samples = [s for group in shown[first : first + WARM_SIZE] for s in assign_advantages(group, "constant")]
            await trainer.step(_batch(samples), LossConfig(name="cross_entropy"), WARM_LR)
        await trainer.export(str(output))
    return output


def run_ours(plan: Plan) -> list[float]:
    """Seconds of each step."""
    return asyncio.run(_run_ours(plan))


async def _run_ours(plan: Plan) -> list[float]:
    taskset, tasks, rendered = Taskset(ENVIRONMENT), plan.tasks(), renderer(plan.start)
    sampling = Sampling(temperature=1.0, max_tokens=taskset.environment_class.limits.max_tokens_per_turn)
    seconds: list[float] = []
    async with (
        LocalPlacement(plan.output / "logs") as placement,
        trainer_on(plan.start, plan.threads, plan.seed, placement) as trainer,
        engine_on(plan.start, plan.threads, plan.seed, placement) as engine,
    ):
        await engine.attach(await trainer.descriptor())
        for step in range(1, plan.steps + 1):
            started = time.perf_counter()
            groups = await run_groups(
                tasks[GROUPS * (step - 1) : GROUPS * step],
                taskset,
                engine,
                rendered,
                sampling,
                group_ids=[f"s{step}-g{number}" for number in range(GROUPS)],
                size=GROUP_SIZE,
                seed=plan.seed,
                sessions=engine,
            )
            await trainer.step(_batch([s for group in groups for s in assign_advantages(group)]), LOSS, plan.lr)
            await engine.update_weights(await trainer.publish(step))
            seconds.append(time.perf_counter() - started)
            await trainer.export(str(plan.output / str(step)))
    return seconds


def _batch(samples: list[TrainingSample]) -> TrainingBatch:
    return TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))


def run_trl(plan: Plan) -> list[float]:
    """Seconds of each step, TRL's way."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.disable_progress_bar()
    torch.set_num_threads(plan.threads)
    taskset, tasks, rendered = Taskset(ENVIRONMENT), plan.tasks(), renderer(plan.start)
    stops = rendered.stop_token_ids
    seconds: list[float] = []

    async def score(task: Task, token_ids: list[int]) -> float:
        """The verifier that judges our rollouts, too."""

        async def generate(prompt_token_ids: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
            reason = FinishReason.STOP if token_ids[-1] in stops else FinishReason.LENGTH
            ids = tuple(token_ids)
            return Completion(ids, (0.0,) * len(ids), reason, (PolicySpan(0, 0, len(ids)),))

        rollout = await run_rollout(
            task, taskset, generate, rendered, Sampling(), rollout_id="trl", group_id="trl", source="eval"
        )
        assert rollout.turns[0].prompt_token_ids == rendered.prompt(task.prompt)
        return float(rollout.reward or 0.0)

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        async def every() -> list[float]:
            return list(await asyncio.gather(*(score(tasks[n], ids) for n, ids in zip(number, completion_ids, strict=True))))

        return asyncio.run(every())

    class Watch(TrainerCallback):
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seconds.append(time.perf_counter() - self.started)
            model.save_pretrained(plan.output / str(state.global_step))
            self.started = time.perf_counter()

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(plan.start, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(plan.output / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=plan.seed,
            max_steps=plan.steps,
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=plan.rows,
            gradient_accumulation_steps=GROUPS * GROUP_SIZE // plan.rows,
            gradient_checkpointing=False,
            max_completion_length=taskset.environment_class.limits.max_tokens_per_turn,
            shuffle_dataset=False,
            scale_rewards="none",
            loss_type="dapo",
            epsilon=0.2,
            learning_rate=plan.lr,
            adam_beta1=OPTIMIZER.betas[0],
            adam_beta2=OPTIMIZER.betas[1],
            max_grad_norm=OPTIMIZER.grad_clip,
            lr_scheduler_type="constant",
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [m.as_dict() for m in task.prompt], "number": n} for n, task in enumerate(tasks)]
        ),
        processing_class=AutoTokenizer.from_pretrained(plan.start),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return seconds


async def scores_of(plan: Plan) -> list[float]:
    """Held-out success of the start and of the weights after each step."""
    taskset, rendered = Taskset(ENVIRONMENT), renderer(plan.start)
    tasks = taskset.tasks("heldout", HELDOUT, seed=plan.seed)
    scores = []
    async with (
        LocalPlacement(plan.output / "logs") as placement,
        engine_on(plan.start, plan.threads, plan.seed, placement) as engine,
    ):
        for step in range(plan.steps + 1):
            if step:
                await engine.load_weights(str(plan.output / str(step)), step)
            rollouts = await asyncio.gather(
                *(
                    greedy_rollout(task, taskset, engine, rendered, rollout_id=f"{step}-{n}", group_id="heldout")
                    for n, task in enumerate(tasks)
                )
            )
            scores.append(sum(rollout.success for rollout in rollouts) / HELDOUT)
    return scores


SIDES: dict[str, Callable[[Plan], list[float]]] = {"ours": run_ours, "trl": run_trl}

if __name__ == "__main__":
    main()
