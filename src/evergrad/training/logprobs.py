"""Log-probabilities of chosen tokens without ever holding [rows, vocabulary] at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MAX_LOGITS_BYTES = 64 * 2**20
"""Logits that exist at one time."""


def chosen_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor) -> Tensor:
    """``log softmax((hidden @ weightᵀ + bias) / temperature)`` at ``targets``.

    Args:
        hidden: [P, width].
        weight: [vocabulary, width], the output embedding; gets a gradient if it wants one.
        bias: [vocabulary] or None.
        targets: [P] int64.
        temperatures: [P], greater than 0.

    Returns:
        [P], in float32 or wider.
    """
    return _ChosenLogprobs.apply(hidden, weight, bias, targets, temperatures)  # type: ignore[no-untyped-call, no-any-return]


class _ChosenLogprobs(torch.autograd.Function):
    """Logits are made chunk by chunk and made again in the backward pass, where they turn into their own gradient in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor) -> Tensor:
        chunk = max(1, _MAX_LOGITS_BYTES // (weight.shape[0] * max(4, weight.element_size())))
        logprobs = temperatures.new_empty(len(targets))
        normalizers = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperatures[part])
            normalizers[part] = torch.logsumexp(logits, -1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - normalizers[part]
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normalizers)
        ctx.chunk = chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets, temperatures, normalizers = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, bias, temperatures[part])
            # d logprob / d logit = (1[target] − p) / temperature
            scale = grad[part] / temperatures[part]
            logits.sub_(normalizers[part, None]).exp_().mul_(-scale[:, None])
            logits.scatter_add_(1, targets[part, None], scale[:, None])
            logits = logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), hidden[part])
            if grad_bias is not None:
                grad_bias += logits.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(temperatures.dtype)
    return logits.div_(temperatures[:, None])
