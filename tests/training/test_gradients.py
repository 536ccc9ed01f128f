"""Merged, micro-batched training gives the gradients of plain transformers on one sample at a time."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from evergrad.training import LoraConfig, LossConfig, TrainerConfig
from evergrad.training.parts import sum_of_squares
from evergrad.training.trainer import Trainer
from evergrad.types import TrainingBatch, TrainingSample
from tests.training.conftest import make_batch, make_sample, unshared

POLICY_GRADIENT, CROSS_ENTROPY = LossConfig(name="policy_gradient"), LossConfig(name="cross_entropy")


def trainer_for(folder: Path, method: str = "full", micro_batch_tokens: int = 4096, **fields: object) -> Trainer:
    config = {"model": str(folder), "method": method, "dtype": "float64", "micro_batch_tokens": micro_batch_tokens, **fields}
    trainer = Trainer(TrainerConfig.model_validate(config))
    if method == "lora":  # B starts at zero, where A has no gradient
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in trainer._parameters.items():
                if name.endswith("lora_b"):
                    parameter.normal_(std=0.1, generator=generator)
    return trainer


def gradients(trainer: Trainer, batch: TrainingBatch, loss: LossConfig) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    metrics = trainer.forward_backward(batch, loss)
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trainer._parameters.items()}
    trainer._optimizer.zero_grad(set_to_none=True)
    return found, metrics


def reference_gradients(
    folder: Path, batch: TrainingBatch, name: str, cap: float = 2.0
) -> tuple[dict[str, torch.Tensor], float]:
    """Transformers' own forward, a sample at a time; the losses written down once more, as loops."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total = 0.0
    for sample in batch.samples:
        logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0]
        for position, masked in enumerate(sample.loss_mask):
            if not masked:
                continue
            row = logits[position - 1] / sample.temperature
            logprob = row[sample.token_ids[position]] - torch.logsumexp(row, 0)
            if name == "cross_entropy":
                term = -sample.advantages[position] * logprob
            else:
                weight = min(math.exp(logprob.item() - sample.logprobs[position]), cap)
                term = -weight * sample.advantages[position] * logprob
            (term / batch.num_valid_tokens).backward(retain_graph=True)
            total += term.item() / batch.num_valid_tokens
    return {name: p.grad for name, p in model.named_parameters()}, total


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-7) -> None:
    """Within 1e-7: transformers normalizes in fp32 whatever the model's dtype, so float64 is not exact to the last bit."""
    assert found.keys() == expected.keys()
    assert any(bool(tensor.abs().max() > 1e-6) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor.to(found[name].dtype), rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("loss", [POLICY_GRADIENT, CROSS_ENTROPY], ids=lambda loss: loss.name)
@pytest.mark.parametrize("seed", range(3))
def test_full_gradients_equal_plain_transformers(model_folder: Path, loss: LossConfig, seed: int) -> None:
    batch = make_batch(seed)
    batch = dataclasses.replace(
        batch,
        samples=tuple(
            dataclasses.replace(s, temperature=random.Random(i).choice([0.6, 1.0])) for i, s in enumerate(batch.samples)
        ),
    )
    found, metrics = gradients(trainer_for(model_folder), batch, loss)
    expected, total = reference_gradients(model_folder, batch, loss.name)
    assert_close(found, expected)
    assert metrics["loss"] == pytest.approx(total, abs=1e-6)
    assert metrics["trained_tokens"] < metrics["batch_tokens"] / 1.5  # it did merge


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("loss", [POLICY_GRADIENT, CROSS_ENTROPY], ids=lambda loss: loss.name)
def test_gradients_do_not_depend_on_how_the_batch_is_cut_or_ordered(model_folder: Path, method: str, loss: LossConfig) -> None:
    batch = make_batch(7, groups=4, size=5)
    whole, metrics = gradients(trainer_for(model_folder, method), batch, loss)
    assert metrics["micro_batches"] == 1
    for size in (1, 40, 97):
        cut, cut_metrics = gradients(trainer_for(model_folder, method, size), batch, loss)
        assert cut_metrics["micro_batches"] > 1
        assert_close(cut, whole, 1e-7)
        for name in metrics.keys() - {"micro_batches", "trained_tokens"}:
            assert cut_metrics[name] == pytest.approx(metrics[name], abs=1e-6), name
    shuffled = list(batch.samples)
    random.Random(0).shuffle(shuffled)
    assert_close(
        gradients(trainer_for(model_folder, method), dataclasses.replace(batch, samples=tuple(shuffled)), loss)[0], whole, 1e-12
    )


@pytest.mark.parametrize("shared", [True, False], ids=["shared beginnings", "nothing shared"])
def test_packed_is_padded(model_folder: Path, shared: bool) -> None:
    """In one micro-batch and in four, against one padded forward of transformers over all samples, the usual way."""
    batch = make_batch(8) if shared else unshared(make_batch(8))
    width = max(len(sample.token_ids) for sample in batch.samples)

    def padded(field: str) -> torch.Tensor:
        rows = [getattr(sample, field) for sample in batch.samples]
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    ids, mask = padded("token_ids"), padded("loss_mask")[:, 1:].bool()
    attention = torch.tensor([[int(i < len(sample.token_ids)) for i in range(width)] for sample in batch.samples])
    rows = torch.log_softmax(model(input_ids=ids, attention_mask=attention).logits[:, :-1], -1)
    logprobs = rows.gather(2, ids[:, 1:, None]).squeeze(2)[mask]
    behaviour, advantages = (padded(field).double()[:, 1:][mask] for field in ("logprobs", "advantages"))
    weights = (logprobs.detach() - behaviour).exp().clamp(max=2.0)
    (-weights * advantages * logprobs).sum().div(batch.num_valid_tokens).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    whole, metrics = gradients(trainer_for(model_folder), batch, POLICY_GRADIENT)
    assert_close(whole, expected, 1e-6)
    trained = [sample for sample in batch.samples if any(sample.advantages)]
    longest = sum(max(i for i, each in enumerate(sample.advantages) if each) for sample in trained)
    assert (metrics["trained_tokens"] == longest) is not shared
    cut, cut_metrics = gradients(
        trainer_for(model_folder, micro_batch_tokens=math.ceil(metrics["trained_tokens"] / 3)), batch, POLICY_GRADIENT
    )
    assert cut_metrics["micro_batches"] >= 3
    assert_close(cut, expected, 1e-6)


def test_in_float32_too(model_folder: Path) -> None:
    batch = make_batch(3)
    whole, _ = gradients(trainer_for(model_folder, dtype="float32"), batch, POLICY_GRADIENT)
    cut, _ = gradients(trainer_for(model_folder, micro_batch_tokens=30, dtype="float32"), batch, POLICY_GRADIENT)
    expected, _ = reference_gradients(model_folder, batch, "policy_gradient")
    assert_close(cut, whole, 1e-6)
    assert_close(whole, expected, 1e-5)


def test_a_float32_norm_is_exact_and_does_not_overflow() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3000, 576), (5,), (4, 7, 30), (1,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    exact = math.fsum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(sum_of_squares(tensors)) == pytest.approx(exact, rel=2e-8)
    assert float(sum_of_squares([torch.full((200, 8), 1e18)])) == pytest.approx(1600e36)
    assert math.isnan(float(sum_of_squares([*tensors, torch.tensor([float("nan")])])))
    assert float(sum_of_squares([torch.tensor([1.0, float("inf")])])) == float("inf")


def test_calls_add_up_to_one_batch(model_folder: Path) -> None:
    """1 and 9 tokens, and one sample that was dropped but counts: together, or one after the other."""
    short, long = make_sample([3, 4], [5]), make_sample([3, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9])
    dropped = make_sample([3, 7], [1, 1], loss_mask=(0, 0, 0, 0))
    trainer = trainer_for(model_folder)
    whole, _ = gradients(trainer, TrainingBatch((short, long, dropped), 10), CROSS_ENTROPY)
    trainer.forward_backward(TrainingBatch((long,), 10), CROSS_ENTROPY)
    parts, _ = gradients(trainer, TrainingBatch((dropped, short), 10), CROSS_ENTROPY)
    assert_close(parts, whole, 1e-7)


def test_samples_without_advantage_cost_nothing_and_count(model_folder: Path) -> None:
    trainer = trainer_for(model_folder)
    useful, useless = make_sample([3, 4], [5, 6]), make_sample([8, 9], [5, 6, 7], advantages=(0.0,) * 5)
    both, metrics = gradients(trainer, TrainingBatch((useful, useless), 5), POLICY_GRADIENT)
    alone, alone_metrics = gradients(trainer, TrainingBatch((useful,), 5), POLICY_GRADIENT)
    assert_close(both, alone, 0.0)
    assert metrics["trained_tokens"] == alone_metrics["trained_tokens"] == 3
    before = {name: p.detach().clone() for name, p in trainer._parameters.items()}
    metrics = trainer.step(TrainingBatch((useless,), 3), POLICY_GRADIENT)
    assert (metrics["trained_tokens"], metrics["updated"], metrics["grad_norm"]) == (0, 0, 0)
    assert all(torch.equal(before[name], p) for name, p in trainer._parameters.items())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("loss", [POLICY_GRADIENT, CROSS_ENTROPY], ids=lambda loss: loss.name)
def test_what_stands_at_masked_positions_leaks_nowhere(model_folder: Path, poison: float, loss: LossConfig) -> None:
    trainer, batch = trainer_for(model_folder, "lora"), make_batch(11)

    def poisoned(sample: TrainingSample) -> TrainingSample:
        fields = {
            f: tuple(v if m else poison for v, m in zip(getattr(sample, f), sample.loss_mask, strict=True))
            for f in ("logprobs", "advantages")
        }
        return dataclasses.replace(sample, **fields)

    clean, metrics = gradients(trainer, batch, loss)
    dirty, dirty_metrics = gradients(trainer, dataclasses.replace(batch, samples=tuple(map(poisoned, batch.samples))), loss)
    assert_close(dirty, clean, 0.0)
    assert dirty_metrics == metrics


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}, {"dora": True, "rslora": True, "rank": 3}], ids=str)
def test_lora_gradients_equal_those_of_peft(model_folder: Path, tmp_path: Path, kind: dict[str, object]) -> None:
    from peft import PeftModel

    trainer, batch = trainer_for(model_folder, "lora", lora=kind), make_batch(2)
    found, _ = gradients(trainer, batch, CROSS_ENTROPY)
    trainer.export(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in batch.samples:
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([sample.token_ids])).logits[0], -1)
        for position in [p for p, masked in enumerate(sample.loss_mask) if masked]:
            loss = (
                loss - sample.advantages[position] * logprobs[position - 1, sample.token_ids[position]] / batch.num_valid_tokens
            )
    loss.backward()
    names = {
        "lora_A.default.weight": "lora_a",
        "lora_B.default.weight": "lora_b",
        "lora_magnitude_vector.default.weight": "magnitude",
    }
    expected = {}
    for name, parameter in model.named_parameters():
        for theirs, ours in names.items():
            if name.endswith(theirs):
                expected[name.removeprefix("base_model.model.").removesuffix(theirs) + ours] = parameter.grad
    assert_close(found, expected, 1e-6 if kind else 1e-7)  # √rank and unit rows make for larger gradients


@pytest.mark.parametrize("queries", [2, 3, 128])
def test_attention_is_exact_however_it_is_blocked(model_folder: Path, monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    from evergrad.training import attention

    batch = make_batch(4, groups=3, size=6, system=11)
    expected, _ = reference_gradients(model_folder, batch, "policy_gradient")
    monkeypatch.setattr(attention, "_MAX_QUERIES", queries)
    assert_close(gradients(trainer_for(model_folder), batch, POLICY_GRADIENT)[0], expected)


def test_logits_are_made_in_chunks_without_changing_anything(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evergrad.training import logprobs

    batch = make_batch(4)
    expected, _ = reference_gradients(model_folder, batch, "cross_entropy")
    monkeypatch.setattr(logprobs, "_MAX_LOGITS_BYTES", 3 * 512 * 8)
    assert_close(gradients(trainer_for(model_folder), batch, CROSS_ENTROPY)[0], expected)


def test_sliding_windows_and_untied_heads(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=6, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    batch = make_batch(6)
    expected, _ = reference_gradients(tmp_path, batch, "policy_gradient")
    assert_close(gradients(trainer_for(tmp_path), batch, POLICY_GRADIENT)[0], expected)


def test_attention_biases_train_with_the_rest_and_stay_put_under_lora(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attention_bias=True, mlp_bias=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    batch = make_batch(6)
    expected, _ = reference_gradients(tmp_path, batch, "policy_gradient")
    assert_close(gradients(trainer_for(tmp_path), batch, POLICY_GRADIENT)[0], expected)
    lora = trainer_for(tmp_path, "lora", lora=LoraConfig(rank=2).model_dump())
    assert all("lora" in name for name in lora._parameters)
