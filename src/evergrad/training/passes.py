"""Passes over one micro-batch: forward, loss and backward, and the reference's forward where a loss compares with one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evergrad.training.critic import Critic
from evergrad.training.forest import Forest
from evergrad.training.losses import Loss, TokenTensors, Totals
from evergrad.training.memory import Memory
from evergrad.training.meter import Meter
from evergrad.training.model import ScoreForest
from evergrad.training.weights import Weights


class Passes:
    """What a rank does with a forest that is its share of a batch; the gradients stay in the parameters.

    Args:
        model: Of a causal language model.
        weights: Know the frozen reference.
        score: Of ``model``, wherever its weights are.
        memory: Says which forests have their layers computed twice.
        device: Of this rank.
    """

    def __init__(self, model: Any, weights: Weights, score: ScoreForest, memory: Memory, device: torch.device) -> None:
        self._model, self._weights, self._score, self._memory, self._device = model, weights, score, memory, device

    def backward(self, forest: Forest, rule: Loss, totals: Totals, meter: Meter, critic: Critic | None) -> None:
        """Adds the gradient of the forest's part of the batch's loss, and of the critic's where samples have ``returns``."""
        reference = self._reference(forest) if rule.needs_reference else None
        with self._memory.computing(forest):
            logprobs, entropies, states = self._score(forest, entropies=rule.needs_entropy)

        def column(field: str) -> Tensor:
            return torch.from_numpy(forest.column(field)).to(logprobs)

        has_proximal = rule.needs_proximal and forest.items[0].sample.proximal_logprobs is not None
        tokens = TokenTensors(
            logprobs=logprobs,
            behaviour_logprobs=column("logprobs"),
            advantages=column("advantages"),
            rollout=torch.from_numpy(forest.rollout_of_token).to(self._device),
            lengths=torch.from_numpy(forest.rollout_lengths).to(self._device),
            group=torch.from_numpy(forest.group_of_rollout).to(self._device),
            reference_logprobs=reference,
            proximal_logprobs=column("proximal_logprobs") if has_proximal else None,
            entropies=entropies,
        )
        loss = rule.total(tokens, totals)
        loss.backward()  # type: ignore[no-untyped-call]
        meter.add(loss, tokens, forest)
        if critic is not None and forest.items[0].sample.returns is not None:
            values = self._values(critic, forest, states)
            critic.backward(values, column("values"), column("returns"), totals.tokens)

    def idle(self, forest: Forest, rule: Loss) -> None:
        """As many forward and backward passes as :meth:`backward` makes, with a gradient of zero."""
        if rule.needs_reference:
            self._reference(forest)
        with self._memory.computing(forest):
            logprobs = self._score(forest).logprobs
        logprobs.backward(torch.zeros_like(logprobs))  # type: ignore[no-untyped-call]

    def logprobs(self, forest: Forest) -> list[Tensor]:
        """One column, [T]."""
        return [self._score(forest).logprobs]

    def logprobs_and_values(self, forest: Forest, critic: Critic) -> list[Tensor]:
        """Two columns, [T]."""
        scores = self._score(forest)
        return [scores.logprobs, self._values(critic, forest, scores.states)]

    def _values(self, critic: Critic, forest: Forest, states: Tensor) -> Tensor:
        """[T]"""
        return critic.values(states).index_select(0, torch.from_numpy(forest.row_of_token).to(self._device))

    def _reference(self, forest: Forest) -> Tensor:
        """Log-probabilities of the frozen reference, [T]: the samples' own, or computed here."""
        if forest.items[0].sample.reference_logprobs is not None:
            wide = torch.promote_types(self._model.dtype, torch.float32)
            return torch.from_numpy(forest.column("reference_logprobs")).to(self._device, wide)
        with self._weights.as_reference():
            return self._score(forest).logprobs
