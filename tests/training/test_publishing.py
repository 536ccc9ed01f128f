"""Versions of a trainer of several ranks: each rank writes its boxes into the slot, and an engine gets what one rank gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from evergrad.inference import EngineConfig
from evergrad.inference.engine import Engine
from evergrad.training import LossConfig, TrainerConfig
from evergrad.training.ranks import RanksLost
from evergrad.training.trainer import Trainer
from evergrad.transfer import BoxWriter, Publisher, SlotPublisher, SlotReceiver, TransferError, WirePublisher, load_tensors
from evergrad.transfer.ends import open_receiver
from evergrad.transfer.placements import held_shards
from evergrad.transfer.transports import TcpOutbox
from tests.training.conftest import make_batch

CROSS_ENTROPY = LossConfig(name="cross_entropy")


def new_trainer(folder: Path, method: str, ranks: int = 1, tensor_parallel: int = 1, **fields: object) -> Trainer:
    config = {"model": str(folder), "method": method, "ranks": ranks, "tensor_parallel": tensor_parallel, "threads": 1}
    return Trainer(TrainerConfig.model_validate({**config, "dtype": "float32", "device": "cpu", **fields}))


def publish(trainer: Trainer, publisher: Publisher, version: int) -> dict[str, object]:
    try:
        trainer.write_weights(publisher)
        return publisher.finish(version).as_dict()
    finally:
        publisher.abort()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def learned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of trainers that have learned something."""
    folder = tmp_path_factory.mktemp("learned")
    for method in ("full", "lora"):
        trainer = new_trainer(model_folder, method)
        trainer.step(make_batch(0), CROSS_ENTROPY, 0.01)
        trainer.export(folder / method)
    return {method: folder / method for method in ("full", "lora")}


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "transport"),
    [(1, 1, "slots"), (2, 1, "slots"), (4, 2, "slots"), (2, 2, "tcp"), pytest.param(4, 1, "tcp", marks=pytest.mark.slow)],
)
def test_an_engine_gets_the_same_bits_from_any_number_of_ranks(
    model_folder: Path,
    learned: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    tensor_parallel: int,
    transport: str,
) -> None:
    tokens = (5, 6, 7, 8, 9, 3)
    engine = Engine(EngineConfig(model=str(model_folder), device="cpu"))
    expected = Engine(EngineConfig(model=str(learned["full"]), device="cpu")).logprobs(tokens)
    assert engine.logprobs(tokens) != expected
    with closing(new_trainer(model_folder, "full", ranks, tensor_parallel)) as trainer:
        trainer.reset(str(learned["full"]))
        layout = trainer.layout()
        with (
            SlotPublisher(layout) if transport == "slots" else WirePublisher(layout, TcpOutbox()) as publisher,
            closing(open_receiver(publisher.descriptor)) as receiver,
        ):

            def take(version: int) -> dict[str, torch.Tensor]:
                with monkeypatch.context() as patch:
                    if ranks > 1:
                        patch.delattr(Trainer, "_whole")  # nobody gathers a tensor
                    receiver.prepare(publish(trainer, publisher, version))
                receiver.stage()
                receiver.verify()
                engine.stage_weights(receiver.tensors(), whole=True, known_finite=True)
                engine.commit(version)
                receiver.commit()
                return receiver.tensors()

            assert same(take(1), load_tensors(learned["full"]))
            assert engine.logprobs(tokens) == expected
            for version in (2, 3):  # the other slot, and the first one again
                trainer.step(make_batch(version), CROSS_ENTROPY, 0.01)
                assert same(take(version), dict(trainer.named_weights()))


def test_ranks_publish_the_adapter_that_one_rank_does(model_folder: Path, learned: dict[str, Path]) -> None:
    found = []
    for ranks in (1, 2):
        transfer = {"adapter_only": True, "transport": "tcp"}
        with closing(new_trainer(model_folder, "lora", ranks, transfer=transfer)) as trainer:
            trainer.reset(str(learned["lora"]))
            with SlotPublisher(trainer.layout()) as publisher, SlotReceiver(publisher.descriptor) as receiver:
                receiver.prepare(publish(trainer, publisher, 1))
                receiver.verify()
                found.append({name: tensor.clone() for name, tensor in receiver.tensors().items()})
    assert same(*found)
    assert same(found[0], load_tensors(learned["lora"]))


def test_a_rank_that_died_costs_no_version_that_is_served(model_folder: Path) -> None:
    with (
        closing(new_trainer(model_folder, "full", 2)) as trainer,
        SlotPublisher(trainer.layout()) as publisher,
        SlotReceiver(publisher.descriptor) as receiver,
    ):
        receiver.prepare(publish(trainer, publisher, 1))
        receiver.verify()
        receiver.commit()
        before = {name: tensor.clone() for name, tensor in receiver.tensors().items()}
        (rank,) = psutil.Process().children()
        rank.kill()
        with pytest.raises(RanksLost, match="rank 1 of the trainer died"):
            publish(trainer, publisher, 2)
        assert same(receiver.tensors(), before)
        publisher.begin()  # nothing is left half written


def test_boxes_that_the_ranks_do_not_hold_together_are_refused() -> None:
    module = torch.nn.Linear(3, 2)
    shapes, shards = held_shards(module.named_parameters())
    with SlotPublisher({name: (shape, torch.float32) for name, shape in shapes.items()}) as publisher:
        with pytest.raises(TransferError, match="no source rank holds"):
            BoxWriter(publisher.slots, [shards[:1]], 0)
        writer = BoxWriter(publisher.slots, [shards], 0)
        views = publisher.begin()
        writer.write(publisher.writing, module.named_parameters())
        assert same(views, {name: parameter.detach() for name, parameter in module.named_parameters()})
        writer.close()
        slots = publisher.slots
    with pytest.raises(TransferError, match=r"gone|not the publisher's"):
        BoxWriter(slots, [shards], 0)
