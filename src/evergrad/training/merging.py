"""Weights that exist already, merged into new ones: no step is trained, no task is played.

``share`` says how far the result lies on the straight line from one version's weights to another's (Wortsman et al., "Robust
fine-tuning of zero-shot models", arXiv 2109.01903)::

    merged = (1 − share) · W_ours + share · W_other

Versions that were trained from one start mostly lie in one basin, where the weights between them are about as good as the two,
and often better on what either has forgotten. Whether these are is measured, not assumed.

Whole weights are merged tensor by tensor. Of two adapters on one base the same line is one of their updates ``s B A``; it has
the sum of both ranks at most, and is kept at the rank of ``ours``, as the nearest update of that rank (Eckart and Young 1936),
so that training can go on from it and a hundred merges need no more room than one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from evergrad.training.config import TrainerError
from evergrad.transfer import load_adapter, load_tensors, require_base, whole_folder
from evergrad.transfer.adapters import LoraPart, lora_parts
from evergrad.transfer.files import write_safetensors

_ADAPTER = "adapter_config.json"
_SAYS_NOTHING = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Keys of a model's ``config.json`` that may differ between two models of one shape."""


def merge_exports(ours: Path | str, other: Path | str, share: float, folder: Path | str) -> float:
    """Writes ``folder``, whole or not at all: ``ours`` moved by ``share`` of the way to ``other``.

    Both are exports of a trainer: Hugging Face folders, or PEFT adapters on one base. ``folder`` is of the same kind, with the
    configuration and the tokenizer of ``ours``.

    Args:
        share: Strictly between 0 and 1.

    Returns:
        How much of the merged update the rank has no room for: ‖exact − written‖ / ‖exact‖ over all layers, Frobenius norms;
        0 for whole weights.

    Raises:
        TrainerError: the two cannot be merged: of other kinds, architectures, tokenizers, layers or shapes, or with DoRA.
        TransferError: adapters on different bases; a folder that cannot be read or written.
    """
    ours, other = Path(ours), Path(other)
    if not 0 < share < 1:
        raise TrainerError(f"a share of {share:g} is no merge", hint="give one between 0 (ours) and 1 (the other)")
    adapters = [(each / _ADAPTER).is_file() for each in (ours, other)]
    if adapters[0] != adapters[1]:
        raise TrainerError("one is an adapter, the other whole weights", where=str(other), hint="merge versions of one method")
    lost = 0.0
    with whole_folder(folder) as partial:
        for path in ours.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                (partial / path.name).write_bytes(path.read_bytes())
        if adapters[0]:
            tensors, lost = _merged_adapters(ours, other, share)
            write_safetensors(partial / "adapter_model.safetensors", tensors.items())
        else:
            write_safetensors(partial / "model.safetensors", _merged_weights(ours, other, share))
    return lost


def _merged_weights(ours: Path, other: Path, share: float) -> Iterator[tuple[str, Tensor]]:
    """Tensor by tensor; each pair is dropped when the next is asked for."""
    _require_same_model(ours, other)
    mine, theirs = load_tensors(ours), load_tensors(other)
    _require_same_shapes(mine, theirs, other)
    for name in list(mine):
        first, second = mine.pop(name), theirs.pop(name)
        if not first.is_floating_point():
            if not torch.equal(first, second):
                raise TrainerError(f"'{name}' holds whole numbers, which differ", where=str(other))
            yield name, first
            continue
        wide = torch.promote_types(first.dtype, torch.float32)
        # lerp, for what both have in common stays as it is, to the last bit.
        yield name, torch.lerp(first.to(wide), second.to(wide), share).to(first.dtype)


def _require_same_model(ours: Path, other: Path) -> None:
    configs = [json.loads((each / "config.json").read_text(encoding="utf-8")) for each in (ours, other)]
    keys = (configs[0].keys() | configs[1].keys()) - _SAYS_NOTHING
    odd = sorted(key for key in keys if configs[0].get(key) != configs[1].get(key))
    if odd:
        told = f"{odd[0]} is {configs[0].get(odd[0])!r} here and {configs[1].get(odd[0])!r} there"
        raise TrainerError(f"another architecture: {told}", where=str(other), hint="merge versions of one model")
    tokenizers = [each / "tokenizer.json" for each in (ours, other)]
    if all(each.is_file() for each in tokenizers) and tokenizers[0].read_bytes() != tokenizers[1].read_bytes():
        raise TrainerError("another tokenizer", where=str(tokenizers[1]), hint="merge versions of one model")


def _require_same_shapes(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], where: Path) -> None:
    odd = sorted(mine.keys() ^ theirs.keys())
    if odd:
        raise TrainerError(f"other tensors: {len(odd)} names differ, first '{odd[0]}'", where=str(where))
    for name, tensor in mine.items():
        if tensor.shape != theirs[name].shape:
            shapes = f"{tuple(theirs[name].shape)}, not {tuple(tensor.shape)}"
            raise TrainerError(f"'{name}' is {shapes}", where=str(where), hint="merge versions of one model")


def _merged_adapters(ours: Path, other: Path, share: float) -> tuple[dict[str, Tensor], float]:
    """The tensors of the merged adapter, in PEFT's names, and the share of its update that the rank has no room for."""
    (config, tensors), (other_config, other_tensors) = load_adapter(ours), load_adapter(other)
    require_base(other_config, str(config.get("base_model_name_or_path") or ""), str(other))
    for folder, each in ((ours, config), (other, other_config)):
        if each.get("use_dora"):
            raise TrainerError(
                "an adapter with DoRA: between two directions of a row lies no other row of its length",
                where=str(folder),
                hint="train with lora.dora = false to merge, or with method = 'full'",
            )
    mine, theirs = lora_parts(config, tensors, str(ours)), lora_parts(other_config, other_tensors, str(other))
    _require_same_layers(mine, theirs, other)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    merged, lost, whole = dict[str, Tensor](), 0.0, 0.0
    for module, part in mine.items():
        found, beyond, total = _nearest_update(part, theirs[module], share)
        lost, whole = lost + beyond, whole + total
        for half, tensor in zip("AB", found, strict=True):
            name = f"base_model.model.{module}.lora_{half}.weight"
            merged[name] = tensor.to(dtypes[name])
    return merged, math.sqrt(lost / whole) if whole else 0.0


def _require_same_layers(mine: Mapping[str, LoraPart], theirs: Mapping[str, LoraPart], where: Path) -> None:
    odd = sorted(mine.keys() ^ theirs.keys())
    if odd:
        raise TrainerError(f"other layers: '{odd[0]}' has one adapter only", where=str(where), hint="use the same lora.targets")
    for module, part in mine.items():
        here, there = ((each.lora_b.shape[0], each.lora_a.shape[1]) for each in (part, theirs[module]))
        if here != there:
            raise TrainerError(f"'{module}' is {there}, not {here}", where=str(where), hint="merge adapters of one base")


def _nearest_update(ours: LoraPart, other: LoraPart, share: float) -> tuple[tuple[Tensor, Tensor], float, float]:
    """A [rank, in] and B [out, rank], in fp64, of the update of the rank of ``ours`` that is nearest to the merged one; the
    squared norm of what lies between the two, and that of the merged update.

    The merged update is ``[(1−t) s₁B₁, t s₂B₂] · [A₁; A₂]``, [out, r₁+r₂] · [r₁+r₂, in], so that two thin QRs leave a singular
    value decomposition of a matrix as small as the ranks. All the length goes into B, and A's rows have length 1, also where
    the singular value is 0, as in an adapter that nobody trained: a direction in which both were 0 would never learn again.
    """
    up = torch.cat([(1 - share) * ours.scale * ours.lora_b.double(), share * other.scale * other.lora_b.double()], dim=1)
    down = torch.cat([ours.lora_a.double(), other.lora_a.double()], dim=0)
    out_basis, out_part = torch.linalg.qr(up)
    in_basis, in_part = torch.linalg.qr(down.T)
    left, lengths, right = torch.linalg.svd(out_part @ in_part.T)
    rank = ours.lora_a.shape[0]
    kept = min(rank, len(lengths))
    lora_a, lora_b = down.new_zeros(rank, down.shape[1]), up.new_zeros(up.shape[0], rank)
    lora_a[:kept] = right[:kept] @ in_basis.T
    lora_b[:, :kept] = out_basis @ (left[:, :kept] * lengths[:kept]) / ours.scale
    squares = lengths.square()
    return (lora_a, lora_b), float(squares[rank:].sum()), float(squares.sum())
