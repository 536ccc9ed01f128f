"""A real trainer process, told over HTTP, killed at bad moments, and left without room to write."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch

from evergrad.training import LossConfig, TrainerClient, TrainerConfig, TrainerError, UpdatesConfig
from evergrad.training.trainer import Trainer
from evergrad.transfer import Manifest, SlotReceiver, load_tensors, merged_tensors
from evergrad.types import TrainingBatch
from tests.training.conftest import make_batch

CROSS_ENTROPY = LossConfig(name="cross_entropy")
TOKEN = "a-token"
BATCHES = [make_batch(seed) for seed in range(5)]
MEASURED = {"seconds", "tokens_per_s", "memory_gib"}
"""Figures of a step that are of this process, now."""


def config_for(folder: Path) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": str(folder), "threads": 1, "optimizer": {"lr": 0.01}, "critic": {}})


@dataclasses.dataclass
class Running:
    process: asyncio.subprocess.Process
    client: TrainerClient

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Running]:
    """A server process of its own; dead, whatever happens, when the block ends."""
    process = await asyncio.create_subprocess_exec(
        *[
            sys.executable,
            "-m",
            "evergrad.training",
            "--config-json",
            config_for(folder).model_dump_json(),
            "--die-with-parent",
        ],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "EVERGRAD_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        hello = json.loads(await process.stdout.readline())
        assert hello["ready"] is True
        assert hello["pid"] == process.pid
        async with TrainerClient(f"http://127.0.0.1:{hello['port']}", TOKEN) as client:
            yield Running(process, client)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_session_from_step_to_published_weights(model_folder: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir("/dev/shm"))
    local = Trainer(config_for(model_folder))
    async with serving(model_folder) as server:
        client = server.client
        with SlotReceiver(await client.descriptor()) as receiver:
            for version, batch in enumerate(BATCHES[:3], start=1):
                updates = UpdatesConfig(mini_batches=version)
                metrics = await client.step(batch, CROSS_ENTROPY, lr=0.02, updates=updates)
                expected = local.step(batch, CROSS_ENTROPY, lr=0.02, updates=updates)
                assert {k: v for k, v in metrics.items() if k not in MEASURED} == {
                    k: v for k, v in expected.items() if k not in MEASURED
                }
                receiver.accept(Manifest.from_dict(await client.publish(version)))
                assert receiver.policy_version == version
                for name, tensor in local.named_weights():
                    assert torch.equal(receiver.tensors()[name], tensor), name
            assert await client.logprobs([5, 6, 7, 8]) == local.logprobs((5, 6, 7, 8))
            for reference in (False, True):
                samples = BATCHES[4].samples
                assert await client.score(samples, reference=reference) == local.score(samples, reference=reference)
            assert await client.values(samples) == local.values(samples)
            health = await client.health()
            assert (health["status"], health["updates"], health["policy_version"], health["operation"]) == ("ok", 6, 3, None)
            await client.export(str(tmp_path / "v"))
            base = load_tensors(model_folder)
            assert all(torch.equal(receiver.tensors()[n], t) for n, t in merged_tensors(base, tmp_path / "v"))
            # The receiver outlives the trainer's death with its version whole.
            await server.kill()
            receiver.prepare(
                Manifest(3, receiver._live or 0, await asyncio.to_thread(checksums, receiver), 0, receiver.layout.hash)
            )
            receiver.verify()
    assert sorted(os.listdir("/dev/shm")) == before


def checksums(receiver: SlotReceiver) -> dict[str, str]:
    from evergrad.transfer.proof import checksum

    return {name: checksum(tensor) for name, tensor in receiver.tensors().items()}


def test_a_batch_on_the_wire_is_the_batch() -> None:
    from evergrad.training.wire import BatchBody, batch_json

    sample = BATCHES[0].samples[0]
    optional = ("reference_logprobs", "proximal_logprobs", "rewards", "values", "returns")
    full = dataclasses.replace(sample, group_id="g", **dict.fromkeys(optional, sample.logprobs))  # type: ignore[arg-type]
    for batch in (BATCHES[0], TrainingBatch((full,), 99, {"reward": 0.5}, 7)):
        assert BatchBody.model_validate(json.loads(json.dumps(batch_json(batch)))).noun() == batch


async def test_killed_again_and_again_it_ends_in_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    """Each life resumes, takes a step, saves, and is killed in the middle of the next step or of the save after it.

    What the next life finds is the state before that save or after it, whole; the end is that of a run left alone.
    """
    straight = Trainer(config_for(model_folder))
    for batch in BATCHES:
        straight.step(batch, CROSS_ENTROPY)
    checkpoint, done = tmp_path / "checkpoint", 0
    for life in range(1, 6):
        async with serving(model_folder) as server:
            if done:
                found = (await server.client.load(str(checkpoint)))["updates"]
                assert found in (done, done + 1)
                assert sorted(os.listdir(checkpoint)) == ["model.safetensors", "state.json"]
                done = found
            if done < 5:
                await server.client.step(BATCHES[done], CROSS_ENTROPY)
                await server.client.save(str(checkpoint))
                done += 1
            if done == 5:
                break
            doomed = [asyncio.create_task(server.client.step(BATCHES[done], CROSS_ENTROPY))]
            if life % 2 == 0:
                await doomed[0]
                doomed.append(asyncio.create_task(server.client.save(str(checkpoint))))
            await asyncio.sleep(0.003 * life)
            await server.kill()
            results = await asyncio.gather(*doomed, return_exceptions=True)
            assert all(isinstance(result, (dict, TrainerError)) for result in results)
    assert done == 5
    trainer = Trainer(config_for(model_folder))
    trainer.load(checkpoint)
    for (name, tensor), (_, other) in zip(trainer.named_weights(), straight.named_weights(), strict=True):
        assert torch.equal(tensor, other), name
    trainer.save(checkpoint)  # and with that, what the killed ones left is gone
    assert os.listdir(tmp_path) == ["checkpoint"]


async def test_trouble_is_answered_and_changes_nothing(model_folder: Path, tmp_path: Path) -> None:
    """One server through all of it: mistakes, no room on the disk, a long step; then its parent lets go."""
    async with serving(model_folder) as server:
        await _mistakes(server, tmp_path)
        await _no_room(server, model_folder, tmp_path)
        await _order_and_health(server, model_folder)
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert await asyncio.wait_for(server.process.wait(), 60) == 0
        with pytest.raises(TrainerError, match="cannot be reached"):
            await server.client.health()


async def _mistakes(server: Running, tmp_path: Path) -> None:
    base_url = server.client.base_url
    async with httpx.AsyncClient(base_url=base_url, headers={"authorization": f"Bearer {TOKEN}"}) as http:
        empty = {"samples": [], "num_valid_tokens": 0}
        cases = [
            ("/publsh", {}, 404, "did you mean 'publish'"),
            ("/publish", {"policy_versoin": 1}, 422, "did you mean 'policy_version'"),
            ("/publish", {"policy_version": None}, 422, "policy_version"),
            ("/publish", [], 422, "object"),
            ("/step", {"batch": empty, "loss": {"name": "polcy_gradient"}}, 422, "did you mean 'policy_gradient'"),
            ("/step", {}, 422, "batch"),
            ("/logprobs", {"token_ids": [1]}, 422, "token_ids"),
            ("/logprobs", {"token_ids": [1, 10**6]}, 409, "token 1000000"),
            ("/logprobs", {"token_ids": [1, -1]}, 409, "token -1"),
            ("/load", {"folder": str(tmp_path / "nothing")}, 409, "no readable checkpoint"),
            ("/save", {"folder": "/proc/nothing/here"}, 409, "could not write"),
            ("/reset", {"weights_uri": str(tmp_path)}, 409, "configuration"),
        ]  # fmt: skip
        for path, body, status, message in cases:
            answer = await http.post(path, json=body)
            assert answer.status_code == status, (path, answer.text)
            assert message in answer.json()["error"]["message"]
        assert (await http.post("/step", content=b"{")).status_code == 422
        assert (await http.get("/health", headers={"authorization": "Bearer wrong"})).status_code == 401
    async with TrainerClient(base_url) as stranger:
        with pytest.raises(TrainerError, match="bearer token"):
            await stranger.step(BATCHES[0])
    bad = dataclasses.replace(BATCHES[0].samples[0], token_ids=(10**6,) * len(BATCHES[0].samples[0].token_ids))
    with pytest.raises(TrainerError, match="token 1000000"):
        await server.client.step(TrainingBatch((bad,), 100), CROSS_ENTROPY)
    nothing = await server.client.step(TrainingBatch((), 0))
    assert nothing["updated"] == 0
    assert (await server.client.health())["updates"] == 0


async def _no_room(server: Running, model_folder: Path, tmp_path: Path) -> None:
    checkpoint, client = tmp_path / "checkpoint", server.client
    await client.step(BATCHES[0], CROSS_ENTROPY)
    await client.save(str(checkpoint))
    saved = await client.logprobs([5, 6, 7])
    half = (checkpoint / "model.safetensors").stat().st_size // 2
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (half, resource.RLIM_INFINITY))
    assert (await client.step(BATCHES[1], CROSS_ENTROPY))["updated"] == 1
    with pytest.raises(TrainerError, match=r"could not write.*untouched"):
        await client.save(str(checkpoint))
    assert sorted(os.listdir(checkpoint)) == ["model.safetensors", "state.json"]
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert (await client.load(str(checkpoint)))["updates"] == 1
    assert await client.logprobs([5, 6, 7]) == saved
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await client.save(str(checkpoint))
    await client.reset()


async def _order_and_health(server: Running, model_folder: Path) -> None:
    big = TrainingBatch(tuple(s for seed in range(40) for s in make_batch(seed, groups=6, size=8).samples), 10**6)
    step = asyncio.create_task(server.client.step(big, CROSS_ENTROPY))
    later = asyncio.create_task(server.client.logprobs([1, 2, 3]))
    seen = set()
    while not step.done():
        seen.add((await server.client.health())["operation"])
    assert "step" in seen
    await step
    local = Trainer(config_for(model_folder))
    local.step(big, CROSS_ENTROPY)
    assert await later == local.logprobs((1, 2, 3))


@pytest.mark.parametrize(
    ("config", "message"),
    [('{"model": "/nowhere"}', "no model here"), ('{"modle": "x"}', "did you mean 'model'"), ("{", "not JSON")],
)
async def test_a_bad_start_is_one_clear_line_and_a_code(config: str, message: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "evergrad.training", "--config-json", config],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert message in err.decode().splitlines()[-1]
