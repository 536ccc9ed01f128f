"""Log-probabilities of chosen tokens, and entropies; [rows, vocabulary] is held for a bounded number of rows only."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from evergrad.training.weight_gradients import held_gradient

_MAX_LOGITS_BYTES = 64 * 2**20
"""Logits that are made at one time: enough rows for fast products, and few passes over the gradient of the weight."""

_MAX_KEPT_BYTES = 256 * 2**20
"""Distributions that are kept for the backward pass when all of them fit; otherwise they are made again there."""


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    row_of_pair: Tensor,
    targets: Tensor,
    *,
    entropies: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax((hidden @ weightᵀ + bias) / temperature)`` at chosen (row, target) pairs; several may share a row.

    Args:
        hidden: [R, width].
        weight: [vocabulary, width], the output embedding; gets a gradient if it wants one.
        bias: [vocabulary] or None.
        temperatures: [R], greater than 0; their dtype, float32 or wider, is that of the logits.
        row_of_pair: [P] int64, ascending index into R.
        targets: [P] int64, all different within a row.
        entropies: Whether the entropy of each row's distribution is wanted.

    Returns:
        Log-probabilities [P] and entropies [R] in nats, or None; in the dtype of ``temperatures``, both with gradients.
        Backward may be called once: it uses up what was kept.
    """
    return _ChosenLogprobs.apply(hidden, weight, bias, temperatures, row_of_pair, targets, entropies)  # type: ignore[no-untyped-call, no-any-return]


class _ChosenLogprobs(torch.autograd.Function):
    """Distributions are made chunk by chunk; in the backward pass each turns into the gradient of its logits in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        row_of_pair: Tensor,
        targets: Tensor,
        wants_entropies: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        row_bytes = weight.shape[0] * temperatures.element_size()
        chunk = max(1, _MAX_LOGITS_BYTES // row_bytes)
        keep = len(hidden) * row_bytes <= _MAX_KEPT_BYTES and any(ctx.needs_input_grad[:3])
        firsts = torch.arange(0, len(hidden) + chunk, chunk, device=row_of_pair.device).clamp(max=len(hidden))
        cuts = list(zip(firsts.tolist(), torch.searchsorted(row_of_pair, firsts).tolist(), strict=True))
        ctx.chunks = [(slice(r0, r1), slice(p0, p1)) for (r0, p0), (r1, p1) in itertools.pairwise(cuts)]
        ctx.tempered = bool((temperatures != 1).any())
        ctx.kept = []
        logprobs = temperatures.new_empty(len(targets))
        entropies = temperatures.new_empty(len(hidden)) if wants_entropies else None
        for rows, pairs in ctx.chunks:
            every = _every_logprob(hidden[rows], weight, bias, temperatures[rows], ctx.tempered)
            logprobs[pairs] = every[row_of_pair[pairs] - rows.start, targets[pairs]]
            if entropies is not None:
                entropies[rows] = torch.special.entr(every.exp()).sum(-1)
            if keep:
                ctx.kept.append(every)
        ctx.save_for_backward(hidden, weight, bias, temperatures, row_of_pair, targets, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, temperatures, row_of_pair, targets, entropies = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        held = held_gradient(weight) if wants_weight else None
        grad_weight = held
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        grad = temperatures.new_zeros(len(targets)) if grad is None else grad
        kept, ctx.kept = ctx.kept[::-1], []
        for rows, pairs in ctx.chunks:
            every = kept.pop() if kept else _every_logprob(hidden[rows], weight, bias, temperatures[rows], ctx.tempered)
            local = row_of_pair[pairs] - rows.start
            scale = grad[pairs] / temperatures[rows][local]
            # d logprob / d logit = (1[target] − p) / temperature, added up over the pairs of a row.
            row_scale = torch.zeros_like(temperatures[rows]).index_add_(0, local, scale)
            if grad_entropies is None:
                grad_logits = every.exp_().mul_(-row_scale[:, None])
            else:
                # d entropy / d logit = −p (log p + entropy) / temperature.
                row_weight = grad_entropies[rows] / temperatures[rows]
                offset = row_scale + row_weight * entropies[rows]
                grad_logits = every.exp().mul_(every.mul_(row_weight[:, None]).add_(offset[:, None]).neg_())
            grad_logits[local, targets[pairs]] += scale
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[rows])
            elif wants_weight:
                grad_weight = torch.mm(grad_logits.t(), hidden[rows])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight if held is None else None, grad_bias, None, None, None, None


def _every_logprob(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, tempered: bool) -> Tensor:
    """[rows, vocabulary]"""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(temperatures.dtype)
    if tempered:
        logits.div_(temperatures[:, None])
    return torch.log_softmax(logits, -1, out=logits)
