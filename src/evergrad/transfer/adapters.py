"""LoRA adapters in PEFT layout, merged into full tensors.

PEFT layout (peft's ``LoraConfig`` and ``save_pretrained``): ``adapter_config.json`` and ``adapter_model.safetensors`` with
names ``base_model.model.<module>.lora_A.weight`` [rank, in] and ``…lora_B.weight`` [out, rank].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from evergrad.transfer.files import load_tensors
from evergrad.transfer.layout import TransferError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Name and tensor, one after another; a consumer may drop each before it takes the next."""

_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight$")

# Each of these changes what the adapter means; an adapter that uses one would be merged wrongly.
_UNSUPPORTED = ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices")


def merge_lora(
    weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``weight + scale · lora_b @ lora_a``, computed in fp32 or wider. ``weight`` [out, in], ``lora_a`` [rank, in],
    ``lora_b`` [out, rank]. With ``out``, written there without a temporary when the dtypes agree."""
    wide = torch.promote_types(torch.promote_types(weight.dtype, lora_a.dtype), torch.float32)
    if out is not None and out.dtype == wide:
        return torch.addmm(weight.to(wide), lora_b.to(wide), lora_a.to(wide), alpha=scale, out=out)
    merged = torch.addmm(weight.to(wide), lora_b.to(wide), lora_a.to(wide), alpha=scale)
    return merged.to(weight.dtype) if out is None else out.copy_(merged)


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


def merged_tensors(
    base: Mapping[str, torch.Tensor],
    adapter: Path | str | tuple[Mapping[str, Any], Mapping[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``base`` that the adapter changes, merged, under their Hugging Face names.

    ``adapter`` is a PEFT folder, or its configuration and tensors. All is checked before the first tensor is yielded: an
    adapter of which any part matches nothing is refused, so that a base can never be served under an adapter's name.

    Raises:
        TransferError: a key that is no LoRA half or has no partner, a module that ``base`` lacks, a shape that does not fit,
            or a feature of PEFT that this merge does not know.
    """
    config, tensors = load_adapter(adapter) if isinstance(adapter, (str, Path)) else adapter
    where = str(adapter) if isinstance(adapter, (str, Path)) else None
    halves = _paired_halves(config, tensors, where)
    for module, (lora_a, lora_b) in halves.items():
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise TransferError(f"the adapter changes '{module}', which the base does not have", where=where)
        expected = (lora_b.shape[0], lora_a.shape[1])
        if tuple(weight.shape) != expected or lora_a.shape[0] != lora_b.shape[1]:
            raise TransferError(f"'{module}' is {tuple(weight.shape)}, the adapter is for {expected}", where=where)

    def generate() -> Iterator[tuple[str, torch.Tensor]]:
        for module, (lora_a, lora_b) in halves.items():
            name = f"{module}.weight"
            yield name, merge_lora(base[name], lora_a, lora_b, _scale(config, module, lora_a.shape[0]))

    return generate()


def _paired_halves(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
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
        found.setdefault(match["module"], {})[match["half"]] = tensor
    lonely = [module for module, halves in found.items() if len(halves) != 2]
    if lonely or not found:
        raise TransferError(f"LoRA halves without partner: {', '.join(lonely) or 'no tensors at all'}", where=where)
    return {module: (halves["A"], halves["B"]) for module, halves in found.items()}


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
