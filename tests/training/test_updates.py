"""Several updates on one batch: what each is made on, what they take their ratio to, and that they repeat bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evergrad.training import LossConfig, TrainerError, UpdatesConfig
from evergrad.training.trainer import Trainer
from evergrad.training.updates import mini_batches
from evergrad.types import TrainingBatch
from tests.training.conftest import make_batch, make_sample
from tests.training.test_gradients import assert_close
from tests.training.test_trainer import equal, new_trainer, weights

PROXIMAL_PPO = LossConfig(name="ppo", options={"anchor": "proximal", "correction": {"cap": 2.0}})


def grouped(seed: int, groups: int = 4) -> TrainingBatch:
    batch = make_batch(seed, groups=groups)
    samples = (dataclasses.replace(each, group_id=each.rollout_id.split(".")[0]) for each in batch.samples[:-1])
    return whole(*samples)


def whole(*samples: object) -> TrainingBatch:
    return TrainingBatch(samples, sum(sum(each.loss_mask) for each in samples))  # type: ignore[attr-defined,arg-type]


@given(groups=st.integers(1, 6), count=st.integers(1, 8), epochs=st.integers(1, 3), seed=st.integers(0, 3))
def test_each_epoch_has_every_group_once_and_whole(groups: int, count: int, epochs: int, seed: int) -> None:
    batch = grouped(seed, groups)
    parts = mini_batches(batch, UpdatesConfig(epochs=epochs, mini_batches=count), str(seed))
    per_epoch = len(parts) // epochs
    assert per_epoch == min(count, groups)
    for epoch in range(epochs):
        dealt = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        names = [{each.group_id for each in part.samples} for part in dealt]
        assert sum(map(len, names)) == len(set().union(*names)) == groups
        assert max(map(len, names)) - min(map(len, names)) <= 1
        assert sorted(id(each) for part in dealt for each in part.samples) == sorted(map(id, batch.samples))
        assert [part.num_valid_tokens for part in dealt] == [sum(sum(s.loss_mask) for s in part.samples) for part in dealt]


def test_epochs_differ_in_their_order_and_a_seed_gives_the_same() -> None:
    batch, settings = grouped(0, 6), UpdatesConfig(epochs=2, mini_batches=3)
    parts = mini_batches(batch, settings, "7")
    names = [[each.group_id for each in part.samples] for part in parts]
    assert names[:3] != names[3:]
    assert [part.samples for part in mini_batches(batch, settings, "7")] == [part.samples for part in parts]
    assert [part.samples for part in mini_batches(batch, settings, "8")] != [part.samples for part in parts]


def anchored(trainer: Trainer, batch: TrainingBatch) -> TrainingBatch:
    scored = zip(batch.samples, trainer.score(batch.samples), strict=True)
    samples = tuple(dataclasses.replace(each, proximal_logprobs=values) for each, values in scored)
    return dataclasses.replace(batch, samples=samples)


@pytest.mark.parametrize("loss", [PROXIMAL_PPO, LossConfig(name="decoupled_ppo"), LossConfig(name="policy_gradient")])
@pytest.mark.parametrize("micro_batch_tokens", [40, 4096])
def test_several_updates_are_single_ones_with_the_policy_before_them_as_proximal(
    model_folder: Path, loss: LossConfig, micro_batch_tokens: int
) -> None:
    at_once, by_hand = (new_trainer(model_folder, micro_batch_tokens=micro_batch_tokens, dtype="float64") for _ in range(2))
    for seed in range(2):  # the second batch starts from weights that have moved
        batch, settings = grouped(seed), UpdatesConfig(epochs=2, mini_batches=2)
        parts = mini_batches(batch, settings, f"0/{at_once.updates}")
        figures = at_once.step(batch, loss, updates=settings)
        given = {id(old): new for old, new in zip(batch.samples, anchored(by_hand, batch).samples, strict=True)}
        alone = [
            by_hand.step(dataclasses.replace(part, samples=tuple(given[id(each)] for each in part.samples)), loss)
            for part in parts
        ]
        assert figures["updated"] == 4
        assert figures["gradient_tokens"] == sum(each["gradient_tokens"] for each in alone)
        assert figures["valid_tokens"] == batch.num_valid_tokens
        assert figures["grad_norm"] == pytest.approx(max(each["grad_norm"] for each in alone), abs=1e-9)
        assert figures["loss"] == pytest.approx(sum(each["loss"] for each in alone) / 4, abs=1e-9)
    assert_close(weights(at_once), weights(by_hand), 1e-9)
    assert at_once.updates == by_hand.updates == 8


def test_the_second_epoch_is_clipped_where_a_fresh_anchor_never_clips(model_folder: Path) -> None:
    trainer, batch = new_trainer(model_folder), grouped(3)
    samples = zip(batch.samples, trainer.score(batch.samples), strict=True)
    batch = whole(*(dataclasses.replace(each, logprobs=values) for each, values in samples))
    assert trainer.step(batch, PROXIMAL_PPO, lr=0.0)["clipped_share"] == 0
    assert trainer.step(batch, PROXIMAL_PPO, lr=0.05, updates=UpdatesConfig(epochs=6))["clipped_share"] > 0.05


@pytest.mark.parametrize("stop", [1, 2])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_resumed_trainer_deals_the_same_mini_batches(model_folder: Path, tmp_path: Path, method: str, stop: int) -> None:
    batches, settings = [grouped(seed) for seed in range(3)], UpdatesConfig(epochs=2, mini_batches=3)
    straight, first, second = (new_trainer(model_folder, method) for _ in range(3))
    for batch in batches:
        straight.step(batch, PROXIMAL_PPO, updates=settings)
    for batch in batches[:stop]:
        first.step(batch, PROXIMAL_PPO, updates=settings)
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    for batch in batches[stop:]:
        second.step(batch, PROXIMAL_PPO, updates=settings)
    assert equal(weights(second), weights(straight))
    assert second.updates == straight.updates == 18


def test_what_cannot_be_trained_on_is_refused_before_the_first_update(model_folder: Path) -> None:
    trainer = new_trainer(model_folder)
    before = weights(trainer)
    good, bad = make_sample([3, 4], [5]), make_sample([3, 4], [6], advantages=(0.0, 0.0, float("nan")))
    with pytest.raises(TrainerError, match="advantages is not finite"):
        trainer.step(whole(good, good, good, bad), LossConfig(), updates=UpdatesConfig(mini_batches=4))
    for part in (TrainingBatch((good,), 5), TrainingBatch((good,), 1, num_rollouts=3)):
        with pytest.raises(TrainerError, match="a part of a batch cannot be cut"):
            trainer.step(part, LossConfig(), updates=UpdatesConfig(mini_batches=2))
    assert equal(weights(trainer), before)


def test_an_update_that_is_not_finite_is_left_out_and_counted(model_folder: Path) -> None:
    trainer = new_trainer(model_folder)
    absurd = make_sample([3, 4], [5], advantages=(0.0, 0.0, 3e38), rollout_id="absurd")
    figures = trainer.step(whole(make_sample([3, 4], [6]), absurd), LossConfig(), updates=UpdatesConfig(mini_batches=2))
    assert (figures["updated"], figures["skipped_nonfinite"], trainer.updates) == (1, 1, 1)
    assert all(bool(torch.isfinite(each).all()) for each in weights(trainer).values())
    assert trainer.step(TrainingBatch((), 0), LossConfig(), updates=UpdatesConfig(epochs=2, mini_batches=2))["updated"] == 0
