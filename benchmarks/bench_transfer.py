"""New weights from a trainer to an engine: over shared memory against ``memcpy``; over TCP and NIXL, dense against sparse.

The weights are SmolLM2-135M's in float32, half a gigabyte. Three parts, each in rounds that alternate what is compared:

``one host``  The trainer's tensors are written into a slot of shared memory, and an engine, a process of its own, proves them,
              packs its linear layers and makes them live, told over HTTP. Each phase has its time. Beside it the C library's
              ``memcpy`` copies the same tensors into memory of the same kind on as many threads, and as many bytes in one
              piece, on one thread and on all.
``pause``     The same while the engine decodes 32 rows: how long it stands still for the change, and how long a step takes.
``wire``      A publisher and a receiver in a process of its own, over TCP on the loopback, and over NIXL where that is
              installed (the extra ``nixl``): whole tensors, and what changed, when 1, 3 and 10% of all values did.

The last line of output is one JSON object; the same is kept under ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import mmap
import multiprocessing
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from benchmarks import record

from evergrad.inference import EngineClient, EngineConfig
from evergrad.registry import base_model
from evergrad.transfer import SlotPublisher, WirePublisher, WireReceiver, load_tensors
from evergrad.transfer.transports import NixlOutbox, Outbox, TcpOutbox
from evergrad.types import Sampling

Weights = dict[str, torch.Tensor]
DENSITIES = (0.01, 0.03, 0.10)
ROWS, PROMPT_TOKENS = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=record.cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = Path(arguments.model) if Path(arguments.model).is_dir() else base_model(arguments.model)
    weights = {name: tensor.float().contiguous() for name, tensor in load_tensors(folder).items()}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    result = {"benchmark": "transfer", "model": arguments.model, "gigabytes": round(num_bytes / 1e9, 3)}
    result |= asyncio.run(one_host(folder, weights, num_bytes, arguments))
    tcp = over_the_wire(TcpOutbox, weights, num_bytes, arguments.rounds)
    # What changed is compared with whole tensors over TCP: the loopback is the slower of the two links.
    result |= {"sparse": tcp.pop("sparse"), "tcp": tcp, "nixl": None}
    if importlib.util.find_spec("nixl") is None:
        print("nixl: not installed. Next: make bench-transfer, or pip install 'evergrad[nixl]'", flush=True)
    else:
        result["nixl"] = over_the_wire(NixlOutbox, weights, num_bytes, arguments.rounds)
    record.keep(result, arguments.threads)


# ── One host ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def one_host(folder: Path, weights: Weights, num_bytes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    with SlotPublisher(layout) as publisher:
        async with engine(folder, arguments.threads) as client:
            await client.attach(publisher.descriptor)
            copies = memory_copies(weights, num_bytes, arguments.threads)
            copied: dict[str, list[float]] = {name: [] for name in copies}
            phases: dict[str, list[float]] = {}
            for version in range(arguments.rounds + 1):
                for name, copy in copies.items():
                    copied[name].append(timed(copy))
                for name, seconds in (await update(client, publisher, weights, version)).items():
                    phases.setdefault(name, []).append(seconds)
                both = {**copied, **phases}
                print(f"round {version}: {', '.join(f'{name} {each[-1]:.3f}' for name, each in both.items())} s", flush=True)
            pauses, step_s = await under_load(client, publisher, weights, arguments.rounds)
            print(f"pauses {pauses}, step {step_s:.3f} s", flush=True)
    # The first round warms up.
    memcpy = {name: statistics.median(values[1:]) for name, values in copied.items()}
    took = {name: statistics.median(values[1:]) for name, values in phases.items()}
    one_piece = min(seconds for name, seconds in memcpy.items() if name != TENSORS)
    pause_s = statistics.median(pauses)
    return {
        "share_of_memcpy": round(memcpy[TENSORS] / took["moved"], 3),
        "share_of_memcpy_best_rounds": round(min(copied[TENSORS][1:]) / min(phases["moved"][1:]), 3),
        "share_of_memcpy_in_one_piece": round(one_piece / took["moved"], 3),
        "share_of_memcpy_whole_update": round(memcpy[TENSORS] / took["update"], 3),
        "seconds": {name: round(seconds, 4) for name, seconds in took.items()},
        "memcpy_s": {name: round(seconds, 4) for name, seconds in memcpy.items()},
        "pause_ms": round(1e3 * pause_s, 3),
        "pause_ms_longest": round(1e3 * max(pauses), 3),
        "decode_step_ms": round(1e3 * step_s, 3),
        "pause_below_a_step": pause_s < step_s,
    }


async def update(client: EngineClient, publisher: SlotPublisher, weights: Weights, version: int) -> dict[str, float]:
    """Seconds of one update, phase by phase."""
    started = time.perf_counter()
    manifest = publisher.stage(weights.items(), version)
    report = await client.update_weights(manifest.as_dict())
    whole = time.perf_counter() - started
    phases = {
        "moved": manifest.seconds,  # a copy and its checksum, in one pass
        "proved": report["transfer"]["seconds"] - manifest.seconds,
        "packed": report["stage_s"],
        "pause": report["pause_s"],
    }
    return {**phases, "told": whole - sum(phases.values()), "update": whole}


TENSORS = "the same tensors"


def memory_copies(weights: Weights, num_bytes: int, threads: int) -> dict[str, Callable[[], None]]:
    """``memcpy`` from private to shared memory that is mapped already, as the trainer's tensors and a slot are."""
    target = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    target[:] = 0
    sources = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in weights.values()]
    ends = list(itertools.accumulate((len(source) for source in sources), initial=0))
    places = [target[slice(*pair)] for pair in itertools.pairwise(ends)]
    whole = np.ones(num_bytes, dtype=np.uint8)
    borders = [num_bytes * part // threads for part in range(threads + 1)]
    parts = [slice(*pair) for pair in itertools.pairwise(borders)]
    pool = ThreadPoolExecutor(threads)
    return {
        TENSORS: lambda: _each(pool, places, sources),
        "one piece, 1 thread": lambda: np.copyto(target, whole),
        f"one piece, {threads} threads": lambda: _each(pool, [target[part] for part in parts], [whole[part] for part in parts]),
    }


def _each(pool: ThreadPoolExecutor, targets: list[Any], sources: list[Any]) -> None:
    list(pool.map(np.copyto, targets, sources))


async def under_load(
    client: EngineClient, publisher: SlotPublisher, weights: Weights, rounds: int
) -> tuple[list[float], float]:
    """Pauses of updates while rows decode, and the time of a step when nothing else happens."""
    started, before = time.perf_counter(), await num_steps(client)
    await decode(client, 12)
    step_s = (time.perf_counter() - started) / (await num_steps(client) - before)
    pauses: list[float] = []
    running = asyncio.create_task(decode_on(client))
    for version in range(1000, 1000 + rounds):
        await asyncio.sleep(2 * step_s)
        manifest = await asyncio.to_thread(publisher.stage, weights.items(), version)
        pauses.append(float((await client.update_weights(manifest.as_dict()))["pause_s"]))
    assert not running.done(), "the rows must still be decoding when the weights change"
    running.cancel()
    return pauses, step_s


async def decode_on(client: EngineClient) -> None:
    while True:
        await decode(client, 32)


async def decode(client: EngineClient, new_tokens: int) -> None:
    prompts = [[3 + (7919 * (row + 1) * place) % 500 for place in range(1, PROMPT_TOKENS + 1)] for row in range(ROWS)]
    settings = [Sampling(max_tokens=new_tokens, seed=row) for row in range(ROWS)]
    await asyncio.gather(*(client(prompt, sampling) for prompt, sampling in zip(prompts, settings, strict=True)))


async def num_steps(client: EngineClient) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        lines = (await http.get(f"{client.base_url}/metrics")).text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("evergrad_engine_steps_total "))


@contextlib.asynccontextmanager
async def engine(folder: Path, threads: int) -> AsyncIterator[EngineClient]:
    """An engine in a process of its own, gone when the block ends."""
    token = secrets.token_hex(8)
    config = EngineConfig(model=str(folder), threads=threads, device="cpu")
    words = ["-m", "evergrad.inference", "--config-json", config.model_dump_json(), "--die-with-parent"]
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "EVERGRAD_TOKEN": token}
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe, env=environment)
    try:
        assert process.stdout is not None
        hello = json.loads(await process.stdout.readline())
        async with EngineClient(f"http://127.0.0.1:{hello['port']}", token) as client:
            yield client
    finally:
        process.kill()
        await process.wait()


# ── Wire ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def over_the_wire(outbox: Callable[[], Outbox], weights: Weights, num_bytes: int, rounds: int) -> dict[str, Any]:
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    with (
        WirePublisher(layout, outbox(), "identity") as dense,
        WirePublisher(layout, outbox(), "sparse") as sparse,
        receiving({"dense": dense.descriptor, "sparse": sparse.descriptor}) as ask,
    ):
        publishers = {"dense": dense, "sparse": sparse}
        version = 0
        for _ in range(2):  # both ends know a version, and have gone through all their memory
            version += 1
            for name, publisher in publishers.items():
                ask(name, publisher.stage(weights.items(), version).as_dict())
        rows, whole = {}, list[dict[str, Any]]()
        for density in DENSITIES:
            taken: dict[str, list[dict[str, Any]]] = {name: [] for name in publishers}
            for _ in range(rounds):
                version += 1
                change(weights, density, generator)
                for name, publisher in publishers.items():
                    started = time.perf_counter()
                    shipment = publisher.stage(weights.items(), version)
                    receipt = ask(name, shipment.as_dict())
                    taken[name].append({**receipt, "total_s": time.perf_counter() - started})
            rows[f"{density:.0%}"] = compared(taken, num_bytes)
            print(f"{outbox.__name__}, {density:.0%}: {rows[f'{density:.0%}']}", flush=True)
            whole += taken["dense"]
    figures = {key: round(statistics.median(each[key] for each in whole), 4) for key in ("total_s", "fetch_s", "gb_per_s")}
    link = whole[-1]["link_gb_per_s"]
    rate = num_bytes / figures["fetch_s"] / 1e9
    return {
        **figures,
        "fetch_gb_per_s": round(rate, 4),
        "link_gb_per_s": link,
        "fetch_link_share": round(rate / link, 4),
        "sparse": rows,
    }


def compared(taken: Mapping[str, list[dict[str, Any]]], num_bytes: int) -> dict[str, Any]:
    """Sparse against dense; and the link's rate below which sparse is the faster of the two, the rest of the work as here."""
    seconds = {name: statistics.median(each["total_s"] for each in receipts) for name, receipts in taken.items()}
    moved = {name: statistics.median(each["bytes"] for each in receipts) for name, receipts in taken.items()}
    link = taken["dense"][-1]["link_gb_per_s"] * 1e9
    extra_s = (seconds["sparse"] - moved["sparse"] / link) - (seconds["dense"] - moved["dense"] / link)
    return {
        "bytes_share": round(moved["sparse"] / num_bytes, 4),
        "sparse_s": round(seconds["sparse"], 4),
        "dense_s": round(seconds["dense"], 4),
        "speedup": round(seconds["dense"] / seconds["sparse"], 3),
        "pays_below_gb_per_s": round((moved["dense"] - moved["sparse"]) / extra_s / 1e9, 3) if extra_s > 0 else None,
    }


def change(weights: Weights, density: float, generator: torch.Generator) -> None:
    """Makes about that share of the values other ones."""
    for tensor in weights.values():
        count = max(1, int(density * tensor.numel()))
        tensor.view(-1)[torch.randint(0, tensor.numel(), (count,), generator=generator)] *= 1.001


@contextlib.contextmanager
def receiving(descriptors: Mapping[str, Any]) -> Iterator[Callable[[str, dict[str, Any]], dict[str, Any]]]:
    """Has a process take versions; what is yielded tells it of one and returns the receipt."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there, dict(descriptors)), daemon=True)
    process.start()

    def ask(name: str, shipment: dict[str, Any]) -> dict[str, Any]:
        here.send((name, shipment))
        receipt: dict[str, Any] = here.recv()
        return receipt

    try:
        yield ask
    finally:
        process.kill()
        process.join()


def receive(pipe: Connection, descriptors: Mapping[str, Any]) -> None:
    receivers = {name: WireReceiver([descriptor]) for name, descriptor in descriptors.items()}
    while True:
        name, shipment = pipe.recv()
        receiver = receivers[name]
        receiver.prepare(shipment)
        receiver.stage()
        receiver.verify()
        receipt = receiver.receipt().as_dict()
        receiver.commit()
        pipe.send({**receipt, "fetch_s": receiver.fetch_s})


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
