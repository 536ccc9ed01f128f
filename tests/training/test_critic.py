"""The critic: its loss against a plain reference, its gradient that stays its own, exact resumption, and that it learns."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from evergrad.training import LossConfig, TrainerError, UpdatesConfig
from evergrad.training.ranks import Ranks
from evergrad.training.trainer import Trainer
from evergrad.types import TrainingBatch, TrainingSample
from tests.training.conftest import make_batch, make_sample
from tests.training.test_gradients import assert_close, trainer_for
from tests.training.test_trainer import equal, new_trainer, weights

PPO = LossConfig(name="ppo", options={"anchor": "proximal", "correction": {"cap": 2.0}})
CRITIC = {"hidden": 16, "lr": 0.02, "clip": 0.2}


def appraised(trainer: Trainer, batch: TrainingBatch, seed: int = 0) -> TrainingBatch:
    """Returns that differ from token to token; old values near the critic's, so that the clip is met from both sides."""
    draw = random.Random(seed)
    _, values = trainer.values(batch.samples)
    samples = (
        dataclasses.replace(
            sample,
            values=tuple(v + draw.gauss(0, 0.4) for v in row),
            returns=tuple(draw.gauss(0.3, 1.0) for _ in row),
        )
        for sample, row in zip(batch.samples, values, strict=True)
    )
    return dataclasses.replace(batch, samples=tuple(samples))


def moved(trainer: Trainer, seed: int = 3) -> Trainer:
    """A critic that says something: its last layer starts at zero."""
    assert trainer._critic is not None
    with torch.no_grad():
        trainer._critic._parameters["2.weight"].normal_(generator=torch.Generator().manual_seed(seed))
    return trainer


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 4096])
def test_the_gradient_is_that_of_a_plain_value_loss_on_states_of_plain_transformers(
    model_folder: Path, micro_batch_tokens: int
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = moved(trainer_for(model_folder, micro_batch_tokens=micro_batch_tokens, critic=CRITIC))
    batch = appraised(trainer, make_batch(1))
    critic = trainer._critic
    assert critic is not None
    trainer.forward_backward(batch, PPO)
    found = {name: parameter.grad.clone() for name, parameter in critic._parameters.items() if parameter.grad is not None}

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    layers = {name: parameter.detach().clone().requires_grad_() for name, parameter in critic._parameters.items()}
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch.samples:
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([sample.token_ids])).last_hidden_state[0]
        inner = torch.nn.functional.silu(states @ layers["0.weight"].t() + layers["0.bias"])
        values = (inner @ layers["2.weight"].t() + layers["2.bias"])[:, 0]
        assert sample.values is not None
        assert sample.returns is not None
        for place in range(1, len(sample.token_ids)):
            if sample.loss_mask[place]:
                value, old, goal = values[place - 1], sample.values[place], sample.returns[place]
                near = torch.clamp(value, old - 0.2, old + 0.2)
                total = total + 0.5 * torch.maximum((value - goal) ** 2, (near - goal) ** 2) / batch.num_valid_tokens
    total.backward()  # type: ignore[no-untyped-call]
    assert_close(found, {name: parameter.grad for name, parameter in layers.items() if parameter.grad is not None}, 1e-6)
    assert critic.optim_step(Ranks())["value_loss"] == pytest.approx(total.item(), abs=1e-6)


def test_the_policy_moves_as_if_there_were_no_critic(model_folder: Path) -> None:
    """With and without: equal weights, bit for bit, when every token has an advantage; and exports hold no critic."""
    ours, plain = new_trainer(model_folder, critic=CRITIC), new_trainer(model_folder)
    for seed in range(3):
        samples = tuple(
            dataclasses.replace(s, advantages=tuple(0.5 * m for m in s.loss_mask)) for s in make_batch(seed).samples
        )
        batch = dataclasses.replace(make_batch(seed), samples=samples)
        plain.step(batch, PPO)
        assert ours.step(appraised(ours, batch, seed), PPO)["value_loss"] > 0
    assert equal(weights(ours), weights(plain))
    assert ours.layout().keys() == plain.layout().keys()


def test_what_the_critic_says_stands_before_each_trained_token(model_folder: Path) -> None:
    trainer = moved(trainer_for(model_folder, critic=CRITIC))
    long = make_sample([3, 4], [5, 6, 7])
    short = make_sample([3, 4], [9])
    logprobs, values = trainer.values([long, short, make_sample([3, 4], [])])
    assert logprobs == trainer.score([long, short, make_sample([3, 4], [])])
    assert values[0][:2] == (0.0, 0.0)
    assert values[0][2] == values[1][2] != 0.0  # of the state after [3, 4], whatever comes next
    assert len({*values[0][2:]}) == 3
    assert values[2] == (0.0, 0.0)
    with pytest.raises(TrainerError, match="no critic"):
        trainer_for(model_folder).values([long])


@pytest.mark.parametrize("stop", [1, 2])
def test_resuming_ends_in_the_same_bits(model_folder: Path, tmp_path: Path, stop: int) -> None:
    updates = UpdatesConfig(epochs=2, mini_batches=2)

    def go_on(trainer: Trainer, seeds: range) -> None:
        for seed in seeds:
            trainer.step(appraised(trainer, make_batch(seed), seed), PPO, updates=updates)

    straight, first, second = (new_trainer(model_folder, critic=CRITIC) for _ in range(3))
    go_on(straight, range(3))
    go_on(first, range(stop))
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    go_on(second, range(stop, 3))
    assert equal(weights(second), weights(straight))
    assert straight._critic is not None
    assert second._critic is not None
    assert equal(second._critic.state(), straight._critic.state())
    assert any(name.startswith("optimizer:") for name in straight._critic.state())
    for settings in ({}, {"critic": {"hidden": 8}}):
        with pytest.raises(TrainerError, match="critic differ"):
            new_trainer(model_folder, **settings).load(tmp_path / "checkpoint")
    second.reset()
    assert equal(second._critic.state(), new_trainer(model_folder, critic=CRITIC)._critic.state())  # type: ignore[union-attr]


def test_it_learns_what_can_be_told_from_the_context(model_folder: Path) -> None:
    """The reward is whether the prompt's last token is below 256; from the first token of the answer that is known."""
    trainer = new_trainer(model_folder, critic={"hidden": 64, "lr": 0.01, "clip": 1.0})
    draw, heard = random.Random(0), []
    for _ in range(40):
        samples: list[TrainingSample] = []
        for number in range(32):
            prompt = [draw.randrange(512) for _ in range(3)] + [draw.choice([7, 300])]
            answer = [draw.randrange(512) for _ in range(3)]
            reward = float(prompt[-1] < 256)
            plain = make_sample(prompt, answer, rollout_id=str(number), advantages=(0.0,) * 7)
            samples.append(dataclasses.replace(plain, returns=tuple(reward * m for m in plain.loss_mask)))
        _, values = trainer.values(samples)
        known = tuple(dataclasses.replace(s, values=v) for s, v in zip(samples, values, strict=True))
        heard.append(trainer.step(TrainingBatch(known, 96), PPO, updates=UpdatesConfig(epochs=2))["explained_variance"])
    assert abs(heard[0]) < 0.3
    assert sum(heard[-5:]) / 5 > 0.5


def test_returns_without_a_critic_or_without_values_are_refused(model_folder: Path) -> None:
    sample = dataclasses.replace(make_sample([3, 4], [5]), returns=(0.0, 0.0, 1.0))
    with pytest.raises(TrainerError, match="the trainer has none"):
        new_trainer(model_folder).step(TrainingBatch((sample,), 1), PPO)
    trainer = new_trainer(model_folder, critic=CRITIC)
    with pytest.raises(TrainerError, match="have no values"):
        trainer.step(TrainingBatch((sample,), 1), PPO)
    broken = dataclasses.replace(sample, values=(0.0, 0.0, float("nan")))
    with pytest.raises(TrainerError, match="values is not finite"):
        trainer.step(TrainingBatch((broken,), 1), PPO)
    before = trainer._critic.state() if trainer._critic else {}
    assert "value_loss" not in trainer.step(make_batch(0), LossConfig(name="cross_entropy"))
    assert trainer._critic is not None
    assert equal(trainer._critic.state(), before)


def test_a_critic_that_is_skipped_says_nothing_of_the_policy(model_folder: Path) -> None:
    trainer = new_trainer(model_folder, critic=CRITIC)
    absurd = make_sample([3, 4], [5], returns=(0.0, 0.0, 1e30), values=(0.0, 0.0, 0.0))
    figures = trainer.step(TrainingBatch((absurd,), 1), PPO)
    assert (figures["updated"], figures["skipped_nonfinite"], figures["critic_skipped"]) == (1, 0, 1)
