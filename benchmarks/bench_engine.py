"""Generation speed: this engine against ``transformers.generate``, on the same model, prompts and machine, in turns.

The shape is that of a reinforcement-learning step: 8 prompts × 4 samples, 145 prompt tokens, 32 new ones, temperature 1, no
stop token, so that both make exactly the same number of tokens. Every round starts with an empty prefix cache. Rounds
alternate, so that whatever else the machine does weighs on both; the figure is the ratio of the medians.

The last line of output is one JSON object; the same is kept under ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks import record
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, set_seed

from evergrad.inference import EngineConfig
from evergrad.inference.engine import Engine, Request
from evergrad.types import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a known name, a folder, or 'random' (135M shape, no download)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=145)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=record.cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(_folder(arguments.model, Path(scratch)), arguments)
    record.keep(result, arguments.threads)


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    engine = Engine(EngineConfig(model=str(folder), threads=arguments.threads))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(engine.model.device).eval()
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.prompts, arguments.prompt_tokens)
    prompts = torch.randint(3, engine.model.vocab_size, shape, generator=generator)
    tokens = arguments.prompts * arguments.samples * arguments.new_tokens
    ours: list[float] = []
    theirs: list[float] = []
    for round_index in range(arguments.rounds + 1):
        seconds = (_ours(engine, prompts, arguments, round_index), _theirs(reference, prompts, arguments, round_index))
        if round_index == 0:
            continue  # warms both up
        ours.append(seconds[0])
        theirs.append(seconds[1])
        print(f"round {round_index}: {tokens / seconds[0]:.0f} tokens/s, transformers {tokens / seconds[1]:.0f}", flush=True)
    return {
        "benchmark": "engine",
        "ratio": round(statistics.median(theirs) / statistics.median(ours), 3),
        "tokens_per_s": round(tokens / statistics.median(ours), 1),
        "tokens_per_s_transformers": round(tokens / statistics.median(theirs), 1),
        "seconds": [round(value, 3) for value in ours],
        "seconds_transformers": [round(value, 3) for value in theirs],
        "model": arguments.model,
        "prompts": arguments.prompts,
        "samples": arguments.samples,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "device": str(engine.model.device),
    }


def _ours(engine: Engine, prompts: torch.Tensor, arguments: argparse.Namespace, seed: int) -> float:
    engine.reset_prefix_cache()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts.tolist()):
        sampling = Sampling(max_tokens=arguments.new_tokens, seed=1000 * seed + index)
        engine.submit(Request(str(index), tuple(prompt), sampling, n=arguments.samples))
    drawn = 0
    while engine.has_work:
        drawn += sum(event.token_id is not None for event in engine.step())
    seconds = time.perf_counter() - started
    assert drawn == prompts.shape[0] * arguments.samples * arguments.new_tokens
    return seconds


def _theirs(model: Any, prompts: torch.Tensor, arguments: argparse.Namespace, seed: int) -> float:
    set_seed(seed)
    settings = GenerationConfig(
        max_new_tokens=arguments.new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=arguments.samples,
        eos_token_id=None,
        pad_token_id=0,
    )
    inputs = prompts.to(model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    seconds = time.perf_counter() - started
    assert output.shape == (prompts.shape[0] * arguments.samples, prompts.shape[1] + arguments.new_tokens)
    return seconds


def _folder(name: str, scratch: Path) -> Path:
    if name == "random":
        # The shape of SmolLM2-135M; speed does not depend on the values.
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).save_pretrained(scratch)
        return scratch
    from evergrad.registry import base_model

    return base_model(name)


if __name__ == "__main__":
    main()
