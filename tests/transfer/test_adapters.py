"""Merging a PEFT adapter gives what ``peft`` gives, and an adapter that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from evergrad.transfer import TransferError, load_adapter, merged_tensors

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(config)


def peft_adapter(folder: Path, **options: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Saves a randomly filled adapter made by ``peft``; returns the base's state and what ``peft`` merges it to."""
    base = tiny_llama()
    state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return state, model.merge_and_unload().state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.k_proj": 40}},
    ],
)
def test_merging_gives_what_peft_gives(tmp_path: Path, options: dict[str, object]) -> None:
    base, expected = peft_adapter(tmp_path, **options)
    merged = dict(merged_tensors(base, tmp_path))
    assert len(merged) == 2 * len(TARGETS)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
        assert not torch.equal(tensor, base[name])


def test_an_adapter_that_does_not_fit_is_refused_before_the_first_tensor(tmp_path: Path) -> None:
    base, _ = peft_adapter(tmp_path)
    config, tensors = load_adapter(tmp_path)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    renamed = {key.replace("layers.1.mlp", "layers.1.ffn"): tensor for key, tensor in tensors.items()}
    bad = [
        (config, renamed),
        (config, {f"other.{key}": tensor for key, tensor in tensors.items()}),
        (config, {key: tensor for key, tensor in tensors.items() if key != name}),
        (config, tensors | {name: tensors[name][:, :-1]}),
        (config, {}),
        (config | {"use_dora": True}, tensors),
        (config, tensors | {name.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(48)}),
        (config | {"bias": "all"}, tensors),
        (config | {"modules_to_save": ["lm_head"]}, tensors),
    ]
    for adapter in bad:
        with pytest.raises(TransferError):
            merged_tensors(base, adapter)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config)[:-5])
    with pytest.raises(TransferError, match="configuration"):
        merged_tensors(base, tmp_path)


def test_an_adapter_for_another_base_is_refused_though_its_shapes_fit(tmp_path: Path) -> None:
    base, _ = peft_adapter(tmp_path)
    config, tensors = load_adapter(tmp_path)
    named = {**config, "base_model_name_or_path": "/models/theirs"}
    with pytest.raises(TransferError, match="for base 'theirs', not 'ours'"):
        merged_tensors(base, (named, tensors), "/elsewhere/ours")
    for fine in (named, {**config, "base_model_name_or_path": None}):
        assert dict(merged_tensors(base, (fine, tensors), "/elsewhere/theirs"))
