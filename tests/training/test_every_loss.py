"""What holds of every registered loss when the trainer computes it: cuts, masks, references, entropies, odd batches."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad.training import LossConfig, TrainerError
from evergrad.training.logprobs import chosen_logprobs
from evergrad.training.losses import LOSSES
from evergrad.training.trainer import Trainer
from evergrad.types import TrainingBatch, TrainingSample
from tests.training.conftest import make_batch, make_sample
from tests.training.test_gradients import assert_close, gradients, trainer_for

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LOSSES if name != "dr_grpo"},
    "dr_grpo": ("dr_grpo", {"constant_length": 16}),
    "grpo with everything": ("grpo", {"kl_coef": 0.1, "entropy_coef": 0.05, "dual_clip": 3.0}),
    "sequence mask": ("dapo", {"anchor": "proximal", "correction": {"kind": "mask", "level": "sequence", "cap": 1e5}}),
    "dpo with likelihood": ("dpo", {"rpo_alpha": 0.5, "length_normalized": True}),
}


def loss_of(label: str) -> LossConfig:
    name, options = SETTINGS[label]
    return LossConfig(name=name, options=options)


def noisy(values: tuple[float, ...], mask: tuple[int, ...], seed: int) -> tuple[float, ...]:
    draw = random.Random(seed)
    return tuple(value + draw.gauss(0, 0.3) if masked else 0.0 for value, masked in zip(values, mask, strict=True))


def batch_for(label: str, trainer: Trainer, seed: int = 0, groups: int = 4) -> TrainingBatch:
    """Samples whose other policies are near the current one, so that clips are met from both sides; pairs for pair losses."""
    samples = list(make_batch(seed, groups=groups).samples)
    if loss_of(label).build().unit == "pair":
        samples = [
            dataclasses.replace(
                sample, group_id=f"pair-{number // 2}", advantages=tuple(m * (-1.0) ** number for m in sample.loss_mask)
            )
            for number, sample in enumerate(samples[: len(samples) // 2 * 2])
        ]
    # A rollout whose context was rewritten between two turns is two samples, and not neighbours among the leaves.
    samples[2] = dataclasses.replace(samples[2], rollout_id=samples[0].rollout_id)
    scored = trainer.score(samples)
    samples = [
        dataclasses.replace(
            sample,
            logprobs=noisy(values, sample.loss_mask, 3 * i),
            proximal_logprobs=noisy(values, sample.loss_mask, 3 * i + 1),
            reference_logprobs=noisy(values, sample.loss_mask, 3 * i + 2),
        )
        for i, (sample, values) in enumerate(zip(samples, scored, strict=True))
    ]
    return TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))


def parts_of(batch: TrainingBatch, pairs: bool) -> list[TrainingBatch]:
    """Each rollout or pair alone, as one part of the whole."""
    parts: dict[str, list[TrainingSample]] = {}
    for sample in batch.samples:
        parts.setdefault(sample.group_id if pairs else sample.rollout_id, []).append(sample)
    total = sum(any(sample.loss_mask) for sample in batch.samples) if pairs else len(parts)
    return [dataclasses.replace(batch, samples=tuple(part), num_rollouts=total) for part in parts.values()]


@pytest.mark.parametrize("label", SETTINGS)
def test_gradients_do_not_depend_on_the_cut_nor_on_what_is_shared(model_folder: Path, label: str) -> None:
    trainer, loss = trainer_for(model_folder), loss_of(label)
    batch = batch_for(label, trainer)
    whole, metrics = gradients(trainer, batch, loss)
    assert metrics["micro_batches"] == 1
    for size in (1, 60):
        cut, cut_metrics = gradients(trainer_for(model_folder, "full", size), batch, loss)
        assert cut_metrics["micro_batches"] >= (4 if size == 1 else 2)
        assert_close(cut, whole, 1e-6)
        for name in metrics.keys() - {"micro_batches", "trained_tokens"}:
            assert cut_metrics[name] == pytest.approx(metrics[name], abs=1e-6), name
    shuffled = list(batch.samples)
    random.Random(1).shuffle(shuffled)
    assert_close(gradients(trainer, dataclasses.replace(batch, samples=tuple(shuffled)), loss)[0], whole, 1e-12)
    parts = parts_of(batch, loss.build().unit == "pair")
    total = sum(trainer.forward_backward(part, loss)["loss"] for part in parts[:-1])
    alone, last = gradients(trainer, parts[-1], loss)
    assert_close(alone, whole, 1e-6)
    assert total + last["loss"] == pytest.approx(metrics["loss"], abs=1e-6)


SPLIT = {"clip_low": 0.9, "clip_high": 9.0}


@pytest.mark.parametrize(
    ("name", "options"), [("grpo", SPLIT), ("gspo", SPLIT), ("dr_grpo", {**SPLIT, "constant_length": 16}), ("dapo", SPLIT)]
)
def test_a_rollout_counts_once_however_many_samples_it_was_cut_into(
    model_folder: Path, name: str, options: dict[str, Any]
) -> None:
    """The loss of one rollout of two samples (2 and 3 tokens) and one of one sample (2 tokens), written down token by token."""
    trainer = trainer_for(model_folder)
    cut = [make_sample([3, 4], [5, 6], rollout_id="a"), make_sample([9, 9, 8], [7, 6, 5], rollout_id="a")]
    other = make_sample([3, 4], [8, 9], rollout_id="b", advantages=(0.0, 0.0, -0.5, -0.5))
    samples = [cut[0], other, cut[1]]
    scored = zip(samples, trainer.score(samples), strict=True)
    samples = [
        dataclasses.replace(s, logprobs=tuple(v + 0.1 * (i + 1) * m for v, m in zip(values, s.loss_mask, strict=True)))
        for i, (s, values) in enumerate(scored)
    ]
    ratios = [[math.exp(-0.1 * (i + 1))] * sum(sample.loss_mask) for i, sample in enumerate(samples)]
    first, second = [*ratios[0], *ratios[2]], ratios[1]
    expected = {
        "grpo": -(sum(first) / 5 - 0.5 * sum(second) / 2) / 2,
        "gspo": -(math.exp((2 * -0.1 + 3 * -0.3) / 5) - 0.5 * second[0]) / 2,
        "dr_grpo": -(sum(first) - 0.5 * sum(second)) / (2 * 16),
        "dapo": -(sum(first) - 0.5 * sum(second)) / 7,
    }[name]
    batch = TrainingBatch(tuple(samples), 7)
    for size in (1, 4096):
        found = trainer_for(model_folder, micro_batch_tokens=size).forward_backward(
            batch, LossConfig(name=name, options=options)
        )
        assert found["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), 1e6])
@pytest.mark.parametrize("label", SETTINGS)
def test_what_stands_at_masked_positions_leaks_nowhere(model_folder: Path, label: str, poison: float) -> None:
    trainer, loss = trainer_for(model_folder), loss_of(label)
    batch = batch_for(label, trainer, groups=2)
    fields = ("logprobs", "advantages", "reference_logprobs", "proximal_logprobs")

    def poisoned(sample: TrainingSample) -> TrainingSample:
        return dataclasses.replace(
            sample,
            **{f: tuple(v if m else poison for v, m in zip(getattr(sample, f), sample.loss_mask, strict=True)) for f in fields},
        )

    clean, metrics = gradients(trainer, batch, loss)
    dirty, dirty_metrics = gradients(trainer, dataclasses.replace(batch, samples=tuple(map(poisoned, batch.samples))), loss)
    assert_close(dirty, clean, 0.0)
    assert dirty_metrics == metrics


@pytest.mark.parametrize("label", SETTINGS)
def test_odd_batches_leave_finite_weights(model_folder: Path, label: str) -> None:
    """Empty answers and a batch of one; a group that tells nothing apart; a gradient that is not finite."""
    trainer, loss = trainer_for(model_folder, "lora"), loss_of(label)
    batch = batch_for(label, trainer, groups=2)
    rule = loss.build()
    empty = make_sample([3, 4], [], group_id="empty", reference_logprobs=(0.0, 0.0), proximal_logprobs=(0.0, 0.0))
    if rule.unit == "pair":
        with pytest.raises(TrainerError, match="at least one trained token each"):
            trainer.step(dataclasses.replace(batch, samples=(*batch.samples, empty)), loss)
        return
    trained = next(sample for sample in batch.samples if any(sample.advantages))
    alone = trainer.step(TrainingBatch((trained, empty), sum(trained.loss_mask)), loss)
    assert alone["updated"] == 1
    assert trainer.step(TrainingBatch((empty,), 0), loss)["updated"] == 0
    flat = tuple(dataclasses.replace(s, advantages=(0.0,) * len(s.token_ids)) for s in batch.samples)
    metrics = trainer.step(dataclasses.replace(batch, samples=flat), loss)
    assert metrics["updated"] == float(not rule.silent_at_zero)
    trainer.check_finite()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("label", [label for label in SETTINGS if loss_of(label).build().needs_behaviour])
def test_at_zero_learning_rate_the_ratio_is_one(model_folder: Path, label: str, temperature: float) -> None:
    trainer, loss = trainer_for(model_folder), loss_of(label)
    samples = [dataclasses.replace(s, temperature=temperature) for s in batch_for(label, trainer, groups=2).samples]
    scored = trainer.score(samples)
    fresh = tuple(
        dataclasses.replace(s, logprobs=v, reference_logprobs=v, proximal_logprobs=None)
        for s, v in zip(samples, scored, strict=True)
    )
    batch = TrainingBatch(fresh, sum(sum(s.loss_mask) for s in fresh))
    for _ in range(2):  # the second time on weights that a step of length 0 went through
        metrics = trainer.step(batch, loss, lr=0.0)
        assert metrics["ratio_max_error"] < 1e-6
        assert metrics["mismatch_kl"] < 1e-12
        assert metrics["clipped_share"] == 0
        assert metrics.get("correction_mean", 1.0) == pytest.approx(1.0, abs=1e-6)
        assert metrics.get("reference_kl", 0.0) == pytest.approx(0.0, abs=1e-9)


# ── Entropies ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [(24 * 2**20, 256 * 2**20), (3 * 11 * 8, 256 * 2**20), (3 * 11 * 8, 0)])
def test_entropies_are_those_of_torch_with_their_gradients(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]) -> None:
    from evergrad.training import logprobs

    monkeypatch.setattr(logprobs, "_MAX_LOGITS_BYTES", limits[0])
    monkeypatch.setattr(logprobs, "_MAX_KEPT_BYTES", limits[1])
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

    hidden, weight, bias = normal(7, 5), normal(11, 5), normal(11)
    temperatures = torch.tensor([1.0, 0.6, 1.3, 1.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    rows, targets = torch.tensor([0, 0, 1, 3, 6, 6, 6]), torch.tensor([1, 10, 0, 4, 2, 3, 4])
    pair_weights, row_weights = normal(7).detach(), normal(7).detach()
    found, entropies = chosen_logprobs(hidden, weight, bias, temperatures, rows, targets, entropies=True)
    assert entropies is not None
    every = torch.log_softmax((hidden @ weight.t() + bias) / temperatures[:, None], -1)
    expected, expected_entropies = every[rows, targets], torch.distributions.Categorical(logits=every).entropy()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropies, expected_entropies)
    values = [hidden, weight, bias]
    for weights in ((pair_weights, row_weights), (0 * pair_weights, row_weights)):
        ours, theirs = (
            (weights[0] * logprob).sum() + (weights[1] * entropy).sum()
            for logprob, entropy in ((found, entropies), (expected, expected_entropies))
        )
        for one, other in zip(
            torch.autograd.grad(ours, values), torch.autograd.grad(theirs, values, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(one, other)
        found, entropies = chosen_logprobs(hidden, weight, bias, temperatures, rows, targets, entropies=True)
        assert entropies is not None


def test_the_entropy_of_a_certain_token_is_zero() -> None:
    weight = torch.tensor([[1e4], [0.0], [-1e4]], requires_grad=True)
    _, entropies = chosen_logprobs(
        torch.ones(1, 1), weight, None, torch.ones(1), torch.tensor([0]), torch.tensor([0]), entropies=True
    )
    assert entropies is not None
    assert entropies.tolist() == [0.0]
    entropies.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0.0


# ── References ───────────────────────────────────────────────────────────────────────────────────────────────────────────

KL = LossConfig(options={"kl_coef": 1.0})


def plain_batch(seed: int = 0, advantage: float = 0.0) -> TrainingBatch:
    batch = make_batch(seed, groups=2)
    samples = tuple(dataclasses.replace(s, advantages=tuple(m * advantage for m in s.loss_mask)) for s in batch.samples)
    return dataclasses.replace(batch, samples=samples)


def on_policy(trainer: Trainer, batch: TrainingBatch) -> TrainingBatch:
    scored = zip(batch.samples, trainer.score(batch.samples), strict=True)
    return dataclasses.replace(batch, samples=tuple(dataclasses.replace(s, logprobs=v) for s, v in scored))


@pytest.mark.parametrize("micro_batch_tokens", [4096, 30])
def test_the_reference_of_a_lora_is_the_model_without_it(model_folder: Path, micro_batch_tokens: int) -> None:
    trainer = trainer_for(model_folder, "lora", micro_batch_tokens)
    batch = on_policy(trainer, plain_batch())
    base = trainer_for(model_folder, "full").score(batch.samples)
    reference = trainer.score(batch.samples, reference=True)
    assert reference == [pytest.approx(values, abs=1e-9) for values in base]
    assert trainer.score(batch.samples) != reference
    computed, metrics = gradients(trainer, batch, KL)
    samples = tuple(dataclasses.replace(s, reference_logprobs=v) for s, v in zip(batch.samples, base, strict=True))
    given, given_metrics = gradients(trainer, dataclasses.replace(batch, samples=samples), KL)
    assert_close(computed, given, 1e-9)
    assert metrics["reference_kl"] == pytest.approx(given_metrics["reference_kl"], abs=1e-9)
    assert metrics["reference_kl"] > 0.001


def test_started_from_an_adapter_that_adapter_is_the_reference_and_kl_pulls_back_to_it(
    model_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_for(model_folder, "lora", optimizer={"lr": 0.01})
    trainer.export(tmp_path / "start")
    trainer.reset(str(tmp_path / "start"))
    batch = plain_batch(1)
    assert trainer.step(on_policy(trainer, batch), KL, lr=0.0)["reference_kl"] == pytest.approx(0.0, abs=1e-12)
    for _ in range(3):
        trainer.step(plain_batch(1, advantage=1.0), LossConfig(name="cross_entropy"))
    trainer.save(tmp_path / "checkpoint")
    away = [trainer.step(on_policy(trainer, batch), KL)["reference_kl"] for _ in range(12)]
    assert away[0] > 0.01
    assert away[-1] < 0.5 * away[0]
    resumed = trainer_for(model_folder, "lora", optimizer={"lr": 0.01})
    resumed.load(tmp_path / "checkpoint")
    assert [resumed.step(on_policy(resumed, batch), KL)["reference_kl"] for _ in range(12)] == away
    resumed.reset()
    assert resumed.step(on_policy(resumed, batch), KL, lr=0.0)["reference_kl"] == pytest.approx(0.0, abs=1e-12)


def test_full_fine_tuning_takes_its_reference_from_the_samples(model_folder: Path) -> None:
    trainer = trainer_for(model_folder, "full", optimizer={"lr": 0.01})
    batch = plain_batch()
    with pytest.raises(TrainerError, match=r"full fine-tuning does not keep.*Trainer\.score"):
        trainer.step(batch, KL)
    with pytest.raises(TrainerError, match="keeps no reference"):
        trainer.score(batch.samples, reference=True)
    scored = zip(batch.samples, trainer.score(batch.samples), strict=True)
    samples = tuple(dataclasses.replace(s, reference_logprobs=v) for s, v in scored)
    batch = dataclasses.replace(batch, samples=samples)
    assert trainer.step(on_policy(trainer, batch), KL, lr=0.0)["reference_kl"] == pytest.approx(0.0, abs=1e-12)
    for sample, values in zip(batch.samples, trainer.score(batch.samples), strict=True):
        assert [v for v, m in zip(values, sample.loss_mask, strict=True) if not m] == [0.0] * sample.loss_mask.count(0)
        alone = trainer.logprobs(sample.token_ids)
        assert [v for v, m in zip(values, sample.loss_mask, strict=True) if m] == pytest.approx(
            [v for v, m in zip(alone, sample.loss_mask[1:], strict=True) if m], abs=1e-9
        )


# ── Learning and refusals ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("label", [label for label in SETTINGS if loss_of(label).build().unit == "pair"])
def test_preferences_are_learned(model_folder: Path, label: str) -> None:
    trainer = trainer_for(model_folder, "lora", optimizer={"lr": 0.01})
    batch = batch_for(label, trainer, seed=5)
    samples = tuple(dataclasses.replace(s, reference_logprobs=None) for s in batch.samples)
    batch = dataclasses.replace(batch, samples=samples)
    steps = [trainer.step(batch, loss_of(label)) for _ in range(10)]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["margin"] > steps[0]["margin"]
    assert steps[-1]["pair_accuracy"] > 0.8


def test_a_student_approaches_its_teacher(model_folder: Path) -> None:
    student, teacher = (trainer_for(model_folder, "lora", optimizer={"lr": 0.01}) for _ in range(2))
    for _ in range(4):
        teacher.step(plain_batch(2, advantage=1.0), LossConfig(name="cross_entropy"))
    distances = []
    for _ in range(10):
        batch = on_policy(student, plain_batch(2))
        scored = zip(batch.samples, teacher.score(batch.samples), strict=True)
        samples = tuple(dataclasses.replace(s, reference_logprobs=v) for s, v in scored)
        distances.append(student.step(dataclasses.replace(batch, samples=samples), LossConfig(name="reverse_kl"))["loss"])
    assert distances[-1] < 0.5 * distances[0]


def refused(trainer: Trainer, loss: str, message: str, samples: list[TrainingSample], **fields: Any) -> None:
    batch = TrainingBatch(tuple(samples), sum(sum(s.loss_mask) for s in samples), **fields)
    with pytest.raises(TrainerError, match=message):
        trainer.forward_backward(batch, LossConfig(name=loss))


def test_batches_that_make_no_sense_are_refused_by_name(model_folder: Path) -> None:
    trainer = trainer_for(model_folder, "lora")
    one = make_sample([3, 4], [5], group_id="p1")
    bad = dataclasses.replace(one, advantages=(0.0, 0.0, -1.0))
    mixed = make_sample([3, 4], [5, 6], group_id="p1", advantages=(0.0, 0.0, 1.0, -1.0))
    for samples in ([one], [one, one], [one, bad, bad], [mixed], [mixed, bad], [dataclasses.replace(one, group_id=""), bad]):
        refused(trainer, "dpo", "preference pair", samples)
    refused(trainer, "reverse_kl", "learns from a teacher", [one])
    having = dataclasses.replace(one, reference_logprobs=(0.0, 0.0, -1.0), proximal_logprobs=(0.0, 0.0, -1.0))
    refused(trainer, "reverse_kl", "1 of 2 samples have no reference_logprobs", [one, having])
    refused(trainer, "decoupled_ppo", "1 of 2 samples have no proximal_logprobs", [one, having])
    broken = dataclasses.replace(having, reference_logprobs=(0.0, 0.0, math.nan))
    refused(trainer, "reverse_kl", "position 2: reference_logprobs is not finite", [broken])
    refused(trainer, "reverse_kl", "differ in length", [dataclasses.replace(having, reference_logprobs=(0.0,))])
    refused(trainer, "grpo", "2 rollouts carry a loss, but num_rollouts is 1", [one, bad], num_rollouts=1)


def test_pairs_stay_in_one_micro_batch_and_are_swapped_without_effect(model_folder: Path) -> None:
    trainer = trainer_for(model_folder, "lora", micro_batch_tokens=1)
    batch = batch_for("dpo", trainer)
    found, metrics = gradients(trainer, batch, loss_of("dpo"))
    assert metrics["micro_batches"] == len(batch.samples) / 2
    swapped = dataclasses.replace(batch, samples=batch.samples[::-1])
    assert_close(gradients(trainer, swapped, loss_of("dpo"))[0], found, 1e-12)
