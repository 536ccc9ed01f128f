"""The critic of PPO: what is still to be earned from here on, said before each token.

It is a small head on the policy's own hidden states, the ones that also choose the next token, without a gradient into them.
A critic of its own would be a second model in memory and a second forward pass of every token; a gradient into the shared
layers would have the value's error move the policy. What it costs is that the head sees what the policy cares to represent.
It is saved with the trainer's checkpoints and is no part of an export. Each rank holds the whole of it, as it is small; what
the ranks' shares of a batch say of it is added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evergrad.training.config import CriticConfig
from evergrad.training.parts import sum_of_squares
from evergrad.training.ranks import Ranks

_WEIGHT, _MOMENT = "weight", "optimizer"


class Critic:
    """``V(s) = w₂ · silu(W₁ s + b₁) + b₂`` with its own AdamW; starts at V = 0."""

    def __init__(self, config: CriticConfig, width: int, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        """
        Args:
            width: Of a hidden state.
            seed: Of the first layer's weights.
        """
        self.config = config
        first, last = nn.Linear(width, config.hidden), nn.Linear(config.hidden, 1)
        with torch.no_grad():
            first.weight.normal_(std=width**-0.5, generator=torch.Generator().manual_seed(seed))
            for each in (first.bias, last.weight, last.bias):
                each.zero_()
        self._layers = nn.Sequential(first, nn.SiLU(), last).to(device, dtype)
        self._parameters = dict(self._layers.named_parameters())
        self._optimizer = self._fresh_optimizer()
        self._errors: list[tuple[Tensor, Tensor, Tensor]] = []

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._parameters.values(), lr=self.config.lr, weight_decay=0.0, fused=True)

    def values(self, states: Tensor) -> Tensor:
        """[rows, width] → [rows]; the gradient ends at the states."""
        layer = self._parameters["0.weight"]
        found: Tensor = self._layers(states.detach().to(layer.dtype)).squeeze(-1)
        return found

    def backward(self, values: Tensor, old: Tensor, returns: Tensor, num_valid_tokens: int) -> None:
        """Adds the gradient of this micro-batch's part of the value loss; all [tokens].

        Args:
            values: Of now, with the gradient.
            old: Before the first update on the batch.
            returns: What the values should have been.
            num_valid_tokens: Of the whole batch.
        """
        loss = value_loss(values, old, returns, self.config.clip)
        (loss.sum() / num_valid_tokens).backward()  # type: ignore[no-untyped-call]
        self._errors.append((loss.detach(), returns, returns - values.detach()))

    def optim_step(self, ranks: Ranks) -> dict[str, float]:
        """Adds up the gradients of all ranks, clips the sum, applies it, and forgets it; reports what was collected since the
        last one. All of ``ranks`` must call it.

        Metrics, when there was any token: ``value_loss``, ``value_mean_error`` (mean of return − value),
        ``explained_variance`` (``1 − Var(return − value) / Var(return)``: 0 says no more than a constant, 1 says all; left out
        when all returns are equal), ``critic_grad_norm`` (before clipping) and ``critic_skipped`` (1 when it was not finite,
        and nothing moved).
        """
        loss, returns, errors = torch.cat(ranks.everyones(self._collected()), dim=1)
        self.forget()
        if not len(loss):
            return {}
        for parameter in self._parameters.values():
            if parameter.grad is None:  # this rank's share had nothing to say of it
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        ranks.add_up(grads)
        norm = float(sum_of_squares(grads).sqrt())
        metrics = {
            "value_loss": float(loss.mean()),
            "value_mean_error": float(errors.mean()),
            "critic_grad_norm": norm,
            "critic_skipped": float(not torch.isfinite(torch.tensor(norm))),
        }
        variance = float(returns.var(correction=0))
        if variance > 0.0:
            metrics["explained_variance"] = 1.0 - float(errors.var(correction=0)) / variance
        if not metrics["critic_skipped"]:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self.config.grad_clip, torch.tensor(norm))
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return metrics

    def _collected(self) -> Tensor:
        """[3, tokens]: loss, return, and return − value, of this rank's share."""
        rows = [torch.stack(each).double().cpu() for each in self._errors]
        return torch.cat([torch.empty(3, 0, dtype=torch.float64), *rows], dim=1)

    def forget(self) -> None:
        """Drops what was collected, but not the gradient."""
        self._errors = []

    def zero_grad(self) -> None:
        """Drops the gradient and what was collected."""
        self._optimizer.zero_grad(set_to_none=True)
        self.forget()

    def state(self) -> dict[str, Tensor]:
        """All that :meth:`load_state` needs to go on exactly from here."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        tensors = {f"{_WEIGHT}:{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for parameter, values in self._optimizer.state.items():
            tensors |= {f"{_MOMENT}:{key}:{names[id(parameter)]}": value for key, value in values.items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`state` gave, of a critic of the same shape."""
        state: dict[Tensor, dict[str, Any]] = {}
        with torch.no_grad():
            for full_name, tensor in tensors.items():
                kind, _, name = full_name.partition(":")
                if kind == _WEIGHT:
                    self._parameters[name].copy_(tensor)
                else:
                    key, _, name = name.partition(":")
                    parameter = self._parameters[name]
                    state.setdefault(parameter, {})[key] = tensor.clone().to(parameter.device)
        self._optimizer = self._fresh_optimizer()
        self._optimizer.state.update(state)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """``max((V − R)², (V_old + clamp(V − V_old, ±clip) − R)²) / 2``, [tokens] (PPO's clipped value loss; Engstrom et al. 2020,
    arXiv 2005.12729)."""
    near = old + (values - old).clamp(-clip, clip)
    return torch.max((values - returns).square(), (near - returns).square()) / 2
