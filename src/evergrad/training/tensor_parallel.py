"""Splits each layer of a model over the ranks of a mesh (Shoeybi et al. 2019, arXiv 1909.08053).

The first matrices of attention and MLP are split by their outputs (heads, inner units), the last by their inputs, so that a
rank computes its heads and units from start to end, and what the ranks give adds up to the layer's output. A norm that is
applied to each head stays whole, and sees a rank's own heads alone: of its gradient each rank has a part.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from evergrad.training.config import TrainerError
from evergrad.training.lora import LoraLinear

_OF_EACH_HEAD = "replicated_with_grad_allreduce"
"""How transformers calls a module that all ranks hold and apply to their own heads."""
_EVEN = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def split_layers(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Splits the layers in place, as the model's own configuration lays it out; embeddings and head stay whole.

    Returns the modules whose gradients have yet to be added up over the mesh.

    Raises:
        TrainerError: the configuration lays out nothing, or what is not supported here; or the ranks do not divide the model.
    """
    config = model.config.get_text_config()
    # Of the layers alone: log-probabilities want the whole of the head.
    whole_plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {pattern: style for pattern, style in whole_plan.items() if pattern.startswith("layers.")}
    strange = sorted(set(plan.values()) - {"colwise", "rowwise", _OF_EACH_HEAD})
    if not plan or strange:
        reason = f"it needs {', '.join(strange)}" if strange else "its configuration says nothing about how"
        raise TrainerError(
            f"{type(model).__name__} cannot be split by tensor_parallel: {reason}", hint="set tensor_parallel = 1"
        )
    for name in _EVEN:
        if getattr(config, name) % mesh.size():
            raise TrainerError(
                f"tensor_parallel = {mesh.size()} does not divide the model's {name} = {getattr(config, name)}",
                hint="choose a divisor of both numbers of heads and of the inner width",
            )
    decoder: nn.Module = getattr(model, model.base_model_prefix)
    planned = [
        (name, module, style)
        for name, module in decoder.named_modules()
        for pattern, style in plan.items()
        if fnmatch.fnmatchcase(name, pattern)
    ]
    matrices = {name: _style(module, style) for name, module, style in planned if isinstance(module, (nn.Linear, LoraLinear))}
    parallelize_module(decoder, mesh, matrices)
    return [module for _, module, style in planned if style == _OF_EACH_HEAD]


def _style(module: nn.Module, style: str) -> ParallelStyle:
    if isinstance(module, LoraLinear):
        return _LoraByOutputs() if style == "colwise" else _LoraByInputs()
    return ColwiseParallel() if style == "colwise" else RowwiseParallel()


class _SplitLora(ParallelStyle):
    """Of ``W + scale · B A``, W is split, and the one of A and B that touches the split side; the other is on every rank.

    The layer computes with what is here (``parts.computing``); the hooks exchange what the ranks share.
    """

    places: Mapping[str, Placement]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, place in self.places.items():
            parameter = module.get_parameter(name) if getattr(module, name) is not None else None
            if parameter is not None:
                # Every rank has loaded the same: each takes its part, and none sends.
                part = distribute_tensor(parameter.detach(), device_mesh, [place], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        return module


class _LoraByOutputs(_SplitLora):
    places = {"weight": Shard(0), "bias": Shard(0), "lora_a": Replicate(), "lora_b": Shard(0)}  # noqa: RUF012 (never changed)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # Each rank's outputs give the input a gradient of their own; in the backward pass these add up.
            x = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return (x.to_local(grad_placements=[Partial()]),)

        module.register_forward_pre_hook(enter)
        return super()._apply(module, device_mesh)


class _LoraByInputs(_SplitLora):
    places = {"weight": Shard(1), "lora_a": Shard(1), "lora_b": Replicate()}  # noqa: RUF012 (never changed)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module.bias is not None:
            raise TrainerError("tensor_parallel cannot split a LoRA layer with a bias", hint="set tensor_parallel = 1")

        def leave(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            parts = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_hook(leave)
        return super()._apply(module, device_mesh)
