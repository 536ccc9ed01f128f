"""Embeddings, norms, attention and feed-forward layers with a backward pass written out: transformers' numbers, a shorter way.

Autograd keeps what every small step of these layers was given, and walks through memory once or more for each. Written out,
RMSNorm keeps its output alone, the feed-forward layer its input and two projections, attention its input, queries, keys and
values; what else the backward pass needs is made again there by a cheap product. What is made and dropped lies in one room for
all layers. At the few hundred nodes of a micro-batch this is a quarter of a model's activations. Queries and keys are turned by
their positions on the way to where attention reads them, which takes no steps of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from evergrad.training.attention import AttentionPlans
from evergrad.training.forest import Forest, TrainedTokens, grow
from evergrad.training.room import Room
from evergrad.training.rotary_attention import rotary_attention
from evergrad.training.weight_gradients import looked_up, weight_gradient
from evergrad.types import TrainingSample

_LEAST_DIVISOR = 1e-20
"""Weights of a norm down to this size can be divided by without loss."""
_PROBE_ROWS = 3
_PROBE_REACH = 100.0
"""How far a probe drives a gate and what it lets through; the families that clamp them do so at 7 or 10."""


def write_out_backward(model: nn.Module) -> None:
    """Replaces the forward of every layer whose form is known and found to compute the same; leaves all others alone.

    RMSNorm: Zhang & Sennrich 2019 (arXiv 1910.07467). Feed-forward with a gate, SwiGLU: Shazeer 2020 (arXiv 2002.05202).
    Attention with rotary positions: see :mod:`evergrad.training.rotary_attention`.
    """
    room = Room()
    for module in model.modules():
        if _is_norm(module):
            module.forward = _Norm(module)
        elif _is_gated(module):
            module.forward = _GatedFeedForward(module, room)
        elif _is_embedding(module):
            module.forward = _Embedding(module)
        elif (attention := _as_rotary(module, room)) is not None:
            module.forward = attention


class _Embedding:
    """Forward of an input embedding."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, module.forward

    def __call__(self, token_ids: Tensor) -> Tensor:
        module: Any = self._module
        if not _is_whole(module.weight):
            return self._own(token_ids)  # type: ignore[no-any-return]
        return looked_up(module.weight, token_ids, module.padding_idx)


class _Norm:
    """Forward of an RMSNorm module."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._module.weight
        if not _is_whole(weight) or x.dtype != torch.float32 or weight.dtype != torch.float32:
            # transformers goes through float32 whatever it is given; that path is its own to define.
            return self._own(x)  # type: ignore[no-any-return]
        return rms_norm(x, weight, self._module.variance_epsilon)  # type: ignore[arg-type]


class _GatedFeedForward:
    """Forward of ``down(silu(gate(x)) · up(x))`` for plain linear layers; of adapted or sharded ones it is the module's own."""

    def __init__(self, module: nn.Module, room: Room) -> None:
        self._module, self._own, self._room = module, module.forward, room

    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        layers: tuple[Any, ...] = (module.gate_proj, module.up_proj, module.down_proj)
        if not _are_plain(layers):
            return self._own(x)  # type: ignore[no-any-return]
        rows = x.reshape(-1, x.shape[-1])
        gate, up, down = (layer.weight for layer in layers)
        output = gated_feed_forward(rows, gate, up, down, self._room)
        return output.view(*x.shape[:-1], -1)


class _RotaryAttention:
    """Forward of an attention module over a forest; with adapted or sharded layers it is the module's own."""

    def __init__(self, module: nn.Module, window: int | None, room: Room) -> None:
        self._module, self._own, self._window, self._room = module, module.forward, window, room

    def __call__(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        module: Any = self._module
        layers = _projections(module)
        if "forest_plans" not in given or not _are_plain(layers):
            return self._own(hidden_states, **given)  # type: ignore[no-any-return]
        cos, sin = given["position_embeddings"]
        plan = given["forest_plans"].for_window(self._window)
        query, key, value, output = (layer.weight for layer in layers)
        weights, position = (query, key, value, output), (cos[0], sin[0])
        read = rotary_attention(hidden_states[0], weights, position, plan, module.scaling, self._room)
        return read[None], None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight · x / sqrt(mean(x²) + eps)`` over the last dimension; x [..., width], weight [width]."""
    rows: Tensor = _RmsNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps)  # type: ignore[no-untyped-call]
    return rows.view(x.shape)


def gated_feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, room: Room) -> Tensor:
    """``(silu(x gateᵀ) · x upᵀ) downᵀ``; x [rows, width], gate and up [inner, width], down [width, inner]."""
    return _Gated.apply(x, gate, up, down, room)  # type: ignore[no-untyped-call, no-any-return]


class _RmsNorm(torch.autograd.Function):
    """With s = 1/sqrt(mean(x²) + eps), n = s·x and y = w·n: dx = s·(w·g − n · mean(y·g)), dw = Σ over rows of n·g.

    Keeps y, which the layer after it keeps anyway, and finds n = y / w; where no weight is zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y = (x * scale).mul_(weight)
        # Elsewhere than on a CPU, to ask would be to wait.
        ctx.inverted = x.device.type == "cpu" and bool(weight.abs().min() > _LEAST_DIVISOR)
        ctx.save_for_backward(y if ctx.inverted else x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        kept, weight, scale = ctx.saved_tensors
        normed = kept / weight if ctx.inverted else kept * scale
        product = grad * normed
        grad_weight = product.sum(0) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            along = torch.mv(product, weight)[:, None].div_(-weight.shape[0])
            grad_x = torch.mul(grad, weight, out=product).addcmul_(normed, along).mul_(scale)
        return grad_x, grad_weight, None


class _Gated(torch.autograd.Function):
    """Keeps both projections; what ``down`` is given is made of them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, room: Room) -> Tensor:
        gated, raised = torch.mm(x, gate.t()), torch.mm(x, up.t())
        ctx.save_for_backward(x, gate, up, down, gated, raised)
        ctx.room = room
        inner = torch.ops.aten.silu.out(gated, out=room.take("inner", gated.shape, gated)).mul_(raised)
        return torch.mm(inner, down.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, gated, raised = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad[:4]
        grad_inner = torch.mm(grad, down)
        active = functional.silu(gated)
        inner = torch.mul(active, raised, out=ctx.room.take("inner", gated.shape, gated)) if wants_down else None
        grad_down = weight_gradient(down, grad, inner) if inner is not None else None
        grad_raised = active.mul_(grad_inner)
        grad_gated = torch.ops.aten.silu_backward(grad_inner.mul_(raised), gated)
        grad_x = torch.mm(grad_gated, gate).addmm_(grad_raised, up) if wants_x else None
        grad_gate = weight_gradient(gate, grad_gated, x) if wants_gate else None
        grad_up = weight_gradient(up, grad_raised, x) if wants_up else None
        return grad_x, grad_gate, grad_up, grad_down, None


def _are_plain(layers: Sequence[Any]) -> bool:
    """Linear layers without bias or adapter, of whole weights."""
    return all(type(layer) is nn.Linear and layer.bias is None and _is_whole(layer.weight) for layer in layers)


def _projections(module: nn.Module) -> list[Any]:
    return [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]


def _is_whole(weight: object) -> bool:
    """Not a rank's share of a weight, which only the layer that it belongs to gathers."""
    return type(weight) is nn.Parameter


def _is_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not (module.sparse or module.scale_grad_by_freq)


@torch.no_grad()
def _is_norm(module: nn.Module) -> bool:
    """An RMSNorm that multiplies by its weight as it is; some families multiply by 1 + weight."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return False
    x = _probe(len(weight), weight.to(torch.float32))
    expected = module(x.to(weight.dtype)).to(torch.float32)
    tolerance = _tolerance(weight)
    return torch.allclose(rms_norm(x, weight.to(torch.float32), eps), expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def _is_gated(module: nn.Module) -> bool:
    """A SwiGLU that computes nothing else: families put multipliers or clamps between layers of these very names."""
    layers: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not _are_plain(layers):
        return False
    gate, up, down = (layer.weight for layer in layers)
    if not gate.shape == up.shape == down.t().shape:
        return False
    x = _probe(gate.shape[1], gate)
    # As they are, and so large that both projections reach what a clamp would cut off.
    reached = torch.minimum((x @ gate.t().float()).abs().amax(-1), (x @ up.t().float()).abs().amax(-1))
    large = x * (_PROBE_REACH / reached.clamp(min=1e-3))[:, None]
    x = torch.cat([x, large, -large]).to(gate.dtype)
    try:
        own = module(x)
    except Exception:  # it wants more than hidden states: nothing that is known here
        return False
    return _agree(own, gated_feed_forward(x, gate, up, down, Room()))


@torch.no_grad()
def _as_rotary(module: nn.Module, room: Room) -> _RotaryAttention | None:
    """The replacement of an attention module that turns pairs half a head apart, and does nothing else to its projections."""
    layers = _projections(module)
    width, scaling = getattr(module, "head_dim", None), getattr(module, "scaling", None)
    if not _are_plain(layers) or not isinstance(width, int) or not isinstance(scaling, float):
        return None
    query, key, value, output = (layer.weight for layer in layers)
    if not (query.shape == output.t().shape and key.shape == value.shape and len(query) % len(key) == len(key) % width == 0):
        return None
    forest = _probe_forest()
    plans = AttentionPlans(forest, query.device, query.dtype)
    x = _probe(query.shape[1], query, forest.num_nodes)
    angles = _probe(width, query, forest.num_nodes)
    # Scores of which some differ much, so that it shows when only they are computed in another way.
    x = (x * 4 / (x @ query.t().float()).abs().amax()).to(query.dtype)
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    try:
        own, _ = module(x[None], position_embeddings=(cos[None], sin[None]), attention_mask=None, forest_plans=plans)
    except Exception:  # it wants more, or gives more
        return None
    if len(plans.windows) != 1:
        return None
    (window,) = plans.windows
    expected = rotary_attention(x, (query, key, value, output), (cos, sin), plans.for_window(window), scaling, room)
    return _RotaryAttention(module, window, room) if _agree(own, expected[None]) else None


def _probe_forest() -> Forest:
    """Two samples that begin alike."""
    samples = [
        TrainingSample(ids, (0,) * 5 + (1,), (0.0,) * 6, (0.0,) * 6, 0, 0) for ids in ((0, 1, 2, 3, 4, 5), (0, 1, 6, 7, 8, 9))
    ]
    return grow([TrainedTokens(sample, np.array([5]), 1) for sample in samples])


def _agree(own: object, ours: Tensor) -> bool:
    """Whether the module's own output and ours are the same but for rounding, row by row, and not simply zero."""
    if not isinstance(own, Tensor) or own.shape != ours.shape:
        return False
    largest = ours.double().abs().amax(-1, keepdim=True)
    return bool((largest > 0).all() and ((own.double() - ours.double()).abs() <= _tolerance(ours) * largest).all())


def _tolerance(weight: Tensor) -> float:
    return 1e-5 if weight.dtype in (torch.float32, torch.float64) else 2e-2


def _probe(width: int, like: Tensor, rows: int = _PROBE_ROWS) -> Tensor:
    """[rows, width] in float32; no two rows point the same way."""
    return torch.linspace(-1.7, 2.3, rows * width, device=like.device).view(rows, width)
