"""Models beside Llama: grouped heads with biases, norms on queries and keys, windows, wide norms, heads that are not tied."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evergrad.training import LossConfig
from evergrad.training.trainer import Trainer
from tests.training.conftest import make_batch
from tests.training.test_gradients import assert_close, gradients, reference_gradients, trainer_for
from tests.training.test_ranks import config_of, gradient

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3, tied, wide heads": (Qwen3ForCausalLM, Qwen3Config(**{**SIZES, "tie_word_embeddings": True}, head_dim=16)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=8, sliding_window=6)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    ),
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Random weights, of norms and biases too, which a fresh model leaves at 1 and 0."""
    family, config = FAMILIES[request.param]
    torch.manual_seed(1)
    model = family(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("micro_batch_tokens", [40, 4096])
def test_gradients_equal_plain_transformers(folder: Path, micro_batch_tokens: int) -> None:
    batch = make_batch(6)
    expected, total = reference_gradients(folder, batch, "policy_gradient")
    found, metrics = gradients(trainer_for(folder, "full", micro_batch_tokens), batch, LossConfig())
    largest = max(float(each.abs().max()) for each in expected.values())
    # Norms and rotary angles are float32 in transformers whatever the model's dtype is.
    assert_close(found, expected, 1e-6 * max(1.0, largest))
    assert metrics["loss"] == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert metrics["trained_tokens"] < metrics["batch_tokens"]


SPLIT = [
    ("full", 2, "qwen3, tied, wide heads"),
    *(pytest.param("full", 2, family, marks=pytest.mark.slow) for family in ("qwen2", "gemma3")),
    pytest.param("lora", 4, "qwen3, tied, wide heads", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "count", "folder"), SPLIT, indirect=["folder"])
def test_ranks_that_split_the_layers_give_the_gradient_of_one(folder: Path, tmp_path: Path, method: str, count: int) -> None:
    """Also of a norm that each rank applies to its own heads, and over several micro-batches."""
    found = []
    for ranks, tensor_parallel in ((1, 1), (count, 2)):
        with closing(Trainer(config_of(folder, method, ranks, tensor_parallel, critic=None))) as trainer:
            metrics = trainer.step(make_batch(0), LossConfig())
            found.append(gradient(trainer, tmp_path / f"{ranks}"))
        assert metrics["micro_batches"] > 2
    assert found[0].keys() == found[1].keys()
    largest = max(float(each.abs().max()) for each in found[0].values())
    for name, expected in found[0].items():
        assert float((found[1][name] - expected).abs().max()) <= 1e-6 * largest, name


@pytest.mark.parametrize("kind", [{}, {"dora": True, "rank": 3}], ids=["lora", "dora"])
def test_an_adapter_merges_into_what_base_and_adapter_are(folder: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    from peft import PeftModel

    trainer, token_ids = trainer_for(folder, "lora", lora=kind, optimizer={"lr": 0.01}), tuple(range(40, 60))
    before = torch.tensor(trainer.logprobs(token_ids))
    for seed in range(2):
        trainer.step(make_batch(seed), LossConfig(name="cross_entropy"))
    trainer.export(tmp_path / "v1")
    learned = torch.tensor(trainer.logprobs(token_ids))
    assert (learned - before).abs().max() > 0.01

    def logprobs(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            rows = torch.log_softmax(model(input_ids=torch.tensor([token_ids])).logits[0, :-1], -1)
        return rows.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1).to(learned)

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    merged = dict(trainer.named_weights())
    adapted = PeftModel.from_pretrained(base, tmp_path / "v1", autocast_adapter_dtype=False)
    torch.testing.assert_close(logprobs(adapted), learned, rtol=0, atol=1e-5)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    assert not again.load_state_dict(merged, strict=False).unexpected_keys
    torch.testing.assert_close(logprobs(again), learned, rtol=0, atol=1e-5)
