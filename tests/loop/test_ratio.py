"""What the engine says of its tokens is what the trainer says of them, at any temperature that rollouts may have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evergrad.inference import EngineConfig
from evergrad.inference.engine import Engine, Request
from evergrad.training import LossConfig, TrainerConfig
from evergrad.training.trainer import Trainer
from evergrad.types import Sampling, TrainingBatch, TrainingSample
from tests.inference.conftest import finish, make_model, prompt_of

GROUP = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "small", seed=3)


def rolled_out(folder: Path, temperature: float) -> TrainingBatch:
    """Groups as the engine samples them: one prompt each, shared beginnings, a third of each prompt common to all."""
    engine = Engine(EngineConfig(model=str(folder), device="cpu", kv_cache_tokens=4096))
    prompts = [(*prompt_of(12), *prompt_of(24, seed=number)) for number in range(3)]
    sampling = Sampling(temperature=temperature, max_tokens=24, seed=5)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), prompt, sampling, n=GROUP))
    samples = []
    for (name, index), done in finish(engine).items():
        prompt, count = prompts[int(name)], len(done.token_ids)
        before = (0.0,) * len(prompt)
        samples.append(
            TrainingSample(
                token_ids=(*prompt, *done.token_ids),
                loss_mask=(0,) * len(prompt) + (1,) * count,
                logprobs=(*before, *done.logprobs),
                advantages=(*before, *(1.0 - index,) * count),
                min_policy_version=0,
                max_policy_version=0,
                temperature=temperature,
                rollout_id=f"{name}/{index}",
                group_id=name,
            )
        )
    return TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_at_zero_learning_rate_the_ratio_to_the_engine_is_one(model: Path, temperature: float) -> None:
    batch = rolled_out(model, temperature)
    assert len({sample.token_ids for sample in batch.samples}) > len(batch.samples) / 2
    for method in ("lora", "full"):
        trainer = Trainer(TrainerConfig.model_validate({"model": str(model), "method": method, "device": "cpu"}))
        for _ in range(2):  # the second time on weights that a step of length 0 went through
            metrics = trainer.step(batch, LossConfig(), lr=0.0)
            assert metrics["updated"] == 1
            assert metrics["ratio_max_error"] < 1e-3
            assert metrics["mismatch_kl"] < 1e-6
            assert metrics["clipped_share"] == 0


def test_another_temperature_is_noticed(model: Path) -> None:
    """The check above could fail: scored under another temperature the ratios are far from 1."""
    batch = rolled_out(model, 0.6)
    cold = replace(batch, samples=tuple(replace(sample, temperature=1.0) for sample in batch.samples))
    trainer = Trainer(TrainerConfig.model_validate({"model": str(model), "device": "cpu"}))
    assert trainer.step(cold, LossConfig(), lr=0.0)["ratio_max_error"] > 0.1
