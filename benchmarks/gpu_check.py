"""What has to be seen once on a machine with a CUDA GPU, in at most five minutes. Without one: the same code on the CPU.

``trainer``  Full fine-tuning. Its log-probabilities against transformers' with the same weights, and the time of a step.
``engine``   In bfloat16, rows that decode: tokens a second against what the memory's bandwidth allows, when each step reads
             all weights, and each row its keys and values, once.
``flip``     The trainer's new weights into that engine through shared memory while the rows decode: the pause against a step.
``equality`` The engine's log-probabilities against transformers', before the flips and after: in float32 to 10⁻³, in bfloat16
             no farther from transformers' in float32 than transformers' own in bfloat16 are, but for a half.

The rehearsal on a CPU takes the ``tiny`` model and short rows. It shows that the script runs and that the equalities hold
there; its times say nothing of a GPU. The last line of output is one JSON object. With a GPU it is kept under
``benchmarks/results/``. The exit code is 1 when an equality does not hold.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks import record
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from evergrad.inference import EngineConfig
from evergrad.inference._loop import StepLoop
from evergrad.inference._weights import WeightUpdates
from evergrad.inference.engine import Engine, Request
from evergrad.registry import base_model
from evergrad.training import LossConfig, OptimizerConfig, TrainerConfig
from evergrad.training.trainer import Trainer
from evergrad.transfer import SlotPublisher
from evergrad.transfer.worker import pick_device
from evergrad.types import Sampling, TrainingBatch, TrainingSample

LIMIT_S = 300
FLOAT32_ERROR = 1e-3
"""Nats; different kernels add up in different orders."""
HALF_PRECISION_SHARE = 1.5
"""Root mean square of our error in bfloat16 over that of transformers', at most."""


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    model: str
    rows: int
    prompt_tokens: int
    new_tokens: int
    """Of a row whose time is taken."""
    flip_tokens: int
    """Of a row that is still running when weights change."""
    scored_tokens: int
    groups: int
    """Of eight samples each, of a training batch."""
    flips: int
    copied_bytes: int
    """Whose copy shows the memory's bandwidth."""


GPU = Size("smollm2-135m", 64, 128, 256, 1024, 1024, 8, 5, 1 << 30)
REHEARSAL = Size("tiny", 4, 8, 16, 512, 64, 1, 2, 1 << 22)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a known name or a folder; another than smollm2-135m, without a GPU tiny")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    rehearsal = device.type != "cuda"
    size = REHEARSAL if rehearsal else GPU
    if rehearsal:
        print("no CUDA: this is the rehearsal on the CPU, whose times say nothing of a GPU", flush=True)
    else:
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(LIMIT_S)
    logging.disable_progress_bar()
    model = arguments.model or size.model
    result = {"benchmark": "gpu-check", "rehearsal": rehearsal, "model": model, **check(base_model(model), device, size)}
    if rehearsal:
        print(json.dumps(record.described(result, torch.get_num_threads())))
    else:
        record.keep(result, torch.get_num_threads())
    return 0 if result["passed"] else 1


def check(folder: Path, device: torch.device, size: Size) -> dict[str, Any]:
    trainer = Trainer(TrainerConfig(model=str(folder), method="full", device=str(device), optimizer=OptimizerConfig(lr=1e-3)))
    told: dict[str, Any] = {"checks": {}, "seconds": {}}
    case = Case(folder, device, size, trainer, random_tokens(folder, size.scored_tokens, "scored"))
    with part("trainer", told):
        told["trainer"] = train(case, told["checks"])
    for dtype in ("float32", "bfloat16"):
        engine = Engine(engine_config(case, dtype))
        if dtype == "bfloat16":
            with part("engine", told):
                told["engine"] = decode(engine, case)
        with part(f"flips in {dtype}", told):
            told["flip"] = flip(engine, case, told["checks"])
    told["flip"]["pause_below_a_step"] = told["flip"]["pause_ms"] < told["engine"]["decode_step_ms"]
    return {"passed": all(each["holds"] for each in told["checks"].values()), **told}


@dataclass(frozen=True)
class Case:
    """What every part is told."""

    folder: Path
    device: torch.device
    size: Size
    trainer: Trainer
    scored: tuple[int, ...]
    """Tokens whose log-probabilities are compared."""


def engine_config(case: Case, dtype: str) -> EngineConfig:
    size = case.size
    return EngineConfig(
        model=str(case.folder),
        device=str(case.device),
        dtype=dtype,
        draft_tokens=0,  # a step is then one token of each row, which is what the bound is for
        max_rows=size.rows,
        kv_cache_tokens=2 * size.rows * (size.prompt_tokens + max(size.new_tokens, size.flip_tokens)),
    )


# ── The trainer ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(case: Case, checks: dict[str, Any]) -> dict[str, Any]:
    """Scores as transformers does, before steps and after; the first step warms up."""
    trainer, batch = case.trainer, make_batch(case)
    checks["trainer"] = compare(trainer.logprobs(case.scored), case, "bfloat16")
    cuda = case.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(case.device)
    steps = [trainer.step(batch, LossConfig()) for _ in range(4)]
    peak = torch.cuda.max_memory_allocated(case.device) if cuda else 0
    checks["trainer_after_steps"] = compare(trainer.logprobs(case.scored), case, "bfloat16", trained=True)
    checks["steps_were_finite"] = {"holds": all(step["skipped_nonfinite"] == 0 for step in steps)}
    seconds = statistics.median(step["seconds"] for step in steps[1:])
    found = {"step_s": round(seconds, 4), "tokens_per_s": round(steps[-1]["batch_tokens"] / seconds, 1)}
    if cuda:
        found["peak_gb"] = round(peak / 1e9, 3)
    return found


def make_batch(case: Case) -> TrainingBatch:
    """Groups of eight samples that share a prompt; drawn tokens are random, as what is computed does not depend on them."""
    folder, size = case.folder, case.size
    drawn = max(1, size.prompt_tokens // 2)
    samples = []
    for group in range(size.groups):
        prompt = random_tokens(folder, size.prompt_tokens, f"prompt {group}")
        for member in range(8):
            ids = prompt + random_tokens(folder, drawn, f"drawn {group} {member}")
            mask = (0,) * len(prompt) + (1,) * drawn
            advantage = (1.0, -0.75, 0.5, -0.25)[member % 4]
            samples.append(
                TrainingSample(
                    token_ids=ids,
                    loss_mask=mask,
                    logprobs=(0.0,) * len(ids),
                    advantages=tuple(advantage * value for value in mask),
                    min_policy_version=0,
                    max_policy_version=0,
                    rollout_id=f"{group}.{member}",
                    group_id=str(group),
                )
            )
    scored = [replace(each, logprobs=values) for each, values in zip(samples, case.trainer.score(samples), strict=True)]
    return TrainingBatch(tuple(scored), sum(sum(sample.loss_mask) for sample in scored))


# ── The engine ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(engine: Engine, case: Case) -> dict[str, Any]:
    """Rows that decode, prompts not counted; the second of two rounds."""
    size = case.size
    for number in range(2):
        submit(engine, case, size.new_tokens, f"decode {number}")
        begun: set[str] = set()
        while len(begun) < size.rows:
            begun |= {event.request_id for event in engine.step() if event.token_id is not None}
        drawn, steps, started = 0, 0, time.perf_counter()
        while engine.has_work:
            drawn += sum(event.token_id is not None for event in engine.step())
            steps += 1
        seconds = time.perf_counter() - started
    rate, moved = bandwidth(case.device, size.copied_bytes), bytes_of_a_step(engine, size)
    bound = size.rows * rate / moved
    return {
        "dtype": engine.config.dtype,
        "tokens_per_s": round(drawn / seconds, 1),
        "bound_tokens_per_s": round(bound, 1),
        "share_of_bound": round(drawn / seconds / bound, 4),
        "decode_step_ms": round(1e3 * seconds / steps, 3),
        "bandwidth_gb_per_s": round(rate / 1e9, 1),
        "bytes_of_a_step": moved,
    }


def bytes_of_a_step(engine: Engine, size: Size) -> int:
    """Every weight that a product reads, and keys and values of all rows at half of their way."""
    base = {id(tensor): tensor for tensor in engine.model.base.values()}
    weights = sum(tensor.numel() * tensor.element_size() for tensor in base.values())
    layers, _, two, heads, width = engine.model.cache.memory.shape
    token = layers * two * heads * width * engine.model.cache.memory.element_size()
    return weights + size.rows * (size.prompt_tokens + size.new_tokens // 2) * token


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that a copy on the device reads and writes together; the best of five."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, best = torch.zeros_like(source), float("inf")
    for _ in range(5):
        _wait_for(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait_for(device)
        best = min(best, time.perf_counter() - started)
    return 2 * num_bytes / best


# ── Flips ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def flip(engine: Engine, case: Case, checks: dict[str, Any]) -> dict[str, Any]:
    """The trainer's weights, changed by one more step each time, into the engine while its rows decode."""
    dtype, trainer, batch = engine.config.dtype, case.trainer, make_batch(case)
    checks[f"engine_{dtype}"] = compare(engine.logprobs(case.scored), case, dtype)
    loop = StepLoop(engine, lambda events: None, lambda error: None)
    updates, pauses, running = WeightUpdates(loop), list[float](), list[int]()
    loop.start()
    with SlotPublisher(trainer.layout()) as publisher:
        updates.attach(publisher.descriptor)
        for version in range(1, case.size.flips + 1):
            trainer.step(batch, LossConfig())
            loop.call(functools.partial(submit, engine, case, case.size.flip_tokens, f"flip {version}")).result()
            trainer.write_weights(publisher)
            report = updates.update(publisher.finish(version).as_dict())
            pauses.append(report["pause_s"])
            running.append(loop.call(lambda: engine.num_running).result())
            loop.call(engine.abort_all).result()
        after = loop.call(lambda: engine.logprobs(case.scored)).result()
        loop.stop()
        updates.close()
    checks[f"engine_{dtype}_after_flips"] = compare(after, case, dtype, trained=True)
    checks[f"rows_ran_at_flips_in_{dtype}"] = {"holds": min(running) > 0, "rows": running}
    return {
        "dtype": dtype,
        "pause_ms": round(1e3 * statistics.median(pauses), 3),
        "pause_ms_longest": round(1e3 * max(pauses), 3),
        "update_s": round(report["seconds"], 4),
        "transfer": report["transfer"],
    }


def compare(ours: Sequence[float], case: Case, dtype: str, *, trained: bool = False) -> dict[str, Any]:
    """Ours against transformers' in float32, with the folder's weights or those that the trainer has now."""
    exact = transformers_logprobs(case, torch.float32, trained)
    error = torch.tensor(ours, dtype=torch.float64) - exact
    if dtype == "float32":
        largest = float(error.abs().max())
        return {"holds": largest <= FLOAT32_ERROR, "largest": float(f"{largest:.2g}")}
    theirs = transformers_logprobs(case, torch.bfloat16, trained) - exact
    mean, allowed = (float(each.square().mean().sqrt()) for each in (error, theirs))
    return {
        "holds": mean <= HALF_PRECISION_SHARE * allowed,
        "rms": float(f"{mean:.2g}"),
        "rms_transformers": float(f"{allowed:.2g}"),
    }


@torch.inference_mode()
def transformers_logprobs(case: Case, dtype: torch.dtype, trained: bool) -> torch.Tensor:
    """Log-probability [N - 1] of each token but the first."""
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=dtype).to(case.device).eval()
    if trained:
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in case.trainer.named_weights()}, strict=False)
    tokens = torch.tensor(case.scored, device=case.device)
    table = torch.log_softmax(model(tokens[None]).logits[0, :-1].double(), dim=-1)
    return table.gather(1, tokens[1:, None])[:, 0].cpu()


# ── Small parts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def submit(engine: Engine, case: Case, new_tokens: int, name: str) -> None:
    """One request a row, each with a prompt of its own."""
    for row in range(case.size.rows):
        prompt = random_tokens(case.folder, case.size.prompt_tokens, f"{name} {row}")
        engine.submit(Request(f"{name} {row}", prompt, Sampling(max_tokens=new_tokens, seed=row)))


def random_tokens(folder: Path, count: int, seed: str) -> tuple[int, ...]:
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    draw = random.Random(seed)
    return tuple(draw.randrange(3, vocabulary) for _ in range(count))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def part(name: str, told: dict[str, Any]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    told["seconds"][name] = round(time.perf_counter() - started, 2)
    print(f"{name}: {told['seconds'][name]} s", flush=True)


def _out_of_time(*_: object) -> None:
    raise SystemExit(f"error: not done in {LIMIT_S} s. Next: see above which part took so long")


if __name__ == "__main__":
    sys.exit(main())
