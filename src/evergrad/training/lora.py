"""Low-rank adapters on the linear layers of a transformers model, kept in PEFT layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evergrad.training.config import LoraConfig, TrainerError
from evergrad.training.parts import computing, fill, like, whole
from evergrad.transfer.files import write_safetensors

_PREFIX = "base_model.model."
_FEW_ROWS = 200


class LoraLinear(nn.Module):
    """``x Wᵀ + b + scale · (x Aᵀ) Bᵀ``. W and b are frozen; A [rank, in] starts uniform, B [out, rank] at zero.

    The start is PEFT's (Kaiming uniform with a = √5), so a new adapter is exactly the base model.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(config.rank, base.in_features, dtype=dtype, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, config.rank, dtype=dtype, device=base.weight.device))
        self.scale = config.alpha / config.rank
        self.reference: tuple[Tensor, Tensor] | None = None
        """A and B of the frozen reference; None when that is the base model."""
        self.as_reference = False
        self.reset(generator)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Back to the start; the next draws of ``generator``, a CPU one, decide A, so a seed means the same everywhere."""
        bound = 1.0 / math.sqrt(self.lora_a.shape[1])
        fill(self.lora_a, torch.empty(self.lora_a.shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator))
        self.lora_b.zero_()
        self.reference = None

    def freeze(self) -> None:
        """Makes the adapter, as it is now, the reference."""
        self.reference = whole(self.lora_a).clone(), whole(self.lora_b).clone()

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = computing(self.weight), None if self.bias is None else computing(self.bias)
        if self.as_reference and self.reference is None:
            return nn.functional.linear(x, weight, bias)
        lora_a: Tensor = self.lora_a
        lora_b: Tensor = self.lora_b
        if self.as_reference and self.reference is not None:
            lora_a, lora_b = like(lora_a, self.reference[0]), like(lora_b, self.reference[1])
        output = _LoraProduct.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), weight, bias, computing(lora_a), computing(lora_b), self.scale
        )
        return output.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class _LoraProduct(torch.autograd.Function):
    """One node of the graph for the whole layer: keeps x and x Aᵀ, and never makes a gradient for W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scale: float
    ) -> Tensor:
        narrow = torch.mm(x.to(lora_a.dtype), lora_a.t())
        output = _product(x, weight)
        if bias is not None:
            output += bias
        if output.dtype == lora_b.dtype:
            output.addmm_(narrow, lora_b.t(), alpha=scale)
        else:
            output += torch.mm(narrow, lora_b.t()).mul_(scale).to(output.dtype)
        ctx.save_for_backward(x, weight, lora_a, lora_b, narrow)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, weight, lora_a, lora_b, narrow = ctx.saved_tensors
        wide_grad = grad.to(lora_a.dtype)
        grad_narrow = torch.mm(wide_grad, lora_b).mul_(ctx.scale)
        grad_a = torch.mm(grad_narrow.t(), x.to(lora_a.dtype))
        grad_b = torch.mm(wide_grad.t(), narrow).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weight.t())
            if grad_x.dtype == lora_a.dtype:
                grad_x.addmm_(grad_narrow, lora_a)
            else:
                grad_x += torch.mm(grad_narrow, lora_a).to(grad_x.dtype)
        return grad_x, None, None, grad_a, grad_b, None


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weightᵀ``. Below some 200 rows CPU libraries are faster with the weight, whose side is long, in front."""
    if len(rows) < _FEW_ROWS and rows.device.type == "cpu":
        return torch.mm(weight, rows.t()).t().contiguous()
    return torch.mm(rows, weight.t())


def add_lora(model: nn.Module, config: LoraConfig, seed: int, dtype: torch.dtype) -> dict[str, LoraLinear]:
    """Freezes ``model`` and replaces every linear layer whose name ends in one of ``config.targets``.

    Returns the new layers by module name, in the model's order.

    Raises:
        TrainerError: a target matches no linear layer.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, LoraLinear] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in config.targets:
            layers[name] = LoraLinear(module, config, generator, dtype)
            model.set_submodule(name, layers[name])
    unmatched = set(config.targets) - {name.rpartition(".")[2] for name in layers}
    if unmatched:
        linear = sorted(
            {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, (nn.Linear, LoraLinear))}
        )
        raise TrainerError(
            f"lora.targets {', '.join(sorted(unmatched))} match no linear layer", hint=f"the model has {', '.join(linear)}"
        )
    return layers


@contextmanager
def as_reference(layers: Mapping[str, LoraLinear]) -> Iterator[None]:
    """Inside, the model computes what the frozen reference does, and nothing has a gradient."""
    for layer in layers.values():
        layer.as_reference = True
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers.values():
            layer.as_reference = False


def adapter_names(layers: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The adapter's names in PEFT, and those of the same parameters here."""
    for name in layers:
        yield f"{_PREFIX}{name}.lora_A.weight", f"{name}.lora_a"
        yield f"{_PREFIX}{name}.lora_B.weight", f"{name}.lora_b"


def reference_tensors(layers: Mapping[str, LoraLinear]) -> Iterator[tuple[str, Tensor]]:
    """The frozen reference, under names of this module's own; nothing where it is the base model."""
    for name, layer in layers.items():
        if layer.reference is not None:
            yield f"{name}.a", layer.reference[0]
            yield f"{name}.b", layer.reference[1]


def load_reference_tensors(layers: Mapping[str, LoraLinear], tensors: Mapping[str, Tensor]) -> None:
    """Takes over what :func:`reference_tensors` gave."""
    for name, layer in layers.items():
        layer.reference = None
        if f"{name}.a" in tensors:
            device = layer.lora_a.device
            layer.reference = tensors[f"{name}.a"].to(device), tensors[f"{name}.b"].to(device)


def load_adapter_tensors(layers: Mapping[str, LoraLinear], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copies an adapter of the same shape into ``layers``; all or nothing.

    Raises:
        TrainerError: names, shapes or scale differ.
    """
    parameters = {f"{name}.{part}": getattr(layer, part) for name, layer in layers.items() for part in ("lora_a", "lora_b")}
    own = {name: parameters[here] for name, here in adapter_names(layers)}
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise TrainerError(
            f"the adapter has other layers: {len(odd)} names differ, first '{odd[0]}'", hint="use the same lora.targets"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise TrainerError(
                f"'{name}' is {tuple(tensor.shape)}, not {tuple(own[name].shape)}", hint="use the same lora.rank"
            )
    scale = float(config["lora_alpha"]) / float(config["r"])
    if any(layer.scale != scale for layer in layers.values()):
        raise TrainerError(f"the adapter's alpha/rank is {scale}", hint="use the same lora.alpha")
    for name, tensor in tensors.items():
        fill(own[name], tensor)


def write_adapter(
    folder: Path, layers: Collection[str], parameter: Callable[[str], Tensor], config: LoraConfig, base_model: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT reads them. Call inside ``whole_folder``."""
    settings = peft_settings(layers, config, base_model)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    tensors = ((name, parameter(here)) for name, here in adapter_names(layers))
    write_safetensors(folder / "adapter_model.safetensors", tensors)


def peft_settings(layers: Collection[str], config: LoraConfig, base_model: str) -> dict[str, Any]:
    """The adapter's configuration as PEFT writes it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "inference_mode": True,
    }
