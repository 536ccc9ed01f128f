"""A memory budget is kept, by what tensors really take, and changes no gradient."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from evergrad.training import LossConfig, TrainerError
from evergrad.training.memory import BudgetedMemory
from evergrad.types import TrainingBatch
from tests.training.conftest import make_batch, make_sample
from tests.training.test_gradients import gradients, trainer_for

RL = LossConfig()


class Peak(TorchDispatchMode):
    """The most bytes of tensors that there were at one time: those of ``known``, and all that operations make."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self._living: dict[int, tuple[Any, int]] = {}
        self._take(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._take([each for each in tree_leaves(found) if isinstance(each, torch.Tensor)])
        return found

    def _take(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._living[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._living = {place: entry for place, entry in self._living.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._living.values()))


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, so that what they keep outweighs everything else."""
    folder = tmp_path_factory.mktemp("models") / "deep-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def long_batch() -> TrainingBatch:
    samples = [make_sample([3, 4 + number], [(7 * number + i * i) % 512 for i in range(150)]) for number in range(12)]
    return TrainingBatch(tuple(samples), 12 * 150)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative, over all parameters."""
    apart = sum(float((found[name] - each).double().square().sum()) for name, each in expected.items())
    return (apart / sum(float(each.double().square().sum()) for each in expected.values())) ** 0.5


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_step_stays_within_its_budget_with_the_same_gradient(deep_model: Path, method: str) -> None:
    batch = long_batch()
    free = trainer_for(deep_model, method, dtype="float32")
    expected, _ = gradients(free, batch, RL)
    with Peak(list(free._model.parameters())) as unbounded:
        assert free.step(batch, RL)["micro_batches"] == 1
    for share in (0.7, 0.25):
        budget = int(share * unbounded.bytes)
        trainer = trainer_for(deep_model, method, dtype="float32", memory_gib=budget / 2**30)
        found, metrics = gradients(trainer, batch, RL)
        assert difference(found, expected) <= 1e-6
        with Peak(list(trainer._model.parameters())) as peak:
            assert trainer.step(batch, RL)["micro_batches"] == metrics["micro_batches"] > 1
        assert budget / 4 < peak.bytes <= budget


def test_what_is_computed_twice_is_the_same_to_the_last_bit(deep_model: Path) -> None:
    trainer = trainer_for(deep_model, dtype="float32", memory_gib=1.0)
    expected, metrics = gradients(trainer, make_batch(0), RL)
    assert metrics["micro_batches"] == 1
    memory = trainer._memory
    assert isinstance(memory, BudgetedMemory)
    with memory._recomputation.switched(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "computing", lambda forest: nullcontext())
        found, again = gradients(trainer, make_batch(0), RL)
    assert again == metrics
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_what_does_not_fit_is_refused_by_name(deep_model: Path) -> None:
    with pytest.raises(TrainerError, match=r"memory_gib = 0\.001 holds no batch: .* take 0\.0\d+ GiB"):
        trainer_for(deep_model, memory_gib=0.001)
    trainer = trainer_for(deep_model, dtype="float32", memory_gib=0.008)
    before = [parameter.detach().clone() for parameter in trainer._parameters.values()]
    long = dataclasses.replace(make_sample([3], [5] * 2040), rollout_id="r7")
    with pytest.raises(TrainerError, match=r"a sample of 2040 tokens needs .* GiB.*r7"):
        trainer.step(TrainingBatch((long,), 2040), RL)
    assert all(torch.equal(*each) for each in zip(before, trainer._parameters.values(), strict=True))
    assert len(trainer.score([long])[0]) == 2041  # reading keeps nothing, and so fits


@pytest.mark.parametrize("method", ["full", "lora"])
def test_mixed_precision_rounds_what_computes_and_not_what_learns(deep_model: Path, method: str) -> None:
    """Gradients agree as far as bfloat16 can say: 8 bits are half a percent a product."""
    batch = make_batch(0)
    exact, _ = gradients(trainer_for(deep_model, method, dtype="float32"), batch, RL)
    trainer = trainer_for(deep_model, method, dtype="float32", mixed_precision=True)
    found, _ = gradients(trainer, batch, RL)
    assert 1e-4 < difference(found, exact) < 0.05
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    # The same again with a budget that has layers computed twice: rounded twice to the same.
    tight = trainer_for(deep_model, method, dtype="float32", mixed_precision=True, memory_gib=1.0)
    memory = tight._memory
    assert isinstance(memory, BudgetedMemory)
    with memory._recomputation.switched(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "computing", lambda forest: nullcontext())
        again, _ = gradients(tight, batch, RL)
    assert difference(again, found) <= 1e-6
    losses = [trainer.step(batch, LossConfig(name="cross_entropy"), lr=0.01)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    assert {tensor.dtype for _, tensor in trainer.named_weights()} == {torch.float32}
