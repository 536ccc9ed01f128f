"""Weights that reach a running engine by every way there is; whatever goes wrong on it, the old version answers as before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad.inference import EngineConfig, EngineError
from evergrad.inference._loop import StepLoop
from evergrad.inference._weights import WeightUpdates
from evergrad.inference.engine import Engine
from evergrad.transfer import (
    Publisher,
    TransferConfig,
    TransferError,
    WirePublisher,
    load_tensors,
    merged_tensors,
    open_publisher,
    save_tensors,
)
from evergrad.transfer.slots import fill
from evergrad.transfer.transports import FileOutbox, TcpOutbox
from evergrad.types import Sampling
from tests.inference.conftest import ask, load_reference, prompt_of, reference_logprobs

PROMPT = prompt_of(30)
NAME = "model.layers.0.self_attn.q_proj.weight"


class Running:
    """An engine in its thread, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.engine = Engine(EngineConfig(model=str(folder), device="cpu", kv_cache_tokens=4096, block_size=8))
        self._loop = StepLoop(self.engine, lambda events: None, lambda error: None)
        self._loop.start()
        self.updates = WeightUpdates(self._loop)
        self._asked = 0

    def take(self, publisher: Publisher, tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, Any]:
        return self.updates.update(publish(publisher, tensors, version))

    def logprobs(self) -> list[float]:
        return self._loop.call(lambda: self.engine.logprobs(PROMPT)).result()

    def answer(self) -> tuple[list[int], list[float], Any]:
        """Tokens, logprobs and versions of a completion that nothing was cached for."""
        self._asked += 1

        def run() -> Any:
            self.engine.reset_prefix_cache()
            return ask(self.engine, PROMPT, Sampling(max_tokens=12, seed=4), name=str(self._asked))[0]

        done = self._loop.call(run).result()
        return done.token_ids, done.logprobs, done.spans

    def close(self) -> None:
        self._loop.stop()
        self.updates.close()


@pytest.fixture
def running(model_folder: Path) -> Iterator[Running]:
    one = Running(model_folder)
    yield one
    one.close()


def publish(publisher: Publisher, tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, Any]:
    """What the engine is told, after a way over HTTP."""
    try:
        publisher.begin()
        fill(publisher, tensors.items())
        told: dict[str, Any] = json.loads(json.dumps(publisher.finish(version).as_dict()))
    finally:
        publisher.abort()
    return told


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def expected_logprobs(tensors: Mapping[str, torch.Tensor], model_folder: Path) -> list[float]:
    model = load_reference(model_folder)
    model.load_state_dict(dict(tensors), strict=False)
    table = reference_logprobs(model, PROMPT[:1], PROMPT[1:])
    return [float(table[place, token]) for place, token in enumerate(PROMPT[1:])]


def nudged(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """One value in fifty is another."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.where(torch.rand(t.shape, generator=generator) < 0.02, t * 1.5, t) for n, t in tensors.items()}


WAYS: dict[str, Callable[[Path], TransferConfig]] = {
    "shared memory": lambda folder: TransferConfig(),
    "tcp": lambda folder: TransferConfig(transport="tcp"),
    "tcp, sparse": lambda folder: TransferConfig(transport="tcp", codec="sparse"),
    "nixl, sparse": lambda folder: TransferConfig(transport="nixl", codec="sparse"),
    "files": lambda folder: TransferConfig(transport="files", url=str(folder)),
    "files, sparse": lambda folder: TransferConfig(transport="files", url=str(folder), codec="sparse"),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_the_engine_scores_as_the_trainer_after_every_update(
    running: Running, model_folder: Path, other_folder: Path, tmp_path: Path, way: str
) -> None:
    if way.startswith("nixl"):
        pytest.importorskip("nixl", reason="needs the extra nixl")
    tensors = load_tensors(other_folder)
    publisher = open_publisher(WAYS[way](tmp_path), layout_of(tensors))
    running.updates.attach(json.loads(json.dumps(publisher.descriptor)))
    for version in range(1, 5):
        report = running.take(publisher, tensors, version)
        assert running.logprobs() == pytest.approx(expected_logprobs(tensors, model_folder), abs=1e-4)
        assert running.engine.policy_version == report["policy_version"] == version
        assert 0 <= report["pause_s"] + report["stage_s"] <= report["seconds"]
        moved = report["transfer"]
        assert moved["codec"] == ("sparse" if version > 1 and "sparse" in way else "identity")
        assert moved["bytes"] <= 1.01 * sum(t.numel() * t.element_size() for t in tensors.values())
        assert moved["seconds"] > 0
        assert moved["link_share"] == pytest.approx(moved["gb_per_s"] / moved["link_gb_per_s"], rel=0.01, abs=1e-3)
        tensors = nudged(tensors, version)
    publisher.close()


def test_an_adapter_alone_is_merged_with_the_base(running: Running, model_folder: Path, tmp_path: Path) -> None:
    base, prefix = load_tensors(model_folder), "base_model.model."
    config = {"lora_alpha": 8.0, "r": 2, "bias": "none"}
    module = NAME.removesuffix(".weight")
    for version in (1, 2, 3):
        generator = torch.Generator().manual_seed(version)
        adapter = {
            f"{prefix}{module}.lora_A.weight": torch.randn(2, 64, generator=generator) * 0.3,
            f"{prefix}{module}.lora_B.weight": torch.randn(64, 2, generator=generator) * 0.3,
        }
        if version == 1:
            publisher = open_publisher(TransferConfig(transport="tcp"), layout_of(adapter))
            running.updates.attach({**publisher.descriptor, "adapter": config})
        report = running.take(publisher, adapter, version)
        assert report["transfer"]["bytes"] < 2000
        merged = {**base, **dict(merged_tensors(base, (config, adapter)))}
        assert running.logprobs() == pytest.approx(expected_logprobs(merged, model_folder), abs=1e-4)
    before = running.answer()
    wrong = {name.replace("q_proj", "q_porj"): tensor for name, tensor in adapter.items()}
    odd = open_publisher(TransferConfig(transport="tcp"), layout_of(wrong))
    running.updates.attach({**odd.descriptor, "adapter": config})
    with pytest.raises(TransferError, match=r"q_porj.*does not have"):
        running.take(odd, wrong, 4)
    assert running.answer() == before
    publisher.close()
    odd.close()


def damaged(tensors: dict[str, torch.Tensor], fault: str) -> dict[str, torch.Tensor]:
    one = tensors[NAME]
    if fault == "renamed":
        return {name.replace("q_proj", "qproj"): tensor for name, tensor in tensors.items()}
    if fault == "shape":
        return {**tensors, NAME: one[:-1].contiguous()}
    if fault == "transposed":
        return {
            **tensors,
            "model.layers.0.mlp.down_proj.weight": tensors["model.layers.0.mlp.down_proj.weight"].t().contiguous(),
        }
    return {**tensors, NAME: one.clone().index_fill_(0, torch.tensor([1]), float("nan" if fault == "nan" else "inf"))}


@pytest.mark.parametrize("way", ["shared memory", "tcp, sparse", "files"])
@pytest.mark.parametrize(
    ("fault", "told"),
    [("renamed", "qproj"), ("shape", "q_proj"), ("transposed", "down_proj"), ("nan", "not finite"), ("infinite", "not finite")],
)
def test_weights_that_do_not_fit_leave_the_old_version_answering_as_before(
    running: Running, other_folder: Path, tmp_path: Path, way: str, fault: str, told: str
) -> None:
    good = load_tensors(other_folder)
    publisher = open_publisher(WAYS[way](tmp_path / "good"), layout_of(good))
    running.updates.attach(publisher.descriptor)
    running.take(publisher, good, 1)
    before = running.answer()
    bad = damaged(good, fault)
    other = open_publisher(WAYS[way](tmp_path / "bad"), layout_of(bad))
    running.updates.attach(other.descriptor)
    with pytest.raises((EngineError, TransferError), match=told):
        running.take(other, bad, 2)
    assert running.engine.policy_version == 1
    assert running.answer() == before
    running.updates.attach(publisher.descriptor)
    running.take(publisher, good, 3)
    assert running.answer()[:2] == before[:2]
    publisher.close()
    other.close()


@pytest.mark.parametrize("fault", ["truncated", "flipped", "gone", "wrong base", "closed", "not a shipment"])
def test_a_transfer_that_fails_leaves_the_old_version_answering_as_before(
    running: Running, other_folder: Path, tmp_path: Path, fault: str
) -> None:
    tensors = load_tensors(other_folder)
    outbox = TcpOutbox() if fault == "closed" else FileOutbox(str(tmp_path), snapshot_every=2)
    publisher = WirePublisher(layout_of(tensors), outbox, "sparse")
    running.updates.attach(publisher.descriptor)
    running.take(publisher, tensors, 1)
    before = running.answer()
    newer = nudged(tensors, 1)
    shipment = publisher.stage(newer.items(), 2)
    path = tmp_path / f"{shipment.payloads[0].name}.payload"
    told = shipment.as_dict()
    content = path.read_bytes() if path.exists() else b""
    if fault == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif fault == "flipped":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif fault == "gone":
        path.unlink()
    elif fault == "wrong base":
        payloads = tuple(replace(payload, base_version=41) for payload in shipment.payloads)
        told = replace(shipment, payloads=payloads).as_dict()
    elif fault == "closed":
        outbox.close()
    else:
        told = {"policy_version": 2}
    reasons = {
        "truncated": "bytes are there",
        "flipped": "checksum",
        "wrong base": "stands on version 41",
        "closed": "cannot be reached",
    }
    with pytest.raises(TransferError, match=reasons.get(fault, fault)):
        running.updates.update(told)
    assert running.engine.policy_version == 1
    assert running.answer() == before
    if fault != "closed":
        running.take(publisher, newer, 3)  # written whole again, as nothing can stand on what is damaged
        assert running.engine.policy_version == 3
        assert running.answer()[0] != before[0]
    publisher.close()


def test_half_precision_on_the_way_costs_what_it_says(running: Running, other_folder: Path) -> None:
    tensors = load_tensors(other_folder)
    publisher = open_publisher(TransferConfig(transport="tcp", codec="bfloat16"), layout_of(tensors))
    running.updates.attach(publisher.descriptor)
    report = running.take(publisher, tensors, 1)
    assert report["transfer"]["bytes"] < 0.51 * sum(t.numel() * t.element_size() for t in tensors.values())
    live = dict(running.engine.model._module.named_parameters())
    for name, tensor in tensors.items():
        assert torch.equal(live[name], tensor.to(torch.bfloat16).float())
    publisher.close()


def test_an_engine_serves_on_when_its_publisher_is_gone_and_takes_the_next_ones(
    running: Running, other_folder: Path, tmp_path: Path
) -> None:
    tensors = load_tensors(other_folder)
    answers = []
    for version, way in enumerate(["tcp", "shared memory", "files", "tcp, sparse"], start=1):
        publisher = open_publisher(WAYS[way](tmp_path), layout_of(tensors))
        running.updates.attach(publisher.descriptor)
        running.take(publisher, tensors, version)
        publisher.close()
        answers.append(running.answer()[:2])
    assert answers == answers[:1] * 4
    folder = save_tensors(tmp_path / "saved", tensors.items())
    running.updates.load(str(folder), 9, lambda: None)
    assert running.answer()[:2] == answers[0]
