"""Merges of trained weights: on the line between two versions, and of adapters the nearest that their rank can hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evergrad.training import LossConfig, TrainerError
from evergrad.training.merging import merge_exports
from evergrad.training.trainer import Trainer
from evergrad.transfer import TransferError, load_adapter, load_tensors, merged_tensors
from evergrad.transfer.adapters import LoraPart, lora_parts
from evergrad.transfer.files import write_safetensors
from tests.training.conftest import make_batch
from tests.training.test_trainer import METHODS, new_trainer

Pair = tuple[Path, Path, str]
GRADIENT = LossConfig(name="policy_gradient")


def trained(trainer: Trainer, folder: Path, seed: int, steps: int = 2) -> Path:
    """An export after some steps from where ``trainer`` stands."""
    for step in range(steps):
        trainer.step(make_batch(seed + step), GRADIENT, lr=0.02)
    trainer.export(folder)
    return folder


@pytest.fixture(scope="module", params=METHODS)
def pair(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A version, one that was trained on from it, and the method."""
    folder, trainer = tmp_path_factory.mktemp("pair"), new_trainer(model_folder, request.param)
    ours = trained(trainer, folder / "ours", 1)
    trainer.reset(str(ours))
    return ours, trained(trainer, folder / "other", 5), request.param


def updates(folder: Path) -> dict[str, Tensor]:
    """Of each layer what an adapter adds to its weight, [out, in]; or the weights of a whole model."""
    if not (folder / "adapter_config.json").exists():
        return {name: tensor.double() for name, tensor in load_tensors(folder).items()}
    return {name: update(part) for name, part in lora_parts(*load_adapter(folder)).items()}


def update(part: LoraPart) -> Tensor:
    return part.scale * part.lora_b.double() @ part.lora_a.double()


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_merge_lies_on_the_line_between_its_parents(pair: Pair, tmp_path: Path, share: float) -> None:
    ours, other, method = pair
    lost = merge_exports(ours, other, share, tmp_path / "merged")
    first, second, merged = (updates(each) for each in (ours, other, tmp_path / "merged"))
    exact = {name: (1 - share) * first[name] + share * second[name] for name in first}
    assert merged.keys() == exact.keys()
    if method == "full":
        assert lost == 0.0
        assert all(torch.allclose(merged[name], exact[name], atol=1e-7) for name in exact)
        return
    rank = next(iter(lora_parts(*load_adapter(ours)).values())).lora_a.shape[0]
    tails = {name: torch.linalg.svdvals(each)[rank:].square().sum() for name, each in exact.items()}
    for name, tail in tails.items():
        error = (merged[name] - exact[name]).square().sum()
        assert torch.allclose(error, tail, rtol=1e-3, atol=1e-10), "as near as any matrix of this rank"
    whole = sum(each.square().sum() for each in exact.values())
    assert lost == pytest.approx(float((sum(tails.values()) / whole).sqrt()), rel=1e-6)


def test_an_adapter_that_was_trained_on_from_the_other_loses_little(model_folder: Path, tmp_path: Path) -> None:
    """Never more than t(1 − t)·‖ΔB ΔA‖, which is what a merge of the halves one by one would be off by."""
    trainer = new_trainer(model_folder, "lora")
    ours = trained(trainer, tmp_path / "ours", 1, steps=3)
    other = trained(trainer, tmp_path / "other", 7, steps=1)
    lost = merge_exports(ours, other, 0.5, tmp_path / "merged")
    first, second = lora_parts(*load_adapter(ours)), lora_parts(*load_adapter(other))
    crossed = whole = 0.0
    for name, part in first.items():
        by_half = LoraPart((part.lora_a + second[name].lora_a) / 2, (part.lora_b + second[name].lora_b) / 2, part.scale)
        exact = (update(part) + update(second[name])) / 2
        crossed += float((exact - update(by_half)).square().sum())
        whole += float(exact.square().sum())
    assert 0 < lost <= (crossed / whole) ** 0.5


def test_what_both_have_in_common_stays_to_the_last_bit(pair: Pair, tmp_path: Path) -> None:
    ours, _, method = pair
    lost = merge_exports(ours, ours, 0.7, tmp_path / "merged")
    if method == "full":
        assert all(torch.equal(tensor, load_tensors(tmp_path / "merged")[name]) for name, tensor in load_tensors(ours).items())
    else:
        assert lost < 1e-7, "both have the same rows, so that the rank has room for all"
        merged = updates(tmp_path / "merged")
        assert all(torch.allclose(each, merged[name], atol=1e-7) for name, each in updates(ours).items())


def test_a_trainer_goes_on_from_a_merge_and_every_layer_can_still_learn(pair: Pair, model_folder: Path, tmp_path: Path) -> None:
    ours, other, method = pair
    merge_exports(ours, other, 0.5, tmp_path / "merged")
    trainer = new_trainer(model_folder, method)
    trainer.reset(str(tmp_path / "merged"))
    trainer.export(tmp_path / "again")
    again, merged = load_tensors(tmp_path / "again"), load_tensors(tmp_path / "merged")
    assert all(torch.equal(tensor, again[name]) for name, tensor in merged.items())
    if method == "lora":
        served = dict(merged_tensors(load_tensors(model_folder), tmp_path / "merged"))
        assert all(torch.equal(tensor, served[name]) for name, tensor in trainer.named_weights()), "an engine has the same"
        assert json.loads((tmp_path / "again" / "adapter_config.json").read_text()) == json.loads(
            (tmp_path / "merged" / "adapter_config.json").read_text()
        )


def test_adapters_that_nobody_trained_merge_to_one_that_learns(model_folder: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_folder, "lora")
    fresh = trained(trainer, tmp_path / "fresh", 0, steps=0)
    assert merge_exports(fresh, fresh, 0.5, tmp_path / "merged") == 0.0
    trainer.reset(str(tmp_path / "merged"))
    after = lora_parts(*load_adapter(trained(trainer, tmp_path / "after", 1, steps=1)))
    assert all(part.lora_b.abs().sum(dim=0).min() > 0 for part in after.values()), "no direction is dead"


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(pair: Pair, model_folder: Path, tmp_path: Path) -> None:
    ours, other, method = pair
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(TrainerError, match="is no merge"):
            merge_exports(ours, other, share, tmp_path / "merged")
    unlike = trained(new_trainer(model_folder, "full" if method == "lora" else "lora"), tmp_path / "unlike", 1, steps=0)
    with pytest.raises(TrainerError, match="one is an adapter"):
        merge_exports(ours, unlike, 0.5, tmp_path / "merged")
    for change, error, says in _BROKEN[method]:
        broken = shutil.copytree(other, tmp_path / change, dirs_exist_ok=True)
        change_folder(broken, change)
        with pytest.raises(error, match=says):
            merge_exports(ours, broken, 0.5, tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


_BROKEN = {
    "full": [
        ("architecture", TrainerError, "num_attention_heads is 4 here and 8 there"),
        ("tokenizer", TrainerError, "another tokenizer"),
        ("shape", TrainerError, r"is \(3,\), not"),
        ("name", TrainerError, "1 names differ, first 'more.weight'"),
    ],
    "lora": [
        ("base", TransferError, "the adapter is for base 'elsewhere'"),
        ("dora", TrainerError, "DoRA"),
        ("layer", TrainerError, "has one adapter only"),
    ],
}


def change_folder(folder: Path, change: str) -> None:
    """Makes an export one that does not go with those of its run."""
    if change in ("architecture", "base", "dora"):
        path = folder / ("config.json" if change == "architecture" else "adapter_config.json")
        values = {
            "architecture": {"num_attention_heads": 8},
            "base": {"base_model_name_or_path": "/models/elsewhere"},
            "dora": {"use_dora": True},
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | values[change]))
    elif change == "tokenizer":
        (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    elif change == "layer":
        tensors = load_tensors(folder)
        module = next(iter(tensors)).rpartition(".lora_")[0]
        left = [(name, tensor) for name, tensor in tensors.items() if not name.startswith(f"{module}.lora_")]
        write_safetensors(folder / "adapter_model.safetensors", left)
    else:
        tensors = load_tensors(folder)
        changed = {next(iter(tensors)): torch.zeros(3)} if change == "shape" else {"more.weight": torch.zeros(3)}
        write_safetensors(folder / "model.safetensors", (tensors | changed).items())
