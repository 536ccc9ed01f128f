"""Generation speed: this engine in float32 and in int8, vLLM, ``transformers.generate`` and its continuous batching, in turns.

Two shapes of a step of reinforcement learning, 8 prompts × 4 samples × 32 new tokens and 8 × 8 × 64, 145 prompt tokens,
temperature 1, log-probabilities back, no stop token, so that all draw the same number of tokens. Then an agent's load: the
demo's ``support_desk`` policy after its warm start, 8 groups × 8 samples, multi-turn, temperature 1, tokens drawn per second.
This engine and vLLM are servers and are asked over HTTP, as in a run. Every round starts with nothing computed before. Rounds
alternate, so that whatever else the machine does weighs on all; figures are medians over rounds.

``ours_int8`` samples with ``quantization = "int8"``, from a distribution that is near to the weights' own; it has no ceiling in
float32.

``gemm_ceiling_tok_s`` is what the job's floating-point work allows: each distinct prompt token and each drawn one costs two
operations for each weight; the rate is that of a large matrix product, measured in the same rounds.

Top-level figures are those of the last shape. The last line of output is one JSON object; the same is kept under
``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks import record
from benchmarks.agent_load import play, warm_started
from benchmarks.engine_sides import ContinuousBatching, Server, Side, Transformers, alone, start_ours, start_vllm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from evergrad.loop.placement import LocalPlacement

PROMPT_TOKENS = 145
GEMM_SIZE = 4096
SIDES = ("ours", "ours_int8", "vllm", "hf", "hf_continuous")
SHAPES = ("8x4x32", "8x8x64", "agent")
AGENT_GROUPS, AGENT_SAMPLES = 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a folder")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="PROMPTSxSAMPLESxNEW, or 'agent'")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=record.cores())
    parser.add_argument("--vllm", default=".venv-vllm/bin/vllm", help="the program")
    parser.add_argument("--weights", type=Path, help="the agent's: a version's folder of a run; by default it is trained first")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        result = asyncio.run(measure(arguments, Path(scratch)))
    record.keep(result, arguments.threads)


async def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from evergrad.registry import base_model

    model = base_model(arguments.model)
    shapes: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        placement = await stack.enter_async_context(LocalPlacement(scratch / "logs", stuck_after_s=3600.0))
        weights = arguments.weights
        if "agent" in arguments.shapes and weights is None:
            weights = await warm_started(model, arguments.threads, placement)
        sides, reference = await start(arguments, model, placement, stack, scratch)
        for shape in (each for each in arguments.shapes if each != "agent"):
            shapes[shape] = await measure_shape(shape, sides, reference.num_parameters(), arguments.rounds)
        agent = await measure_agent(sides, model, weights, arguments.rounds) if "agent" in arguments.shapes else {}
        peaks = {name: round(side.peak_rss_mb()) for name, side in sides.items() if isinstance(side, Server)}
    last = next(reversed(shapes.values()), {})
    speeds = ("ours_tok_s", "ours_int8_tok_s", "vllm_tok_s", "hf_tok_s", "hf_continuous_tok_s")
    keys = (*speeds, "ratio_vllm", "ratio_vllm_int8", "ratio_hf")
    return {
        "benchmark": "engine",
        **{key: last.get(key) for key in (*keys, "gemm_ceiling_tok_s", "ceiling_share")},
        "ratio_vllm_agent": agent.get("ratio_vllm"),
        "ratio_vllm_agent_int8": agent.get("ratio_vllm_int8"),
        "peak_rss_mb": peaks.get("ours"),
        "int8_peak_rss_mb": peaks.get("ours_int8"),
        "vllm_peak_rss_mb": peaks.get("vllm"),
        "shapes": {**shapes, **({"agent": agent} if agent else {})},
        "model": arguments.model,
        "prompt_tokens": PROMPT_TOKENS,
        "rounds": arguments.rounds,
    }


async def start(
    arguments: argparse.Namespace, model: Path, placement: LocalPlacement, stack: AsyncExitStack, scratch: Path
) -> tuple[dict[str, Side], Any]:
    """The sides by name, in the order in which they take turns; and the model in this process."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    sides: dict[str, Side] = {}
    if "ours" in arguments.sides:
        sides["ours"] = await start_ours("ours", model, arguments.threads, placement, stack)
    if "ours_int8" in arguments.sides:
        sides["ours_int8"] = await start_ours("ours_int8", model, arguments.threads, placement, stack, "int8")
    if "vllm" in arguments.sides:
        sides["vllm"] = await start_vllm(model, arguments.threads, placement, stack, arguments.vllm, scratch)
    if "hf" in arguments.sides:
        sides["hf"] = Transformers(reference)
    if "hf_continuous" in arguments.sides:
        sides["hf_continuous"] = ContinuousBatching(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        )
    return sides, reference


async def measure_shape(shape: str, sides: dict[str, Side], parameters: int, rounds: int) -> dict[str, Any]:
    prompts, samples, new_tokens = (int(part) for part in shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40_000, (prompts, PROMPT_TOKENS), generator=generator).tolist()
    drawn = prompts * samples * new_tokens
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    rates: list[float] = []
    for side in sides.values():
        await side.generate(ids[:2], 2, 4, 0)  # what is compiled or allocated at the first request
    for number in range(1, rounds + 1):
        with alone(None, sides.values()):
            rates.append(gemm_rate())
        for name, side in sides.items():
            with alone(side, sides.values()):
                seconds[name].append(await side.generate(ids, samples, new_tokens, number))
        told = ", ".join(f"{name} {drawn / seconds[name][-1]:.1f}" for name in sides)
        print(f"{shape} round {number}: {told} tokens/s; products at {rates[-1] / 1e9:.1f} GFLOP/s", flush=True)
    speed = {f"{name}_tok_s": round(drawn / statistics.median(each), 2) for name, each in seconds.items()}
    work = 2.0 * parameters * (prompts * PROMPT_TOKENS + drawn)
    ceiling = drawn * statistics.median(rates) / work
    return {
        **speed,
        **_ratios(speed),
        "gemm_gflops": round(statistics.median(rates) / 1e9, 2),
        "gemm_ceiling_tok_s": round(ceiling, 1),
        "ceiling_share": round(speed["ours_tok_s"] / ceiling, 3) if "ours_tok_s" in speed else None,
        "seconds": {name: [round(value, 2) for value in each] for name, each in seconds.items()},
    }


async def measure_agent(sides: dict[str, Side], model: Path, weights: Path, rounds: int) -> dict[str, Any]:
    """Of the servers alone: transformers has no cache that outlives a call, which a turn could go on from."""
    servers = {name: side for name, side in sides.items() if isinstance(side, Server)}
    speeds: dict[str, list[float]] = {name: [] for name in servers}
    probes = []
    for server in servers.values():
        await server.client.load_weights(str(weights), 1)
        probes.append(await server.client.logprobs(list(range(100, 164))))
        await play(server.client, model, 1, 1, 0)
    assert all(max(abs(a - b) for a, b in zip(each, probes[0], strict=True)) < 1e-3 for each in probes), "not the same policy"
    before = servers["ours"].counters() if "ours" in servers else {}
    for number in range(1, rounds + 1):
        for name, server in servers.items():
            with alone(server, servers.values()):
                tokens, seconds = await play(server.client, model, AGENT_GROUPS, AGENT_SAMPLES, number)
            speeds[name].append(tokens / seconds)
            print(f"agent round {number}: {name} {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f}/s", flush=True)
    speed = {f"{name}_tok_s": round(statistics.median(each), 2) for name, each in speeds.items()}
    each_round = {name: [round(value, 1) for value in each] for name, each in speeds.items()}
    counted = {name: value - before[name] for name, value in servers["ours"].counters().items()} if before else {}
    return {**speed, **_ratios(speed), "tok_s_by_round": each_round, "ours_counted": counted}


def _ratios(speed: dict[str, float]) -> dict[str, float | None]:
    """Ours over theirs."""

    def over(theirs: str, ours: str = "ours") -> float | None:
        one, other = speed.get(f"{ours}_tok_s"), speed.get(f"{theirs}_tok_s")
        return round(one / other, 3) if one and other else None

    return {
        "ratio_vllm": over("vllm"),
        "ratio_vllm_int8": over("vllm", "ours_int8"),
        "ratio_hf": over("hf"),
        "ratio_hf_continuous": over("hf_continuous"),
    }


def gemm_rate() -> float:
    """Floating-point operations a second of a large fp32 matrix product, the best of two."""
    left, right = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2.0 * GEMM_SIZE**3 / best


if __name__ == "__main__":
    main()
