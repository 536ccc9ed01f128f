"""One optimizer step of reinforcement learning: this trainer against TRL's ``GRPOTrainer``, on the same batch and machine.

Both fine-tune all weights in float32 from the same model, with the same token ids, masks, advantages, behaviour
log-probabilities, loss (DAPO's) and AdamW. Generation is not part of it: TRL's trainer is handed the batch where it would have
generated it, and everything after that is its own code. Two batches of 4 groups × 8 samples:

``answers``  256 prompt tokens, 32 sampled ones that differ from the first on;
``agent``    256 prompt tokens, six turns of 16 sampled tokens, each but the last followed by 16 of a tool. One sample is the
             group's common path; the others leave it at turns 3, 4, 5, 5, 6, 6, 6.

Tokens are random: what is computed does not depend on them. No sample is without advantage, so none is left out. TRL first
makes steps on one group with each of several cuts, its default among them, and then competes with the fastest. Steps alternate
in one process; the figures are medians. Memory is measured in processes of their own.

The last line of output is one JSON object; the same is kept under ``benchmarks/results/``. Needs the extra ``trl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import record
from benchmarks.trl_trainer import DEFAULT, Clock, Cut, given_batch

from evergrad.training import LossConfig, TrainerConfig
from evergrad.training.config import OptimizerConfig
from evergrad.training.forest import plant
from evergrad.training.selection import scored_tokens
from evergrad.training.trainer import Trainer
from evergrad.types import TrainingBatch, TrainingSample

LOSS = LossConfig(name="dapo", options={"clip_high": 0.2})
LR = 1e-6
NEVER_CLIPPED = 1e9
"""Bound on the gradient's norm: both measure it and multiply by 1, so that their gradients can be compared."""
CUTS = (DEFAULT, Cut(8, False), Cut(4, False), Cut(2, False), Cut(1, False))
GEMM_SIZE = 4096
GROUPS, GROUP_SIZE = 4, 8


@dataclass(frozen=True)
class Shape:
    """How the samples of a batch are made and what they share."""

    prompt: int
    turns: tuple[tuple[int, int], ...]
    """Sampled tokens and the tool's tokens after them, turn by turn."""
    leave: tuple[int, ...]
    """Turn, from 0, at which each sample but the first leaves the group's common path."""

    def samples(self, vocabulary: int, groups: int = GROUPS, seed: int = 0) -> list[TrainingSample]:
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(3, vocabulary) for _ in range(count)]

        mask = [0] * self.prompt + [value for sampled, tool in self.turns for value in (1,) * sampled + (0,) * tool]
        made = []
        for group in range(groups):
            prompt = tokens(self.prompt)
            common = [tokens(sum(turn)) for turn in self.turns]
            for member, turn in enumerate((len(self.turns), *self.leave)):
                path = common[:turn] + [tokens(sum(each)) for each in self.turns[turn:]]
                ids = prompt + [token for part in path for token in part]
                advantage = (1.0, -0.75, 0.5, -0.25)[member % 4]
                made.append(
                    TrainingSample(
                        token_ids=tuple(ids),
                        loss_mask=tuple(mask),
                        logprobs=(0.0,) * len(ids),
                        advantages=tuple(advantage * value for value in mask),
                        min_policy_version=0,
                        max_policy_version=0,
                        rollout_id=f"r{group}.{member}",
                        group_id=f"g{group}",
                    )
                )
        return made


SHAPES = {
    "answers": Shape(256, ((32, 0),), (0,) * 7),
    "agent": Shape(256, ((16, 16),) * 5 + ((16, 0),), (2, 3, 4, 4, 5, 5, 5)),
}


@dataclass(frozen=True)
class Case:
    """What every part of the measurement is told."""

    folder: Path
    scratch: Path
    shape: str
    threads: int
    rounds: int

    def samples(self, groups: int = GROUPS) -> list[TrainingSample]:
        vocabulary = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        return SHAPES[self.shape].samples(vocabulary, groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a folder")
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=record.cores())
    arguments = parser.parse_args()
    from evergrad.registry import base_model

    shapes = {}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in arguments.shape:
            case = Case(base_model(arguments.model), Path(scratch), shape, arguments.threads, arguments.rounds)
            shapes[shape] = measure(case)
    figures = {
        name: {shape: result[name] for shape, result in shapes.items()}
        for name in ("ratio_trl", "ratio_memory", "tokens_per_s", "gemm_ceiling_share")
    }
    record.keep({"benchmark": "train", "model": arguments.model, **figures, "shapes": shapes}, arguments.threads)


def measure(case: Case) -> dict[str, Any]:
    probed = {cut: apart(probe, case, cut) for cut in CUTS}
    for cut, seconds in probed.items():
        print(f"{case.shape}: TRL, one group, {cut}: {seconds:.2f} s", flush=True)
    best = min(probed, key=lambda cut: probed[cut])
    memory = {"ours": apart(memory_of_ours, case), "trl": apart(memory_of_trl, case, best)}
    return {
        **apart(compare, case, best),
        "ratio_memory": round(memory["ours"]["extra_mb"] / memory["trl"]["extra_mb"], 3),
        "memory": memory,
        "trl_cut": dataclasses.asdict(best),
        "trl_seconds_of_a_group": {str(cut): round(seconds, 2) for cut, seconds in probed.items()},
    }


def apart(part: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``part`` in a process of its own, which nothing before it has warmed or filled."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(part, *arguments).result()


def compare(case: Case, cut: Cut) -> dict[str, Any]:
    """Alternates steps: ours, then a large product, then TRL's. The first round warms up and compares gradients."""
    torch.set_num_threads(case.threads)
    ours = our_trainer(case)
    samples = with_logprobs(ours, case.samples())
    work = Work.of(samples, ours)
    batch = batch_of(samples)
    seconds: list[float] = []
    gemm: list[float] = []
    gradient: dict[str, torch.Tensor] = {}
    differences: dict[str, float] = {}

    def ours_first(step: int) -> None:
        started = time.perf_counter()
        metrics = ours.forward_backward(batch, LOSS)
        if step == 0:
            gradient.update({name: p.grad.clone() for name, p in ours._parameters.items() if p.grad is not None})
            differences["loss"] = metrics["loss"]
            ours.optim_step()
            return
        ours.optim_step()
        seconds.append(time.perf_counter() - started)
        gemm.append(gemm_rate())

    def compare_gradients(step: int, model: torch.nn.Module) -> None:
        if step == 0:
            theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert theirs.keys() == gradient.keys()
            square = sum(float((gradient[name] - grad).double().square().sum()) for name, grad in theirs.items())
            whole = sum(float(grad.double().square().sum()) for grad in theirs.values())
            differences["gradient"] = math.sqrt(square / whole)
            gradient.clear()

    clock = Clock(ours_first, compare_gradients)
    trl = given_batch(case.folder, samples, cut, case.rounds + 1, clock, case.scratch / "trl", **their_optimizer())
    trl.train()
    theirs = clock.seconds[1:]
    loss = sum(trl.losses[: len(samples) // cut.rows])
    step, rate = statistics.median(seconds), statistics.median(gemm)
    return {
        "ratio_trl": round(statistics.median(theirs) / step, 3),
        "tokens_per_s": round(work.batch_tokens / step, 1),
        "gemm_ceiling_share": round(work.flops / step / rate, 3),
        "seconds": [round(value, 3) for value in seconds],
        "seconds_trl": [round(value, 3) for value in theirs],
        "tokens_per_s_trl": round(work.batch_tokens / statistics.median(theirs), 1),
        "gemm_gflops": round(rate / 1e9, 1),
        "gradient_difference": float(f"{differences['gradient']:.2g}"),
        "loss_difference": float(f"{abs(differences['loss'] - loss) / max(abs(loss), 1e-3):.2g}"),
        "micro_batch_tokens": ours.config.micro_batch_tokens,
        **dataclasses.asdict(work),
    }


@dataclass(frozen=True)
class Work:
    """What a step has to compute at least."""

    batch_tokens: int
    """Tokens of all samples."""
    distinct_tokens: int
    """Nodes of the batch's prefix trees: what is left when each shared prefix counts once."""
    scored_rows: int
    """Distinct contexts that a token was sampled in: rows of the output embedding's product."""
    flops: float
    """Forward and backward over these: 6 × (distinct tokens × weights of the layers' products + scored rows × weights of the
    output embedding) + 12 × layers × heads × head width × pairs of a node and an ancestor (itself one of them)."""

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], trainer: Trainer) -> Work:
        (forest,) = plant(scored_tokens(samples), 10**9)
        config, model = trainer._model.config, trainer._model
        head = model.get_output_embeddings().weight.numel()
        layers = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear))
        width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        pairs = int(forest.depths.sum()) + forest.num_nodes
        flops = 6.0 * (forest.num_nodes * layers + len(forest.rows) * head) + 12.0 * width * pairs
        return cls(sum(len(sample.token_ids) for sample in samples), forest.num_nodes, len(forest.rows), flops)


def probe(case: Case, cut: Cut) -> float:
    """Seconds of TRL's second step on one group, or its third: cuts a few percent apart differ much in memory."""
    torch.set_num_threads(case.threads)
    clock = Clock()
    given_batch(case.folder, case.samples(1), cut, 3, clock, case.scratch / "probe", **their_optimizer()).train()
    return min(clock.seconds[1:])


def memory_of_ours(case: Case) -> dict[str, float]:
    torch.set_num_threads(case.threads)
    trainer = our_trainer(case)
    batch = batch_of(case.samples())

    def steps() -> None:
        for _ in range(2):
            trainer.step(batch, LOSS)

    return peak_of(trainer._model, steps)


def memory_of_trl(case: Case, cut: Cut) -> dict[str, float]:
    """On two groups: further micro-batches take time, and no more memory."""
    torch.set_num_threads(case.threads)
    trainer = given_batch(case.folder, case.samples(2), cut, 2, Clock(), case.scratch / "memory", **their_optimizer())
    return peak_of(trainer.model, trainer.train)


def peak_of(model: torch.nn.Module, steps: Callable[[], object]) -> dict[str, float]:
    """Resident memory with the model loaded, at its highest during ``steps``, and the difference: gradients, optimizer state
    and everything that a step needs for itself. Linux only."""
    for parameter in model.parameters():
        parameter.sum()  # reads the weights in, which lie in a mapped file until then
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of loading
    loaded = _resident_mb("VmRSS")
    steps()
    peak = _resident_mb("VmHWM")
    return {"loaded_mb": round(loaded), "peak_mb": round(peak), "extra_mb": round(peak - loaded)}


def _resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def our_trainer(case: Case) -> Trainer:
    optimizer = OptimizerConfig(lr=LR, betas=(0.9, 0.999), grad_clip=NEVER_CLIPPED)
    return Trainer(TrainerConfig(model=str(case.folder), method="full", optimizer=optimizer, threads=case.threads))


def their_optimizer() -> dict[str, Any]:
    return {"learning_rate": LR, "adam_beta2": 0.999, "max_grad_norm": NEVER_CLIPPED, "loss_type": "dapo", "epsilon": 0.2}


def with_logprobs(trainer: Trainer, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """As if the current policy had sampled them: ratios are 1."""
    scored = trainer.score(samples)
    return [dataclasses.replace(sample, logprobs=values) for sample, values in zip(samples, scored, strict=True)]


def batch_of(samples: Sequence[TrainingSample]) -> TrainingBatch:
    return TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))


def gemm_rate() -> float:
    """FLOP/s of a large float32 product, the best of three."""
    left, right = torch.randn(2, GEMM_SIZE, GEMM_SIZE).unbind()
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2 * GEMM_SIZE**3 / best


if __name__ == "__main__":
    main()
