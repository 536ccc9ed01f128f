"""Backward passes written out give what autograd gives through transformers' own layers, and replace no others."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import CohereConfig, GemmaConfig, LlamaConfig, MistralConfig, Qwen3Config
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from evergrad.training.attention import ATTENTION_NAME, AttentionPlans
from evergrad.training.forest import Forest, TrainedTokens, plant
from evergrad.training.layers import gated_feed_forward, rms_norm, write_out_backward
from evergrad.training.room import Room
from evergrad.training.rotary_attention import rotary_attention
from tests.training.conftest import make_sample

WIDTH, INNER = 12, 20
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size": WIDTH, "vocab_size": 32}


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_are_the_derivatives() -> None:
    torch.manual_seed(0)
    for dead in ((), (2,), range(WIDTH)):  # weights of a norm that are zero cannot be divided by
        weight = torch.randn(WIDTH, dtype=torch.float64)
        weight[list(dead)] = 0.0
        given = double(2, 3, WIDTH), weight.requires_grad_()
        assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), given)
    weights = double(INNER, WIDTH), double(INNER, WIDTH), double(WIDTH, INNER)
    assert torch.autograd.gradcheck(gated_feed_forward, (double(5, WIDTH), *weights, Room()))


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1, 2)], ids=str)
def test_frozen_weights_get_no_gradient(frozen: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weights = [double(INNER, WIDTH), double(INNER, WIDTH), double(WIDTH, INNER)]
    for number in frozen:
        weights[number].requires_grad_(False)
    assert torch.autograd.gradcheck(gated_feed_forward, (double(5, WIDTH), *weights, Room()))


def forest() -> Forest:
    """Three samples that leave one another at the third and fifth of seven tokens."""
    samples = [make_sample([1, 2, 3, 4, 5], [6, 7, 8]), make_sample([1, 2, 3, 4, 9], [9, 9, 9]), make_sample([1, 2], [5] * 6)]
    (whole,) = plant([TrainedTokens(sample, np.array([7]), 1) for sample in samples], 10**6)
    assert whole.num_nodes == 7 + 3 + 5
    return whole


@pytest.mark.parametrize("frozen", [(), (0,), (2, 3), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize(("key_heads", "window"), [(1, None), (2, 3), (4, None)])
def test_gradients_of_attention_are_the_derivatives(key_heads: int, window: int | None, frozen: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    trees, width, heads = forest(), 6, 4
    plan = AttentionPlans(trees, torch.device("cpu"), torch.float64).for_window(window)
    given = [double(trees.num_nodes, WIDTH)]
    given += [double(rows * width, WIDTH) for rows in (heads, key_heads, key_heads)]
    given.append(double(WIDTH, heads * width))
    for number in frozen:
        given[number].requires_grad_(False)
    angles, room = torch.randn(trees.num_nodes, width, dtype=torch.float64), Room()

    def attention(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return rotary_attention(x, weights, (angles.cos(), angles.sin()), plan, 0.4, room)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(attention, given)


def test_layers_that_share_a_room_compute_what_each_would_alone() -> None:
    """Bit for bit, whatever shapes lay there before."""
    torch.manual_seed(0)
    trees, width = forest(), 6
    plan = AttentionPlans(trees, torch.device("cpu"), torch.float64).for_window(None)
    angles = torch.randn(trees.num_nodes, width, dtype=torch.float64)
    given = [double(trees.num_nodes, WIDTH), *(double(4 * width, WIDTH) for _ in range(3)), double(WIDTH, 4 * width)]
    narrow, wide = ([double(size, WIDTH), double(size, WIDTH), double(WIDTH, size)] for size in (INNER, 3 * INNER))

    def gradients(rooms: list[Room]) -> list[torch.Tensor]:
        x, *weights = given
        for room in rooms[:2]:
            x = rotary_attention(x, tuple(weights), (angles.cos(), angles.sin()), plan, 0.4, room)  # type: ignore[arg-type]
        for layer, room in zip((narrow, wide, narrow), rooms[2:], strict=True):
            x = gated_feed_forward(x, *layer, room)
        return [x, *torch.autograd.grad(x.square().sum(), [*given, *narrow, *wide])]

    shared = Room()
    for found, expected in zip(gradients([shared] * 5), gradients([Room() for _ in range(5)]), strict=True):
        assert torch.equal(found, expected)


def attention(kind: str = "llama", **fields: Any) -> nn.Module:
    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaAttention, LlamaConfig),
        "mistral": (MistralAttention, MistralConfig),
        "cohere": (CohereAttention, CohereConfig),
        "qwen3": (Qwen3Attention, Qwen3Config),
    }
    module, config = kinds[kind]
    made: nn.Module = module(config(attn_implementation=ATTENTION_NAME, **HEADS, **fields), layer_idx=0)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval()


def attended(module: nn.Module, x: torch.Tensor, trees: Forest) -> torch.Tensor:
    angles = torch.randn(1, trees.num_nodes, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(x)
    plans = AttentionPlans(trees, torch.device("cpu"), x.dtype)
    output: torch.Tensor = module(
        hidden_states=x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None, forest_plans=plans
    )[0]
    return output


@pytest.mark.parametrize(
    ("kind", "fields"), [("llama", {}), ("mistral", {"sliding_window": 3}), ("mistral", {"sliding_window": None})]
)
def test_equal_to_the_attention_that_is_replaced(kind: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = attention(kind, **fields).double()
    ours, trees = copy.deepcopy(theirs), forest()
    write_out_backward(ours)
    assert "forward" in vars(ours)
    x = torch.randn(1, trees.num_nodes, WIDTH, dtype=torch.float64)
    results = []
    for module in (ours, theirs):
        given = x.clone().requires_grad_()
        output = attended(module, given, trees)
        output.square().sum().backward()
        results.append([output, given.grad, *(parameter.grad for parameter in module.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class ScaledQueries(LlamaAttention):
    """One thing more between layers of the same names, too small to show where scores are small."""

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
        self.q_proj.weight.mul_(1.001)
        output = super().forward(hidden_states, **given)
        self.q_proj.weight.div_(1.001)
        return output


@pytest.mark.parametrize("kind", ["cohere", "qwen3", "biases", "scaled queries", "all zero"])
def test_other_forms_of_attention_are_left_alone(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "scaled queries":
        module: nn.Module = ScaledQueries(LlamaConfig(attn_implementation=ATTENTION_NAME, **HEADS), layer_idx=0)
    else:
        module = attention("llama", attention_bias=True) if kind == "biases" else attention(*{kind} - {"all zero"})
    if kind == "all zero":
        nn.init.zeros_(module.o_proj.weight)  # type: ignore[union-attr, arg-type]
    write_out_backward(module)
    assert "forward" not in vars(module)


def norm() -> nn.Module:
    module = LlamaRMSNorm(WIDTH, eps=1e-5)
    nn.init.normal_(module.weight)
    return module


def feed_forward() -> nn.Module:
    return LlamaMLP(LlamaConfig(hidden_size=WIDTH, num_attention_heads=2, intermediate_size=INNER))


@pytest.mark.parametrize("make", [norm, feed_forward])
def test_equal_to_the_layer_that_is_replaced(make: object) -> None:
    torch.manual_seed(0)
    theirs = make()  # type: ignore[operator]
    ours = copy.deepcopy(theirs)
    write_out_backward(ours)
    assert "forward" in vars(ours)
    x = torch.randn(1, 7, WIDTH)
    results = []
    for module in (ours, theirs):
        given = x.clone().requires_grad_()
        output = module(given)
        output.square().sum().backward()
        results.append([output, given.grad, *(parameter.grad for parameter in module.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_embedding_learns_from_the_tokens_that_were_there_but_for_its_padding() -> None:
    torch.manual_seed(0)
    theirs = nn.Embedding(9, WIDTH, padding_idx=3)
    ours = copy.deepcopy(theirs)
    write_out_backward(ours)
    assert "forward" in vars(ours)
    places = set()
    for ids in ([[3, 1, 1, 8, 1]], [[1, 0, 3, 3]]):
        for module in (ours, theirs):
            output = module(torch.tensor(ids))
            output.backward(torch.arange(output.numel(), dtype=torch.float32).view_as(output))
        places.add(ours.weight.grad.data_ptr())  # type: ignore[union-attr]
        torch.testing.assert_close(ours(torch.tensor(ids)), theirs(torch.tensor(ids)))
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    assert len(places) == 1


@pytest.mark.parametrize("kind", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_other_embeddings_are_left_alone(kind: dict[str, Any]) -> None:
    module = nn.Embedding(9, WIDTH, **kind)
    write_out_backward(module)
    assert "forward" not in vars(module)


def test_later_micro_batches_add_to_the_gradient_that_is_there() -> None:
    torch.manual_seed(0)
    module, other, trees = feed_forward(), attention(), forest()
    for replaced in (module, other):
        write_out_backward(replaced)
    x = torch.randn(1, trees.num_nodes, WIDTH)
    for parameters, run in (
        (list(module.parameters()), lambda: module(x)),
        (list(other.parameters()), lambda: attended(other, x, trees)),
    ):
        run().sum().backward()
        first, places = [p.grad.clone() for p in parameters], [p.grad.data_ptr() for p in parameters]
        run().mul(2).sum().backward()
        assert [p.grad.data_ptr() for p in parameters] == places
        for parameter, alone in zip(parameters, first, strict=True):
            torch.testing.assert_close(parameter.grad, 3 * alone, rtol=1e-5, atol=1e-5)


def test_other_forms_are_left_alone() -> None:
    torch.manual_seed(0)
    shifted = GemmaRMSNorm(WIDTH)  # multiplies by 1 + weight
    nn.init.normal_(shifted.weight)
    shifted.variance_epsilon = 1e-6
    other_activation = GemmaMLP(GemmaConfig(hidden_size=WIDTH, intermediate_size=INNER, hidden_activation="gelu"))
    for module in (shifted, other_activation, nn.Linear(WIDTH, WIDTH)):
        write_out_backward(module)
        assert "forward" not in vars(module)


class Altered(LlamaMLP):
    """Layers of the same names, and one thing more between them, as some families have it."""

    def __init__(self, alteration: str) -> None:
        super().__init__(LlamaConfig(hidden_size=WIDTH, num_attention_heads=2, intermediate_size=INNER))
        self.alteration = alteration

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        match self.alteration:
            case "multiplied gate":
                gate = gate * 0.5
            case "clamped gate":
                gate = gate.clamp(max=7.0)
            case "clamped up":
                up = up.clamp(-10.0, 10.0)
            case "shifted up":
                up = up + 1
            case "wants more":
                assert extra is not None
                up = up * extra
        y: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return y * 0.25 if self.alteration == "multiplied down" else y


@pytest.mark.parametrize("std", [0.02, 1.0])
@pytest.mark.parametrize(
    ("alteration", "known"),
    [
        ("none", True),
        ("multiplied gate", False),
        ("multiplied down", False),
        ("clamped gate", False),
        ("clamped up", False),
        ("shifted up", False),
        ("wants more", False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_a_layer_that_computes_the_same_is_replaced(alteration: str, known: bool, std: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Altered(alteration)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    write_out_backward(module.to(dtype))
    assert ("forward" in vars(module)) == known


def test_a_layer_that_gives_nothing_yet_is_left_alone() -> None:
    module = Altered("multiplied down")
    nn.init.zeros_(module.down_proj.weight)
    write_out_backward(module)
    assert "forward" not in vars(module)


def test_a_layer_with_adapters_or_bias_runs_its_own_forward() -> None:
    torch.manual_seed(0)
    with_bias = LlamaMLP(LlamaConfig(hidden_size=WIDTH, num_attention_heads=2, intermediate_size=INNER, mlp_bias=True))
    expected = copy.deepcopy(with_bias)
    write_out_backward(with_bias)
    x = torch.randn(4, WIDTH)
    assert torch.equal(with_bias(x), expected(x))
    adapted = feed_forward()
    write_out_backward(adapted)
    adapted.up_proj = nn.Sequential(adapted.up_proj, nn.Tanh())  # as an adapter does: another module in its place
    assert not torch.allclose(adapted(x), gated_feed_forward(x, *adapted.parameters(), Room()))


def test_attention_with_adapters_runs_its_own_forward() -> None:
    torch.manual_seed(0)
    adapted, trees = attention(), forest()
    expected = copy.deepcopy(adapted)
    write_out_backward(adapted)
    for module in (adapted, expected):
        module.v_proj = nn.Sequential(module.v_proj, nn.Tanh())
    x = torch.randn(1, trees.num_nodes, WIDTH)
    assert torch.equal(attended(adapted, x, trees), attended(expected, x, trees))


def test_another_dtype_takes_the_layers_own_path() -> None:
    torch.manual_seed(0)
    theirs = norm().to(torch.bfloat16)
    ours = copy.deepcopy(theirs)
    write_out_backward(ours)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))
