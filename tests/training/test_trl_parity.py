"""Loss and every gradient are TRL's, on the same weights and the same batch; its own loss functions, on real trainers of its.

Needs the extra ``trl``: ``make test-trl``. Everything is computed in float64, so that what is left is a difference of formulas
and not of rounding; transformers' norms and TRL's entropies go through float32 all the same.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evergrad.training import LossConfig, TrainerConfig
from evergrad.training.trainer import Trainer
from evergrad.types import TrainingBatch, TrainingSample
from tests.training.conftest import VOCAB, make_sample

pytest.importorskip("trl")
pytestmark = pytest.mark.trl

TOLERANCE = 1e-5
LONGEST = 16

Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def reference_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with every weight moved a little: a frozen reference that the policy has left."""
    folder = tmp_path_factory.mktemp("models") / "reference"
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


def trainer_for(folder: Path, micro_batch_tokens: int = 4096) -> Trainer:
    fields = {"model": str(folder), "method": "full", "dtype": "float64", "micro_batch_tokens": micro_batch_tokens}
    return Trainer(TrainerConfig.model_validate(fields))


def ours(folder: Path, samples: list[TrainingSample], name: str, options: dict[str, Any], cut: int) -> tuple[float, Gradients]:
    trainer = trainer_for(folder, cut)
    batch = TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))
    metrics = trainer.forward_backward(batch, LossConfig(name=name, options=options))
    assert metrics["micro_batches"] > 1 or cut > 1000
    return metrics["loss"], {n: p.grad.clone() for n, p in trainer._parameters.items() if p.grad is not None}


def theirs(model: torch.nn.Module, loss: torch.Tensor) -> tuple[float, Gradients]:
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(label: str, found: tuple[float, Gradients], expected: tuple[float, Gradients]) -> None:
    """Loss and each gradient within ``TOLERANCE`` of the gradient's largest entry."""
    assert found[1].keys() == expected[1].keys()
    worst = max(float((found[1][n] - g).abs().max() / g.abs().max()) for n, g in expected[1].items())
    loss = abs(found[0] - expected[0]) / max(abs(expected[0]), 1e-3)
    print(f"parity {label}: gradients {worst:.1e}, loss {loss:.1e}")
    assert worst < TOLERANCE
    assert loss < TOLERANCE


def with_logprobs(field: str, folder: Path, samples: list[TrainingSample], noise: float = 0.0) -> list[TrainingSample]:
    draw = random.Random(1)
    scored = trainer_for(folder).score(samples)
    values = [
        tuple(v + draw.gauss(0, noise) * m for v, m in zip(vs, s.loss_mask, strict=True))
        for vs, s in zip(scored, samples, strict=True)
    ]
    return [dataclasses.replace(sample, **{field: each}) for sample, each in zip(samples, values, strict=True)]


def rollouts(folder: Path, reference: Path, temperature: float = 1.0, tool_tokens: int = 3) -> list[TrainingSample]:
    """Two groups of four: answers of 1 to 9 tokens, in some of them tokens of a tool; one without advantage."""
    draw = random.Random(0)
    samples = []
    for group in range(2):
        prompt = [draw.randrange(2, VOCAB) for _ in range(3 + 4 * group)]
        for member in range(4):
            answer = [draw.randrange(2, 6) for _ in range(draw.randint(1, 5))]
            tool = [draw.randrange(VOCAB) for _ in range(draw.choice([0, tool_tokens]))]
            last = [draw.randrange(2, 6) for _ in range(draw.randint(1, 4))]
            ids, mask = prompt + answer + tool + last, [0] * len(prompt) + [1] * len(answer) + [0] * len(tool) + [1] * len(last)
            advantage = [1.0, -0.7, 0.0, 0.4][member]
            samples.append(
                make_sample([], ids, loss_mask=tuple(mask), logprobs=(0.0,) * len(ids), temperature=temperature,
                            advantages=tuple(m * advantage for m in mask), group_id=f"g{group}")
            )  # fmt: skip
    samples = with_logprobs("logprobs", folder, samples, noise=0.3)
    return with_logprobs("reference_logprobs", reference, samples)


def padded(rows: list[list[float]], fill: float = 0.0, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    whole = [[fill] * (width - len(row)) * left + row + [fill] * (width - len(row)) * (not left) for row in rows]
    kind = torch.float64 if any(isinstance(value, float) for row in rows for value in row) else torch.long
    return torch.tensor(whole, dtype=kind)


def grpo_inputs(samples: list[TrainingSample]) -> dict[str, torch.Tensor]:
    starts = [sample.loss_mask.index(1) for sample in samples]

    def tail(field: str) -> torch.Tensor:
        return padded([list(getattr(s, field)[start:]) for s, start in zip(samples, starts, strict=True)])

    prompts = [list(sample.token_ids[:start]) for sample, start in zip(samples, starts, strict=True)]
    advantages = [sample.advantages[start] for sample, start in zip(samples, starts, strict=True)]
    completion_mask = padded([[1] * (len(s.token_ids) - start) for s, start in zip(samples, starts, strict=True)])
    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], left=True),
        "completion_ids": tail("token_ids"),
        "completion_mask": completion_mask,
        "tool_mask": tail("loss_mask"),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_per_token_logps": tail("logprobs"),
        "ref_per_token_logps": tail("reference_logprobs"),
        "num_items_in_batch": torch.tensor(sum(sum(sample.loss_mask) for sample in samples)),
    }


def grpo_trainer(folder: Path, tmp_path: Path, **settings: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=8, num_generations=4,
        max_completion_length=LONGEST, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    model.eval()  # one batch, no accumulation
    return trainer


GRPO: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "grpo, clip higher, dual clip": (
        "grpo",
        {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.3},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.3},
    ),
    "grpo, kl": ("grpo", {"kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "grpo, kl of the paper": (
        "grpo",
        {"kl_coef": 0.04, "kl_weighted": False},
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "grpo, entropy": ("grpo", {"entropy_coef": 0.1}, {"loss_type": "grpo", "entropy_coef": 0.1}),
    "dr_grpo": ("dr_grpo", {"constant_length": LONGEST}, {"loss_type": "dr_grpo"}),
    "dr_grpo, kl": ("dr_grpo", {"constant_length": LONGEST, "kl_coef": 0.04}, {"loss_type": "dr_grpo", "beta": 0.04}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dapo, kl": ("dapo", {"kl_coef": 0.04}, {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04}),
    "bnpo": ("ppo", {}, {"loss_type": "bnpo"}),
    "bnpo, kl": ("ppo", {"kl_coef": 0.04}, {"loss_type": "bnpo", "beta": 0.04}),
    "gspo": (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.08},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    ),
    "gspo, kl": (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.08, "kl_coef": 0.04, "kl_weighted": False},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.08,
            "beta": 0.04,
            "use_bias_correction_kl": False,
        },
    ),
    "cispo": ("cispo", {"ratio_cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "cispo, kl": ("cispo", {"ratio_cap": 1.2, "kl_coef": 0.04}, {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.04}),
}


@pytest.mark.parametrize("cut", [4096, 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("label", GRPO)
def test_policy_losses(
    model_folder: Path, reference_folder: Path, tmp_path: Path, label: str, temperature: float, cut: int
) -> None:
    name, options, settings = GRPO[label]
    samples = rollouts(model_folder, reference_folder, temperature)
    trainer = grpo_trainer(model_folder, tmp_path, temperature=temperature, **settings)
    loss = trainer.compute_loss(trainer.model, grpo_inputs(samples))
    found = ours(model_folder, samples, name, options, cut)
    assert_equal(label, found, theirs(trainer.model, loss))


@pytest.mark.parametrize("cut", [4096, 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rloo(model_folder: Path, reference_folder: Path, tmp_path: Path, temperature: float, cut: int) -> None:
    """Every gradient, for fresh answers: TRL's ratio is of whole answers and ours of tokens, and both are 1 there. TRL's loss
    is then minus the mean advantage, so that losses are not compared, and TRL's takes the place of ours."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    samples = with_logprobs("logprobs", model_folder, rollouts(model_folder, reference_folder, temperature, tool_tokens=0))
    args = RLOOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=8, num_generations=4,
        max_completion_length=LONGEST, gradient_checkpointing=False, temperature=temperature,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    model.eval()
    inputs = grpo_inputs(samples)
    inputs["old_logps"] = inputs.pop("old_per_token_logps").sum(1)
    expected = theirs(model, trainer.compute_loss(model, inputs))
    options = {"normalization": "constant", "constant_length": 1}  # one weight for each answer, however long
    _, gradients = ours(model_folder, samples, "policy_gradient", options, cut)
    assert_equal("rloo", (expected[0], gradients), expected)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "token_icepop", "sequence_truncate", "sequence_mask"])
def test_corrections(model_folder: Path, reference_folder: Path, tmp_path: Path, mode: str) -> None:
    """TRL makes the weight where it generates, and its loss is handed the result; so is it here."""
    level, kind = mode.split("_")
    samples = rollouts(model_folder, reference_folder)
    samples = with_logprobs("proximal_logprobs", model_folder, samples, noise=0.1)
    trainer = grpo_trainer(model_folder, tmp_path, loss_type="dapo")
    inputs = grpo_inputs(samples)
    sampled, inputs["old_per_token_logps"] = (
        inputs["old_per_token_logps"],
        padded([list(s.proximal_logprobs[s.loss_mask.index(1) :]) for s in samples if s.proximal_logprobs]),
    )
    difference = (inputs["old_per_token_logps"] - sampled) * inputs["tool_mask"]
    ratio = (difference if level == "token" else difference.sum(-1, keepdim=True)).exp()
    floor = 0.8 if kind == "icepop" else 0.0
    outside = (ratio > 1.3) | (ratio < floor)
    inputs["importance_sampling_ratio"] = ratio.clamp(max=1.3) if kind == "truncate" else ratio.masked_fill(outside, 0.0)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    loss = trainer.compute_loss(trainer.model, inputs)
    correction = {"kind": "truncate" if kind == "truncate" else "mask", "level": level, "cap": 1.3, "floor": floor}
    found = ours(model_folder, samples, "ppo", {"anchor": "proximal", "correction": correction}, 4096)
    assert_equal(f"correction {mode}", found, theirs(trainer.model, loss))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_distillation(model_folder: Path, reference_folder: Path, tmp_path: Path, temperature: float) -> None:
    """Every gradient of TRL's reverse KL, which sums over the vocabulary where ours samples: here all tokens alike, so that
    one sample of each token makes that sum. TRL's is in float32."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2,
        max_completion_length=LONGEST, gradient_checkpointing=False, temperature=temperature, beta=1.0,
    )  # fmt: skip
    model, teacher = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for f in (model_folder, reference_folder))
    trainer = DistillationTrainer(
        model=model,
        teacher_model=teacher,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 2),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    model.eval()
    prompts, answers = [[7, 8, 9], [7, 11]], [[5], [4, 6, 3]]
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], left=True),
        "completion_ids": padded(answers),
        "completion_mask": padded([[1] * len(answer) for answer in answers]),
    }
    expected = theirs(model, trainer.compute_loss(model, inputs))
    contexts = [prompt + answer[:t] for prompt, answer in zip(prompts, answers, strict=True) for t in range(len(answer))]
    everything = [
        make_sample(context, [token], logprobs=(0.0,) * len(context) + (-math.log(VOCAB),), temperature=temperature)
        for context in contexts
        for token in range(VOCAB)
    ]
    samples = with_logprobs("reference_logprobs", reference_folder, everything)
    _, gradients = ours(model_folder, samples, "reverse_kl", {"ratio_cap": 1e6}, 4096)
    assert_equal("reverse_kl", (expected[0], gradients), expected)


def pairs(reference: Path | None, count: int) -> list[TrainingSample]:
    draw = random.Random(2)
    samples = []
    for number in range(count):
        prompt = [draw.randrange(2, VOCAB) for _ in range(draw.randint(2, 6))]
        for sign in (1.0, -1.0):
            answer = [draw.randrange(2, 40) for _ in range(draw.randint(2, 8))]
            advantages = (0.0,) * len(prompt) + (sign,) * len(answer)
            samples.append(make_sample(prompt, answer, advantages=advantages, group_id=f"pair-{number}"))
    draw.shuffle(samples)
    return samples if reference is None else with_logprobs("reference_logprobs", reference, samples)


def preferences(samples: list[TrainingSample]) -> list[dict[str, list[int]]]:
    """The pairs as TRL's collator takes them."""
    found: dict[str, dict[str, list[int]]] = {}
    for sample in samples:
        start = sample.loss_mask.index(1)
        row = found.setdefault(sample.group_id, {"prompt_ids": list(sample.token_ids[:start])})
        row["chosen_ids" if sample.advantages[-1] > 0 else "rejected_ids"] = list(sample.token_ids[start:])
    return list(found.values())


DPO: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "dpo": ("dpo", {"beta": 0.2}, {"loss_type": ["sigmoid"], "beta": 0.2}, 4),
    "dpo, length-normalized": ("dpo", {"beta": 2, "length_normalized": True}, {"loss_type": ["sigmoid_norm"], "beta": 2.0}, 4),
    "ipo": ("ipo", {"beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}, 4),
    # TRL's mean is over the tokens of all chosen answers, ours over those of each: the same for one pair.
    "dpo, rpo_alpha": (
        "dpo",
        {"beta": 0.2, "rpo_alpha": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.2},
        1,
    ),
}


@pytest.mark.parametrize("label", DPO)
def test_preference_losses(model_folder: Path, reference_folder: Path, tmp_path: Path, label: str) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    name, options, settings, count = DPO[label]
    samples = pairs(reference_folder, count)
    args = DPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, **settings
    )
    model, reference = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for f in (model_folder, reference_folder))
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3", "chosen": "w4", "rejected": "w5"}]),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    inputs = trainer.data_collator(preferences(samples))
    loss = trainer.compute_loss(trainer.model, inputs)
    found = ours(model_folder, samples, name, options, 4096 if count == 1 else 20)
    assert_equal(label, found, theirs(model, loss))


def test_preferences_with_an_adapter_whose_absence_is_the_reference(model_folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    samples = pairs(None, 4)
    config = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    fields = {"model": str(model_folder), "method": "lora", "dtype": "float64", "lora": config, "micro_batch_tokens": 20}
    trainer = Trainer(TrainerConfig.model_validate(fields))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in trainer._parameters.items():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.1, generator=generator)
    their_trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64),
        args=DPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, beta=0.2
        ),
        train_dataset=Dataset.from_list([{"prompt": "w3", "chosen": "w4", "rejected": "w5"}]),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "down_proj"]),
    )
    model = their_trainer.model.double()
    names = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                layer, matrix = name.removeprefix("base_model.model.").removesuffix(".default.weight").rsplit(".", 1)
                names[name] = f"{layer}.{matrix.lower()}"
                parameter.copy_(dict(trainer._model.named_parameters())[names[name]])
    loss = their_trainer.compute_loss(model, their_trainer.data_collator(preferences(samples)))
    expected = theirs(model, loss)
    batch = TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))
    metrics = trainer.forward_backward(batch, LossConfig(name="dpo", options={"beta": 0.2}))
    found = {n: p.grad for n, p in trainer._parameters.items() if p.grad is not None}
    assert metrics["margin"] != 0.0
    assert_equal("dpo, adapter", (metrics["loss"], found), (expected[0], {names[n]: g for n, g in expected[1].items()}))


@pytest.mark.parametrize("gamma", [0.0, 1.2])
def test_simpo(model_folder: Path, tmp_path: Path, gamma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    samples = pairs(None, 4)
    args = CPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, loss_type="simpo",
        beta=2.0, simpo_gamma=gamma, cpo_alpha=0.0, remove_unused_columns=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    trainer = CPOTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3", "chosen": "w4", "rejected": "w5"}]),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    batch = {}
    for side in ("chosen", "rejected"):
        rows = [(each["prompt_ids"], each[f"{side}_ids"]) for each in preferences(samples)]
        batch[f"{side}_input_ids"] = padded([prompt + answer for prompt, answer in rows])
        batch[f"{side}_attention_mask"] = padded([[1] * len(prompt + answer) for prompt, answer in rows])
        batch[f"{side}_labels"] = padded([[-100] * len(prompt) + answer for prompt, answer in rows], fill=-100)
    loss = trainer.compute_loss(trainer.model, batch)
    found = ours(model_folder, samples, "simpo", {"beta": 2.0, "gamma": gamma}, 20)
    assert_equal(f"simpo, gamma {gamma}", found, theirs(model, loss))


def test_supervised(model_folder: Path, reference_folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    samples = [
        dataclasses.replace(sample, advantages=tuple(float(m) for m in sample.loss_mask))
        for sample in rollouts(model_folder, reference_folder)
    ]
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"text": "w3 w4"}]),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    rows = [
        {
            "input_ids": list(sample.token_ids),
            "labels": [t if m else -100 for t, m in zip(sample.token_ids, sample.loss_mask, strict=True)],
        }
        for sample in samples
    ]
    loss = trainer.compute_loss(trainer.model, collated(trainer.data_collator, rows))
    found = ours(model_folder, samples, "cross_entropy", {}, 20)
    assert_equal("cross_entropy", found, theirs(model, loss))


def collated(collator: Callable[[list[dict[str, list[int]]]], dict[str, torch.Tensor]], rows: list[Any]) -> Any:
    inputs = collator(rows)
    assert (inputs["labels"] != -100).sum() == sum(label != -100 for row in rows for label in row["labels"])
    return inputs
