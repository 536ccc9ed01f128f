"""An agent's load for ``bench_engine``: the demo's policy after its warm start, played as in a step of RL."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from random import Random

from benchmarks.engine_sides import Client
from transformers import AutoTokenizer

from evergrad.envs import Taskset
from evergrad.loop.placement import LocalPlacement
from evergrad.rollouts import Renderer, assign_advantages, demonstrate, derive_seed, run_groups
from evergrad.training import LossConfig, TrainerClient, TrainerConfig
from evergrad.types import Sampling, TrainingBatch

ENVIRONMENT, SETTINGS, EASY = "support_desk", {"contract": "v1"}, {"difficulty": "easy"}
DEMONSTRATIONS, BATCH, LR = 40, 2, 1e-3
"""As in ``examples/demo.toml``."""


async def warm_started(model: Path, threads: int, placement: LocalPlacement) -> Path:
    """Folder of the adapter that the demo's warm start ends with; made once, kept in the user's cache."""
    recipe = repr((ENVIRONMENT, SETTINGS, EASY, DEMONSTRATIONS, BATCH, LR, model.name))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evergrad" / "benchmarks"
    folder = cache / f"agent-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    taskset = Taskset(ENVIRONMENT, {**SETTINGS, **EASY})
    tasks = taskset.tasks("train", DEMONSTRATIONS, seed=derive_seed(0, "demonstrations", 1))
    samples = [list(assign_advantages(group, "constant")) for group in await demonstrate(tasks, taskset, _renderer(model))]
    Random(derive_seed(0, "warm_start", 1)).shuffle(samples)
    worker = await placement.start("trainer", "evergrad.training", TrainerConfig(model=str(model), threads=threads))
    async with TrainerClient(worker.base_url, worker.token) as trainer:
        for first in range(0, len(samples), BATCH):
            together = tuple(sample for each in samples[first : first + BATCH] for sample in each)
            batch = TrainingBatch(together, sum(sum(sample.loss_mask) for sample in together))
            await trainer.step(batch, LossConfig(name="cross_entropy"), LR)
        await trainer.export(str(folder))
    await worker.stop()
    return folder


async def play(client: Client, model: Path, groups: int, samples: int, round_index: int) -> tuple[int, float]:
    """Sampled tokens of ``groups`` × ``samples`` rollouts, and the seconds that they took, with nothing computed before."""
    taskset = Taskset(ENVIRONMENT, SETTINGS)
    tasks = taskset.tasks("train", groups * (round_index + 1), seed=1)[groups * round_index :]
    sampling = Sampling(temperature=1.0, max_tokens=tasks[0].limits.max_tokens_per_turn)
    renderer = _renderer(model)
    await client.reset_prefix_cache()
    started = time.perf_counter()
    played = await run_groups(
        tasks,
        taskset,
        client,
        renderer,
        sampling,
        group_ids=[f"r{round_index}-g{number}" for number in range(groups)],
        size=samples,
        seed=round_index,
        sessions=client,
    )
    seconds = time.perf_counter() - started
    return sum(rollout.usage.completion_tokens for group in played for rollout in group.rollouts), seconds


def _renderer(model: Path) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(model))
