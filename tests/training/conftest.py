"""A small model of random weights, and batches whose samples share beginnings as rollouts of a group do."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evergrad.types import TrainingBatch, TrainingSample

VOCAB = 512


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped query heads and tied embeddings, saved as Hugging Face does."""
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w1").save_pretrained(folder)
    return folder


def make_sample(prompt: list[int], answer: list[int], **fields: object) -> TrainingSample:
    """Prompt then answer; every answer token is trained with behaviour logprob −1.5 and advantage 1 unless told."""
    trained = len(answer)
    defaults: dict[str, object] = {
        "token_ids": tuple(prompt + answer),
        "loss_mask": (0,) * len(prompt) + (1,) * trained,
        "logprobs": (0.0,) * len(prompt) + (-1.5,) * trained,
        "advantages": (0.0,) * len(prompt) + (1.0,) * trained,
        "min_policy_version": 0,
        "max_policy_version": 0,
    }
    return TrainingSample(**(defaults | fields))  # type: ignore[arg-type]


def make_batch(seed: int, groups: int = 3, size: int = 4, system: int = 5, **fields: object) -> TrainingBatch:
    """Groups of multi-turn samples: one system prompt for all, one prompt a group, answers that fork late, tool tokens
    between turns that carry no loss, some samples equal, some without advantage."""
    draw = random.Random(seed)
    shared = [draw.randrange(VOCAB) for _ in range(system)]
    samples: list[TrainingSample] = []
    for group in range(groups):
        prompt = shared + [draw.randrange(VOCAB) for _ in range(draw.randint(2, 9))]
        stem = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 6))]
        for member in range(size):
            turn = stem + [draw.randrange(4) for _ in range(draw.randint(1, 8))]
            tool = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 4))]
            last = [draw.randrange(3) for _ in range(draw.randint(1, 5))]
            tokens = prompt + turn + tool + last
            mask = [0] * len(prompt) + [1] * len(turn) + [0] * len(tool) + [1] * len(last)
            advantage = draw.choice([-1.0, -0.25, 0.0, 0.5, 1.0])
            sample = TrainingSample(
                tuple(tokens),
                tuple(mask),
                tuple(m * -draw.uniform(0.1, 8.0) for m in mask),
                tuple(m * advantage for m in mask),
                0,
                0,
                rollout_id=f"r{group}.{member}",
            )
            samples.append(sample)
    samples.append(dataclasses.replace(samples[0], rollout_id="again"))
    return TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))


def unshared(batch: TrainingBatch) -> TrainingBatch:
    """The batch with a first token of its own before each sample, so that none begins as another does."""
    columns = ("loss_mask", "logprobs", "advantages")
    samples = tuple(
        dataclasses.replace(
            sample,
            token_ids=(VOCAB - 1 - number, *sample.token_ids),
            **{name: (type(getattr(sample, name)[0])(0), *getattr(sample, name)) for name in columns},
        )
        for number, sample in enumerate(batch.samples)
    )
    return dataclasses.replace(batch, samples=samples)
