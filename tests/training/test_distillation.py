"""A student that moves to its teacher, also where the teacher reads more than the student."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from evergrad.rollouts import for_teacher, taught
from evergrad.training import LossConfig
from evergrad.training.trainer import Trainer
from evergrad.types import TrainingBatch, TrainingSample
from tests.training.conftest import VOCAB, make_sample
from tests.training.test_every_loss import trainer_for

STUDENT = (11, 12, 13)
TEACHER = (11, 12, 77, 78, 79, 13)
"""The same prompt with a hint in it."""


def answers(tokens: list[int], prompt: tuple[int, ...]) -> list[TrainingSample]:
    return [make_sample(list(prompt), [token], advantages=(0.0,) * (len(prompt) + 1)) for token in tokens]


def distribution(trainer: Trainer, prompt: tuple[int, ...], *, reference: bool = False) -> list[float]:
    """Log-probabilities of every token of the vocabulary after the prompt, nats."""
    return [row[-1] for row in trainer.score(answers(list(range(VOCAB)), prompt), reference=reference)]


def kl(policy: list[float], teacher: list[float]) -> float:
    return math.fsum(math.exp(p) * (p - t) for p, t in zip(policy, teacher, strict=True))


def test_a_student_comes_to_do_without_the_hint_what_it_does_with_it(model_folder: Path) -> None:
    trainer = trainer_for(model_folder, "lora", optimizer={"lr": 0.01})
    draw = random.Random(0)
    teacher = distribution(trainer, TEACHER, reference=True)
    distances = [kl(distribution(trainer, STUDENT), teacher)]
    for _ in range(8):
        policy = distribution(trainer, STUDENT)
        tokens = draw.choices(range(VOCAB), [math.exp(value) for value in policy], k=64)
        samples = tuple(
            replace(sample, logprobs=(0.0,) * len(STUDENT) + (policy[token],), teacher_token_ids=(*TEACHER, token))
            for token, sample in zip(tokens, answers(tokens, STUDENT), strict=True)
        )
        batch = TrainingBatch(samples, len(samples))
        read = for_teacher(samples)
        batch = taught(batch, trainer.score(read, reference=True))
        assert [s.reference_logprobs[-1] for s in batch.samples if s.reference_logprobs] == pytest.approx(
            [teacher[token] for token in tokens], abs=1e-6
        )
        metrics = trainer.step(batch, LossConfig(name="reverse_kl"))
        assert metrics["gradient_tokens"] == len(tokens)
        distances.append(kl(distribution(trainer, STUDENT), teacher))
    assert distances[0] > 0.05
    assert distances[-1] < 0.5 * distances[0]
    assert distribution(trainer, TEACHER, reference=True) == teacher, "the teacher stays where it was"


def test_the_teacher_is_the_student_at_the_beginning_of_the_stage(model_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_for(model_folder, "lora", optimizer={"lr": 0.01})
    learn = TrainingBatch(tuple(answers([5, 6], STUDENT)), 2)
    trainer.step(
        replace(learn, samples=tuple(make_sample(list(STUDENT), [5]) for _ in range(2))), LossConfig(name="cross_entropy")
    )
    trainer.export(tmp_path / "sft")
    trainer.reset(str(tmp_path / "sft"))
    assert distribution(trainer, TEACHER, reference=True) == pytest.approx(distribution(trainer, TEACHER), abs=1e-12)
