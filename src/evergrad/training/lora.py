"""Low-rank adapters on the linear layers of a transformers model, kept in PEFT layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evergrad.training.config import LoraConfig, TrainerError
from evergrad.training.parts import computing, fill, like, whole
from evergrad.transfer import lora_scale, row_norms
from evergrad.transfer.files import write_safetensors

_PREFIX = "base_model.model."
_IN_PEFT = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_FEW_ROWS = 200


class LoraLinear(nn.Module):
    """``x Wᵀ + b + scale · (x Aᵀ) Bᵀ``. W and b are frozen; A [rank, in] starts uniform, B [out, rank] at zero.

    The start is PEFT's (Kaiming uniform with a = √5), so a new adapter is exactly the base model.

    With DoRA (Liu et al. 2024, arXiv 2402.09353) each row of ``W + scale · B A`` has its length learned apart, as the magnitude
    m [out], which starts at the base's. In the gradient the length that a row would have had counts as a constant, as there
    (section 4.3) and in PEFT.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        device = base.weight.device
        self.lora_a = nn.Parameter(torch.empty(config.rank, base.in_features, dtype=dtype, device=device))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, config.rank, dtype=dtype, device=device))
        self.magnitude = nn.Parameter(torch.empty(base.out_features, dtype=dtype, device=device)) if config.dora else None
        self.scale = lora_scale(config.alpha, config.rank, rslora=config.rslora)
        self.reference: tuple[Tensor, ...] | None = None
        """What is trained, as it is in the frozen reference; None when that is the base model."""
        self.as_reference = False
        self.reset(generator)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that learn, in the order of ``merge_lora``."""
        return ("lora_a", "lora_b") if self.magnitude is None else ("lora_a", "lora_b", "magnitude")

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Back to the start; the next draws of ``generator``, a CPU one, decide A, so a seed means the same everywhere. Every
        rank must call it."""
        bound = 1.0 / math.sqrt(self.lora_a.shape[1])
        fill(self.lora_a, torch.empty(self.lora_a.shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator))
        self.lora_b.zero_()
        if self.magnitude is not None:
            weight = whole(self.weight)
            fill(self.magnitude, torch.linalg.vector_norm(weight.to(self.magnitude.dtype), dim=1))
        self.reference = None

    def freeze(self) -> None:
        """Makes the adapter, as it is now, the reference. Every rank must call it."""
        self.reference = tuple(whole(getattr(self, name)).clone() for name in self.trained)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = computing(self.weight), None if self.bias is None else computing(self.bias)
        trained: list[Tensor] = [getattr(self, name) for name in self.trained]
        if self.as_reference:
            if self.reference is None:
                return nn.functional.linear(x, weight, bias)
            trained = [like(parameter, values) for parameter, values in zip(trained, self.reference, strict=True)]
        lora_a, lora_b, *magnitude = map(computing, trained)
        inner = None if magnitude else bias
        rows: Tensor = _LoraProduct.apply(x.reshape(-1, x.shape[-1]), weight, inner, lora_a, lora_b, self.scale)  # type: ignore[no-untyped-call]
        if magnitude:
            with torch.no_grad():
                norms = row_norms(weight, lora_a, lora_b, self.scale)
            rows = rows * (magnitude[0] / norms).to(rows.dtype)
            rows = rows if bias is None else rows + bias
        return rows.view(*x.shape[:-1], -1)


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


def adapter_names(layers: Mapping[str, LoraLinear]) -> Iterator[tuple[str, str]]:
    """The adapter's names in PEFT, and those of the same parameters here."""
    for name, layer in layers.items():
        yield from ((f"{_PREFIX}{name}.{_IN_PEFT[part]}", f"{name}.{part}") for part in layer.trained)


def reference_tensors(layers: Mapping[str, LoraLinear]) -> Iterator[tuple[str, Tensor]]:
    """The frozen reference, under names of this module's own; nothing where it is the base model."""
    for name, layer in layers.items():
        if layer.reference is not None:
            for part, tensor in zip(layer.trained, layer.reference, strict=True):
                yield _in_reference(name, part), tensor


def load_reference_tensors(layers: Mapping[str, LoraLinear], tensors: Mapping[str, Tensor]) -> None:
    """Takes over what :func:`reference_tensors` gave."""
    for name, layer in layers.items():
        names = [_in_reference(name, part) for part in layer.trained]
        known = names[0] in tensors
        layer.reference = tuple(tensors[each].to(layer.lora_a.device) for each in names) if known else None


def _in_reference(layer: str, part: str) -> str:
    return f"{layer}.{part.removeprefix('lora_')}"


def load_adapter_tensors(layers: Mapping[str, LoraLinear], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copies an adapter of the same shape into ``layers``; all or nothing.

    Raises:
        TrainerError: names, shapes or scale differ.
    """
    parameters = {f"{name}.{part}": layer.get_parameter(part) for name, layer in layers.items() for part in layer.trained}
    own = {name: parameters[here] for name, here in adapter_names(layers)}
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise TrainerError(
            f"the adapter has other layers: {len(odd)} names differ, first '{odd[0]}'",
            hint="use the same lora.targets and lora.dora",
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise TrainerError(
                f"'{name}' is {tuple(tensor.shape)}, not {tuple(own[name].shape)}", hint="use the same lora.rank"
            )
    scale = lora_scale(float(config["lora_alpha"]), int(config["r"]), rslora=bool(config.get("use_rslora")))
    if any(layer.scale != scale for layer in layers.values()):
        raise TrainerError(f"the adapter scales its update by {scale:g}", hint="use the same lora.alpha and lora.rslora")
    for name, tensor in tensors.items():
        fill(own[name], tensor)


def write_adapter(
    folder: Path, layers: Mapping[str, LoraLinear], parameter: Callable[[str], Tensor], config: LoraConfig, base_model: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT reads them. Call inside ``whole_folder``."""
    settings = peft_settings(layers, config, base_model)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    tensors = ((name, parameter(here)) for name, here in adapter_names(layers))
    write_safetensors(folder / "adapter_model.safetensors", tensors)


def peft_settings(layers: Mapping[str, LoraLinear], config: LoraConfig, base_model: str) -> dict[str, Any]:
    """The adapter's configuration as PEFT writes it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "inference_mode": True,
    }
