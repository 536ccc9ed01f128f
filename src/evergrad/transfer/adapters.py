"""LoRA adapters in PEFT layout, merged into full tensors.

PEFT layout (peft's ``LoraConfig`` and ``save_pretrained``): ``adapter_config.json`` and ``adapter_model.safetensors`` with
names ``base_model.model.<module>.lora_A.weight`` [rank, in] and ``…lora_B.weight`` [out, rank], and for DoRA
``…lora_magnitude_vector`` [out].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evergrad.transfer.files import load_tensors
from evergrad.transfer.layout import TransferError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Name and tensor, one after another; a consumer may drop each before it takes the next."""

_KEY = re.compile(
    r"^base_model\.model\.(?P<module>.+)\.lora_((?P<half>[AB])(\.default)?\.weight|magnitude_vector(\.default)?(\.weight)?)$"
)
_MAGNITUDE = "magnitude"

# Each of these changes what the adapter means; an adapter that uses one would be merged wrongly.
_UNSUPPORTED = ("fan_in_fan_out", "lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices")


def lora_scale(alpha: float, rank: int, *, rslora: bool) -> float:
    """``alpha / rank``, or ``alpha / √rank``, which keeps the size of an update at any rank (Kalajdzievski 2023, arXiv
    2312.03732)."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def row_norms(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> torch.Tensor:
    """Length of each row of ``weight + scale · lora_b @ lora_a``, [out], in fp32 or wider."""
    wide = _wide(weight, lora_a)
    rows = torch.addmm(weight.to(wide), lora_b.to(wide), lora_a.to(wide), alpha=scale)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def merge_lora(
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    magnitude: torch.Tensor | None = None,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``weight + scale · lora_b @ lora_a``, computed in fp32 or wider.

    Args:
        weight: [out, in].
        lora_a: [rank, in].
        lora_b: [out, rank].
        magnitude: [out], of DoRA: the length that each row is brought to (Liu et al. 2024, arXiv 2402.09353).
        scale: See :func:`lora_scale`.
        out: Where to write it, without a temporary when the dtypes agree.
    """
    wide = _wide(weight, lora_a)
    place = out if out is not None and out.dtype == wide else None
    merged = torch.addmm(weight.to(wide), lora_b.to(wide), lora_a.to(wide), alpha=scale, out=place)
    if magnitude is not None:
        merged.mul_((magnitude.to(wide) / torch.linalg.vector_norm(merged, dim=1))[:, None])
    if place is not None:
        return place
    return merged.to(weight.dtype) if out is None else out.copy_(merged)


def _wide(weight: torch.Tensor, lora_a: torch.Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(weight.dtype, lora_a.dtype), torch.float32)


def load_adapter(folder: Path | str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and tensors of a PEFT adapter folder.

    Raises:
        TransferError: a file is missing, truncated or corrupt.
    """
    path = Path(folder) / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TransferError(f"no readable adapter configuration: {error}", where=str(path)) from error
    return config, load_tensors(folder)


def require_base(config: Mapping[str, Any], base: str, where: str | None = None) -> None:
    """Holds the base that an adapter names against the one it is to be put on; one that names none passes.

    Args:
        config: Of the adapter.
        base: Folder or name; the last part of it counts, as folders move.

    Raises:
        TransferError: it is another; an adapter fits any model of the same shapes, and would make nonsense of it.
    """
    named = config.get("base_model_name_or_path")
    if named and Path(named).name != Path(base).name:
        raise TransferError(
            f"the adapter is for base '{Path(named).name}', not '{Path(base).name}'",
            where=where,
            hint="use its own base; if that only has another name here, write it into base_model_name_or_path",
        )


@dataclass(frozen=True)
class LoraPart:
    """What an adapter says of one linear layer."""

    lora_a: torch.Tensor
    """[rank, in]"""
    lora_b: torch.Tensor
    """[out, rank]"""
    scale: float
    magnitude: torch.Tensor | None = None
    """[out], of DoRA."""


def adapter_parts(
    base: Mapping[str, torch.Tensor],
    adapter: Path | str | tuple[Mapping[str, Any], Mapping[str, torch.Tensor]],
    base_model: str | None = None,
) -> dict[str, LoraPart]:
    """What the adapter says of each linear layer of ``base``, by the layer's full name.

    ``adapter`` is a PEFT folder, or its configuration and tensors. An adapter of which any part matches nothing is refused, so
    that a base can never be served under an adapter's name. With ``base_model``, the folder that ``base`` is of, so is one that
    names another.

    Raises:
        TransferError: see :func:`require_base`; a key that is no LoRA half or has no partner, a module that ``base`` lacks, a
            shape that does not fit, or a feature of PEFT that is not known here.
    """
    config, tensors = load_adapter(adapter) if isinstance(adapter, (str, Path)) else adapter
    where = str(adapter) if isinstance(adapter, (str, Path)) else None
    if base_model is not None:
        require_base(config, base_model, where)
    found = lora_parts(config, tensors, where)
    for module, part in found.items():
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise TransferError(f"the adapter changes '{module}', which the base does not have", where=where)
        expected = (part.lora_b.shape[0], part.lora_a.shape[1])
        if tuple(weight.shape) != expected:
            raise TransferError(f"'{module}' is {tuple(weight.shape)}, the adapter is for {expected}", where=where)
    return found


def lora_parts(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str | None = None) -> dict[str, LoraPart]:
    """What an adapter says of each linear layer that it changes, by the layer's name, whatever its base.

    Args:
        config: As :func:`load_adapter` gives it.
        tensors: The same.
        where: Names the adapter in errors.

    Raises:
        TransferError: a key that is no LoRA half or has no partner, halves that do not fit each other, or a feature of PEFT
            that is not known here.
    """
    found: dict[str, LoraPart] = {}
    for module, (lora_a, lora_b, *magnitude) in _parts(config, tensors, where).items():
        if lora_a.shape[0] != lora_b.shape[1] or any(each.shape != lora_b.shape[:1] for each in magnitude):
            shapes = ", ".join(str(tuple(each.shape)) for each in (lora_a, lora_b, *magnitude))
            raise TransferError(f"the parts of '{module}' do not fit each other: {shapes}", where=where)
        found[module] = LoraPart(lora_a, lora_b, _scale(config, module, lora_a.shape[0]), *magnitude)
    return found


def merged_tensors(
    base: Mapping[str, torch.Tensor],
    adapter: Path | str | tuple[Mapping[str, Any], Mapping[str, torch.Tensor]],
    base_model: str | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``base`` that the adapter changes, merged, under their Hugging Face names.

    All is checked before the first tensor is yielded.

    Raises:
        TransferError: as :func:`adapter_parts`, or a module whose weight another one uses, too.
    """
    parts = adapter_parts(base, adapter, base_model)
    for module in parts:
        weight = base[f"{module}.weight"]
        twin = next((name for name, each in base.items() if each is weight and name != f"{module}.weight"), None)
        if twin is not None:
            what = f"the adapter changes '{module}', whose weight is also '{twin}': merged, it would change both"
            raise TransferError(what, hint="load it beside the base: POST /admin/adapters/load")

    def generate() -> Iterator[tuple[str, torch.Tensor]]:
        for module, part in parts.items():
            name = f"{module}.weight"
            yield name, merge_lora(base[name], part.lora_a, part.lora_b, part.magnitude, scale=part.scale)

    return generate()


def _parts(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str | None
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Of each module A, B and, with DoRA, the magnitudes."""
    for feature in _UNSUPPORTED:
        if config.get(feature):
            raise TransferError(f"the adapter uses '{feature}', which cannot be merged here", where=where)
    if config.get("bias", "none") != "none":
        raise TransferError("the adapter trains biases, which cannot be merged here", where=where)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.match(name)
        if match is None:
            raise TransferError(f"'{name}' is not a LoRA tensor", where=where, hint="only LoRA on linear layers merges")
        found.setdefault(match["module"], {})[match["half"] or _MAGNITUDE] = tensor
    wanted = ("A", "B", _MAGNITUDE) if config.get("use_dora") else ("A", "B")
    odd = [module for module, parts in found.items() if parts.keys() != set(wanted)]
    if odd or not found:
        raise TransferError(f"not exactly {', '.join(wanted)} of {', '.join(odd) or 'any module'}", where=where)
    return {module: tuple(parts[each] for each in wanted) for module, parts in found.items()}


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return lora_scale(alpha, rank, rslora=bool(config.get("use_rslora")))
