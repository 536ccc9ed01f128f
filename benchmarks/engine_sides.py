"""Who generates in ``bench_engine``: this engine and vLLM, each as a server, and transformers in two ways, in this process.

Servers are asked as a run asks them: one request for each sample, all at once, over HTTP, log-probabilities back.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
import torch

from evergrad.inference import EngineClient, EngineConfig
from evergrad.inference.backends import VllmClient, VllmServerConfig
from evergrad.loop.placement import LocalPlacement, Worker
from evergrad.types import Completion, Sampling

Client = EngineClient | VllmClient


class Side(Protocol):
    """One way to generate."""

    async def generate(self, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int, seed: int) -> float:
        """Seconds that ``samples`` completions of each prompt take, with nothing computed before and no stop token."""
        ...


class Server:
    """An engine that is a process of its own."""

    def __init__(self, client: Client, worker: Worker) -> None:
        self.client, self._worker = client, worker

    async def generate(self, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int, seed: int) -> float:
        await self.client.reset_prefix_cache()
        started = time.perf_counter()
        done: list[Completion] = await asyncio.gather(
            *(
                self.client(prompt, Sampling(max_tokens=new_tokens, seed=10_000 * seed + 100 * index + sample))
                for index, prompt in enumerate(prompts)
                for sample in range(samples)
            )
        )
        seconds = time.perf_counter() - started
        assert all(len(each.token_ids) == len(each.logprobs) == new_tokens for each in done)
        return seconds

    def family(self) -> list[psutil.Process]:
        """The server's processes, parents first."""
        parent = psutil.Process(self._worker.process.pid)
        return [parent, *parent.children(recursive=True)]

    def counters(self) -> dict[str, int]:
        """What this engine has counted since its start: steps, tokens drawn, computed, guessed, guesses kept."""
        with urllib.request.urlopen(f"{self.client.base_url}/metrics", timeout=5) as answer:
            found = re.findall(r"^evergrad_engine_(\w+)_total (\d+)(?:\.0)?$", answer.read().decode(), re.MULTILINE)
        return {name: int(value) for name, value in found}

    def peak_rss_mb(self) -> float:
        """Largest resident memory of the server's processes together, in 10⁶ bytes."""
        return sum(_peak_bytes(each.pid) for each in self.family()) / 1e6


@contextmanager
def alone(side: Side | None, sides: Iterable[Side]) -> Iterator[None]:
    """Inside, the servers of other sides stand still: one that has nothing to do may look for work all the time."""
    still = [other.family() for other in sides if isinstance(other, Server) and other is not side]
    for process in (each for family in still for each in family):
        process.suspend()
    try:
        yield
    finally:
        for process in (each for family in still for each in reversed(family)):
            process.resume()


async def start_ours(
    name: str,
    model: Path,
    threads: int,
    placement: LocalPlacement,
    stack: AsyncExitStack,
    quantization: Literal["int8"] | None = None,
) -> Server:
    config = EngineConfig(model=str(model), threads=threads, quantization=quantization)
    worker = await placement.start(name, "evergrad.inference", config)
    client = await stack.enter_async_context(EngineClient(worker.base_url, worker.token))
    return Server(client, worker)


async def start_vllm(
    model: Path, threads: int, placement: LocalPlacement, stack: AsyncExitStack, command: str, scratch: Path
) -> Server:
    config = VllmServerConfig(model=str(model), threads=threads, command=command)
    worker = await placement.start("vllm", "evergrad.inference.backends.vllm_server", config)
    client = VllmClient(worker.base_url, model, route="slots", scratch=scratch, token=worker.token)
    await stack.enter_async_context(client)
    await client.open()
    return Server(client, worker)


class Transformers:
    """``model.generate``: the prompts are equally long, so one batch holds all samples without padding."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def generate(self, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int, seed: int) -> float:
        from transformers import set_seed

        set_seed(seed)
        inputs = torch.tensor([list(prompt) for prompt in prompts])
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=_generation(samples, new_tokens, output_logits=True, return_dict_in_generate=True),
            )
            # What a trainer needs of it: the log-probability of each token that was drawn.
            drawn = output.sequences[:, inputs.shape[1] :]
            for place, logits in enumerate(output.logits):
                torch.log_softmax(logits, dim=-1).gather(1, drawn[:, place, None])
        seconds = time.perf_counter() - started
        assert drawn.shape == (len(prompts) * samples, new_tokens)
        return seconds


class ContinuousBatching:
    """transformers' own continuous batching, with its log-probabilities."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def generate(self, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int, seed: int) -> float:
        from transformers import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(return_logprobs=True, seed=seed, num_blocks=256, max_batch_tokens=512, page_size=64)
        inputs = [list(prompt) for prompt in prompts for _ in range(samples)]
        started = time.perf_counter()
        output = self._model.generate_batch(
            inputs, generation_config=_generation(1, new_tokens), continuous_batching_config=config, warmup=False
        )
        seconds = time.perf_counter() - started
        assert sum(len(each.generated_tokens) for each in output.values()) == len(inputs) * new_tokens
        return seconds


def _generation(samples: int, new_tokens: int, **further: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        eos_token_id=None,
        pad_token_id=0,
        **further,
    )


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
