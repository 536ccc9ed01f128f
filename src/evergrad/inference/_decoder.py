"""The Llama family's layers in few operations, for a CPU in float32: the values of transformers' definition, at less expense.

A decoding step has a few dozen rows. At that size most of what is not a matrix product is the price of making a tensor and of
starting an operation, not of the arithmetic, and transformers' definition has some sixty operations a layer. This one works in
place: residuals are added where they are, a norm writes into one buffer of the step, rotations and gates into their own
products. It is for what :func:`recognize` knows; any other model is computed by its own definition.

Shape letters: T tokens of the step, W tokens whose logits are wanted, H query heads, G key-value heads, D head size, E width of
the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evergrad.inference._attention import PagedCache
from evergrad.inference._linear import products


def recognize(module: nn.Module, cache: PagedCache) -> Decoder | None:
    """A decoder over the module's own layers and weights; None where it is not one of the family, or not in float32 on a CPU.

    Classes are compared, not names of attributes: a class that is derived from one of these may compute anything.
    """
    from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

    model: Any = module
    if type(model) not in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM):
        return None
    memory = cache.memory
    if memory.device.type != "cpu" or memory.dtype != torch.float32 or model.config.hidden_act not in ("silu", "swish"):
        return None
    return Decoder(model, cache)


class Decoder:
    """Computes a step with the modules of a Llama, Mistral, Qwen2 or Qwen3.

    Linear layers are called as modules, so packed weights and adapters count, and every weight is looked up when it is used, so
    that rebinding a parameter is all that a new version needs.
    """

    def __init__(self, module: Any, cache: PagedCache) -> None:
        self._cache = cache
        self._embed, self._rotary = module.model.embed_tokens, module.model.rotary_emb
        self._norm, self._head = module.model.norm, module.lm_head
        self._layers = [_Layer.of(layer, index, cache) for index, layer in enumerate(module.model.layers)]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
        """Logits [W, V] after the tokens at the places ``wanted`` of ``token_ids`` [T], which stand at ``positions`` [T].

        The cache must have the step's plan.
        """
        hidden: torch.Tensor = self._embed(token_ids)
        cos, sin = self._rotary(hidden[None], positions[None])
        step = _Step(cos[0, :, None], sin[0, :, None, : sin.shape[-1] // 2], torch.empty_like(hidden))
        last = self._layers[-1]
        for layer in self._layers:
            answer = layer.attend(hidden, step)
            if layer is last and len(wanted) < len(hidden):
                # Nothing follows that would read the others.
                places = torch.tensor(wanted, dtype=torch.long)
                hidden, answer = hidden.index_select(0, places), answer.index_select(0, places)
                step.normed = torch.empty_like(hidden)
            layer.finish(hidden, answer, step)
        logits: torch.Tensor = self._head(_rms_norm(hidden, self._norm, step.normed))
        return logits


@dataclass
class _Step:
    """What all layers of a step have in common."""

    cos: torch.Tensor
    """[T, 1, D]"""
    sin: torch.Tensor
    """[T, 1, D/2]; the other half is the same."""
    normed: torch.Tensor
    """[T, E], written by every norm and read before the next one."""


@dataclass(frozen=True)
class _Layer:
    """The modules of one layer. A residual is added in place, so ``hidden`` [T, E] goes through all of them."""

    index: int
    cache: PagedCache
    input_norm: Any
    attention: Any
    window: int | None
    post_norm: Any
    mlp: Any

    @classmethod
    def of(cls, layer: Any, index: int, cache: PagedCache) -> _Layer:
        attention = layer.self_attn
        # Qwen's layers have each their own, Mistral's have the configuration's, and Llama's have none.
        inherited = attention.config.sliding_window if attention.config.model_type == "mistral" else None
        window = getattr(attention, "sliding_window", inherited)
        return cls(index, cache, layer.input_layernorm, attention, window, layer.post_attention_layernorm, layer.mlp)

    def attend(self, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        """[T, H·D] what the heads found, before the output's product."""
        attention = self.attention
        rows, heads = _rms_norm(hidden, self.input_norm, step.normed), (len(hidden), -1, attention.head_dim)
        projected = products(rows, attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (each.view(heads) for each in projected)
        if hasattr(attention, "q_norm"):
            query, key = _rms_norm(query, attention.q_norm, query), _rms_norm(key, attention.k_norm, key)
        query, key = _rotated(query, step), _rotated(key, step)
        answer = self.cache.attend(self.index, query, key, value, attention.scaling, window=self.window)
        return answer.view(len(hidden), -1)

    def finish(self, hidden: torch.Tensor, answer: torch.Tensor, step: _Step) -> None:
        """The output's product and the feed-forward part, both added to ``hidden``."""
        hidden.add_(self.attention.o_proj(answer))
        rows, mlp = _rms_norm(hidden, self.post_norm, step.normed), self.mlp
        gate, up = products(rows, mlp.gate_proj, mlp.up_proj)
        hidden.add_(mlp.down_proj(nn.functional.silu(gate, inplace=True).mul_(up)))


def _rms_norm(rows: torch.Tensor, norm: Any, out: torch.Tensor) -> torch.Tensor:
    """``rows`` over the root of their mean square, times the norm's weight, written to ``out``, which may be ``rows``.

    Zhang and Sennrich 2019, arXiv 1910.07467. On a CPU ``torch.rms_norm`` is seven operations, each with its own tensor.
    """
    # One pass over the rows for all their norms; what follows is one number a row.
    scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / rows.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return torch.mul(rows, scale, out=out).mul_(norm.weight)


def _rotated(heads: torch.Tensor, step: _Step) -> torch.Tensor:
    """[T, H, D] with each pair (i, i + D/2) turned by its angle (RoPE: Su et al. 2021, arXiv 2104.09864)."""
    half = heads.shape[-1] // 2
    turned = heads * step.cos
    turned[..., :half].addcmul_(heads[..., half:], step.sin, value=-1.0)
    turned[..., half:].addcmul_(heads[..., :half], step.sin)
    return turned
