"""Steps, exports, refusals and exact resumption of a trainer in this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from evergrad.training import LossConfig, TrainerConfig, TrainerError
from evergrad.training.trainer import Trainer
from evergrad.transfer import SlotPublisher, TransferError, load_tensors, merged_tensors
from evergrad.types import EvergradError, TrainingBatch
from tests.training.conftest import make_batch, make_sample

CROSS_ENTROPY = LossConfig(name="cross_entropy")
METHODS = ["lora", "full"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_trainer(folder: Path, method: str = "lora", **fields: object) -> Trainer:
    return Trainer(TrainerConfig.model_validate({"model": str(folder), "method": method, "optimizer": {"lr": 0.01}, **fields}))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("method", METHODS)
def test_steps_learn(model_folder: Path, method: str) -> None:
    trainer, batch = new_trainer(model_folder, method), make_batch(0)
    losses = [trainer.step(batch, CROSS_ENTROPY)["loss"] for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    assert trainer.updates == 8


def test_advantage_decides_the_direction(model_folder: Path) -> None:
    trainer = new_trainer(model_folder)
    before = trainer.logprobs((3, 4, 5))[-1], trainer.logprobs((3, 4, 6))[-1]
    good = make_sample([3, 4], [5], logprobs=(0.0, 0.0, before[0]))
    bad = make_sample([3, 4], [6], logprobs=(0.0, 0.0, before[1]), advantages=(0.0, 0.0, -1.0))
    for _ in range(3):
        trainer.step(TrainingBatch((good, bad), 2), LossConfig())
    after = trainer.logprobs((3, 4, 5))[-1], trainer.logprobs((3, 4, 6))[-1]
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("method", METHODS)
def test_at_zero_learning_rate_the_ratio_is_one_and_nothing_moves(model_folder: Path, temperature: float, method: str) -> None:
    """Behaviour log-probabilities come from transformers, one sample at a time, under the sampling temperature."""
    trainer = new_trainer(model_folder, method)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    samples = []
    for sample in make_batch(5).samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0] / temperature
        rows = torch.log_softmax(logits, -1)
        logprobs = [0.0] + [rows[i - 1, token].item() for i, token in enumerate(sample.token_ids) if i]
        samples.append(dataclasses.replace(sample, logprobs=tuple(logprobs), temperature=temperature))
    batch = TrainingBatch(tuple(samples), sum(sum(s.loss_mask) for s in samples))
    before = weights(trainer)
    metrics = trainer.step(batch, LossConfig(), lr=0.0)
    assert metrics["ratio_max_error"] < 1e-3
    assert abs(metrics["ratio_mean"] - 1) < 1e-4
    assert metrics["mismatch_kl"] < 1e-6
    assert metrics["clipped_share"] == 0
    assert metrics["updated"] == 1
    assert equal(weights(trainer), before)


def test_a_gradient_that_is_not_finite_is_skipped_and_named(model_folder: Path) -> None:
    trainer = new_trainer(model_folder)
    trainer.step(make_batch(0), LossConfig())
    before, state = weights(trainer), {k: v["exp_avg"].clone() for k, v in trainer._optimizer.state.items()}
    absurd = make_sample([3, 4], [5], advantages=(0.0, 0.0, 3e38))
    metrics = trainer.step(TrainingBatch((absurd,), 1), LossConfig())
    assert (metrics["skipped_nonfinite"], metrics["updated"]) == (1, 0)
    assert equal(weights(trainer), before)
    assert all(torch.equal(state[k], v["exp_avg"]) for k, v in trainer._optimizer.state.items())
    assert trainer.step(make_batch(1), LossConfig())["skipped_nonfinite"] == 0  # and it goes on
    trainer.check_finite()


@pytest.mark.parametrize(
    ("fields", "valid", "message"),
    [
        ({"logprobs": (0.0, 0.0, float("nan"))}, 1, "position 2: logprobs is not finite"),
        ({"advantages": (0.0, 0.0, float("inf"))}, 1, "position 2: advantages is not finite"),
        ({"loss_mask": (1, 0, 0), "advantages": (1.0, 0.0, 0.0)}, 1, "first token"),
        ({"loss_mask": (0, 1)}, 1, "differ in length"),
        ({"temperature": 0.0}, 1, "temperature"),
        ({}, 0, "num_valid_tokens is 0"),
    ],
)
def test_batches_that_make_no_sense_are_refused_by_name(
    model_folder: Path, fields: dict[str, object], valid: int, message: str
) -> None:
    trainer = new_trainer(model_folder)
    before = weights(trainer)
    sample = make_sample([3, 4], [5], rollout_id="r7", **fields)
    with pytest.raises(TrainerError, match=message):
        trainer.step(TrainingBatch((make_sample([1], [2]), sample), valid + (1 if valid else 0)), LossConfig())
    assert equal(weights(trainer), before)


def test_a_sample_over_the_context_length_is_refused_by_name(model_folder: Path) -> None:
    trainer = new_trainer(model_folder)
    before, longest = weights(trainer), 2048
    fits = make_sample([3] * (longest - 1), [5], rollout_id="r6")
    over = make_sample([3] * longest, [5], rollout_id="r7")
    with pytest.raises(TrainerError, match=r"a sample of 2049 tokens, and the model has 2048 positions.*r7.*Next: shorten it"):
        trainer.step(TrainingBatch((fits, over), 2), LossConfig())
    with pytest.raises(TrainerError, match="2048 positions"):
        trainer.score([over])
    assert equal(weights(trainer), before)
    assert trainer.step(TrainingBatch((fits,), 1), LossConfig())["updated"] == 1


def test_empty_batches_change_nothing(model_folder: Path) -> None:
    trainer = new_trainer(model_folder)
    metrics = trainer.step(TrainingBatch((), 0), LossConfig())
    assert (metrics["updated"], metrics["loss"], metrics["trained_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_an_adapter_export_is_base_plus_adapter_and_loads_in_peft(
    model_folder: Path, tmp_path: Path, kind: dict[str, bool]
) -> None:
    from peft import PeftModel

    trainer, token_ids = new_trainer(model_folder, lora=kind), tuple(range(40, 60))
    base_logprobs = trainer.logprobs(token_ids)
    for seed in range(3):
        trainer.step(make_batch(seed), CROSS_ENTROPY)
    trainer.export(tmp_path / "v1")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    state = {name: tensor.clone() for name, tensor in base.state_dict().items()}

    def logprobs(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            rows = torch.log_softmax(model(input_ids=torch.tensor([token_ids])).logits[0, :-1], -1)
        return rows.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)

    expected = torch.tensor(trainer.logprobs(token_ids))
    assert (expected - torch.tensor(base_logprobs)).abs().max() > 0.1
    torch.testing.assert_close(logprobs(PeftModel.from_pretrained(base, tmp_path / "v1")), expected, rtol=0, atol=1e-4)
    # Merged from the files, as an engine does, it is what the trainer publishes, bit for bit.
    merged = dict(merged_tensors(state, tmp_path / "v1"))
    assert equal(merged, weights(trainer))
    assert all(not torch.equal(tensor, state[name]) for name, tensor in merged.items())
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logprobs(model), expected, rtol=0, atol=1e-4)
    config = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == model_folder


def test_a_full_export_is_a_model_folder_that_transformers_loads(model_folder: Path, tmp_path: Path) -> None:
    trainer, token_ids = new_trainer(model_folder, "full"), tuple(range(40, 60))
    for seed in range(3):
        trainer.step(make_batch(seed), CROSS_ENTROPY)
    trainer.export(tmp_path / "v1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    assert AutoTokenizer.from_pretrained(tmp_path / "v1").eos_token == "w1"
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=torch.tensor([token_ids])).logits[0, :-1], -1)
    found = rows.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(found, torch.tensor(trainer.logprobs(token_ids)), rtol=0, atol=1e-4)
    saved = load_tensors(tmp_path / "v1")
    assert equal(saved, weights(trainer))
    assert "lm_head.weight" not in saved  # tied: saved once, and both ends move
    assert torch.equal(model.lm_head.weight, saved["model.embed_tokens.weight"])


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_into_slots_is_what_is_named(model_folder: Path, method: str) -> None:
    trainer = new_trainer(model_folder, method)
    trainer.step(make_batch(0), CROSS_ENTROPY)
    with SlotPublisher(trainer.layout()) as publisher:
        trainer.write_weights(publisher)
        publisher.finish(1)
        assert equal({n: t.clone() for n, t in publisher.views(0).items()}, weights(trainer))
        publisher.stage(trainer.named_weights(), 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resuming_after_any_step_ends_in_the_same_bits(model_folder: Path, tmp_path: Path, method: str, stop: int) -> None:
    batches, rates = [make_batch(seed) for seed in range(5)], [0.01, 0.02, 0.005, 0.01, 0.003]
    straight = new_trainer(model_folder, method)
    for batch, rate in zip(batches, rates, strict=True):
        straight.step(batch, CROSS_ENTROPY, rate)
    first = new_trainer(model_folder, method)
    for batch, rate in zip(batches[:stop], rates[:stop], strict=True):
        first.step(batch, CROSS_ENTROPY, rate)
    first.policy_version = 17
    first.save(tmp_path / "c")
    second = new_trainer(model_folder, method)
    second.load(tmp_path / "c")
    assert (second.updates, second.policy_version) == (stop, 17)
    for batch, rate in zip(batches[stop:], rates[stop:], strict=True):
        second.step(batch, CROSS_ENTROPY, rate)
    assert equal(weights(second), weights(straight))
    for name, parameter in straight._parameters.items():
        one, other = straight._optimizer.state[parameter], second._optimizer.state[second._parameters[name]]
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_checkpoints_of_something_else_or_damaged_are_refused(model_folder: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_folder)
    trainer.step(make_batch(0), CROSS_ENTROPY)
    trainer.save(tmp_path / "c")
    with pytest.raises(TrainerError, match="lora"):
        new_trainer(model_folder, lora={"rank": 4}).load(tmp_path / "c")
    with pytest.raises(TrainerError, match="method"):
        new_trainer(model_folder, "full").load(tmp_path / "c")
    with pytest.raises(TrainerError, match="no readable checkpoint"):
        trainer.load(tmp_path / "nothing")
    before = weights(trainer)
    path = tmp_path / "c" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TransferError):
        trainer.load(tmp_path / "c")
    assert equal(weights(trainer), before)


def test_what_an_earlier_version_saved_of_a_plain_lora_loads(model_folder: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_folder)
    trainer.save(tmp_path / "c")
    path = tmp_path / "c" / "state.json"
    assert json.loads(path.read_text())["identity"]["lora"].keys() == {"rank", "alpha", "targets"}
    trainer.load(tmp_path / "c")
    with pytest.raises(TrainerError, match="lora"):
        new_trainer(model_folder, lora={"dora": True}).load(tmp_path / "c")


@pytest.mark.parametrize("kind", [{"dora": True}, {"rslora": True}], ids=str)
def test_the_reference_of_an_adapter_of_another_kind_outlives_its_checkpoint(
    model_folder: Path, tmp_path: Path, kind: dict[str, bool]
) -> None:
    trainer = new_trainer(model_folder, lora=kind)
    base = trainer.score(make_batch(1).samples)
    for seed in range(2):
        trainer.step(make_batch(seed), CROSS_ENTROPY)
    start = trainer.score(make_batch(1).samples)
    assert trainer.score(make_batch(1).samples, reference=True) == base
    trainer.export(tmp_path / "v1")
    trainer.reset(str(tmp_path / "v1"))
    trainer.step(make_batch(2), CROSS_ENTROPY)
    trainer.save(tmp_path / "c")
    other = new_trainer(model_folder, lora=kind)
    other.load(tmp_path / "c")
    assert other.score(make_batch(1).samples, reference=True) == start
    assert other.score(make_batch(1).samples) == trainer.score(make_batch(1).samples) != start
    with pytest.raises(TrainerError, match="use the same lora"):
        new_trainer(model_folder).reset(str(tmp_path / "v1"))


@pytest.mark.parametrize("method", [*METHODS, "dora"])
def test_reset_starts_from_an_export_or_the_base(model_folder: Path, tmp_path: Path, method: str) -> None:
    kind, method = {"lora": {"dora": method == "dora"}}, "full" if method == "full" else "lora"
    trainer = new_trainer(model_folder, method, **kind)
    start = weights(trainer)
    trainer.step(make_batch(0), CROSS_ENTROPY)
    trained = weights(trainer)
    trainer.export(tmp_path / "v1")
    trainer.reset()
    assert equal(weights(trainer), start)
    assert (trainer.updates, len(trainer._optimizer.state)) == (0, 0)
    trainer.reset(str(tmp_path / "v1"))
    assert equal(weights(trainer), trained)
    fresh = new_trainer(model_folder, method, **kind)
    fresh.reset(str(tmp_path / "v1"))
    for each in (trainer, fresh):
        each.step(make_batch(1), CROSS_ENTROPY)
    assert equal(weights(trainer), weights(fresh))
    with pytest.raises((TrainerError, TransferError)):
        trainer.reset(str(tmp_path / "nothing"))
    if method == "lora":
        before = weights(trainer)
        config = tmp_path / "v1" / "adapter_config.json"
        config.write_text(config.read_text().replace("small-llama", "other-llama"))
        with pytest.raises(TransferError, match="for base 'other-llama', not 'small-llama'"):
            trainer.reset(str(tmp_path / "v1"))
        assert equal(weights(trainer), before)
        config.write_text(config.read_text().replace("other-llama", "small-llama"))
        with pytest.raises(TrainerError, match=r"lora\.rank"):
            new_trainer(model_folder, lora={**kind["lora"], "rank": 4}).reset(str(tmp_path / "v1"))


def test_models_that_would_be_trained_wrongly_are_refused(tmp_path: Path, model_folder: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, attn_logit_softcapping=2.0, initializer_range=0.3,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped-attention")
    with pytest.raises(TrainerError, match=r"soft cap on scores.*Gemma 3"):
        new_trainer(tmp_path / "capped-attention")
    config.attn_logit_softcapping, config.final_logit_softcapping = None, 0.5
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped-logits")
    with pytest.raises(TrainerError, match="differ"):
        new_trainer(tmp_path / "capped-logits")
    config.final_logit_softcapping = None
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "plain")
    new_trainer(tmp_path / "plain").step(make_batch(0), CROSS_ENTROPY)
    with pytest.raises(TrainerError, match="no model here"):
        new_trainer(tmp_path / "nothing")
    with pytest.raises(TrainerError, match="q_prj"):
        new_trainer(model_folder, lora={"targets": ["q_prj"]})
    with pytest.raises(TrainerError, match="output embedding"):
        new_trainer(model_folder, lora={"targets": ["lm_head"]})
    with pytest.raises(EvergradError, match="device"):
        new_trainer(model_folder, device="cuda:7")


def test_layers_that_leak_from_one_branch_to_another_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3,
    }  # fmt: skip
    # Alone, a chain of tokens goes through a convolution or a recurrent state as it should; only branches tell.
    layers = ["conv", "full_attention"]
    Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=layers, block_auto_adjust_ff_dim=False)).save_pretrained(tmp_path / "conv")
    mamba = {
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }
    FalconH1ForCausalLM(FalconH1Config(**sizes, **mamba)).save_pretrained(tmp_path / "recurrent")
    for name in ("conv", "recurrent"):
        with pytest.raises(TrainerError, match="differ"):
            new_trainer(tmp_path / name)


def test_a_layer_that_was_replaced_wrongly_is_noticed(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_wrongly(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, LlamaMLP):
                module.forward = torch.zeros_like

    monkeypatch.setattr("evergrad.training.model.write_out_backward", replace_wrongly)
    with pytest.raises(TrainerError, match="differ"):
        new_trainer(model_folder)


def test_a_truncated_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(TrainerError, match="does not load"):
        new_trainer(tmp_path)
