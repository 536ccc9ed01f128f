"""Fits a trainer into a memory budget: how many tokens at once, and whether layers are computed twice.

What does not depend on the batch is counted: weights, gradients, optimizer state. What a token costs is measured, in two
small passes over made-up tokens when the trainer starts: autograd says what it keeps of them, with layers that keep their
activations and with layers that do not. So the figures are those of this model and this code, whatever it becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from evergrad.training import attention, logprobs
from evergrad.training.config import TrainerConfig, TrainerError
from evergrad.training.forest import Forest, TrainedTokens, plant
from evergrad.training.layerwise import Recomputation, decoder_layers
from evergrad.training.model import ScoreForest
from evergrad.training.parts import here
from evergrad.types import TrainingSample

_PROBES = (32, 128)
"""Tokens of the measured passes."""
_OPTIMIZER_COPIES = 3
"""Of what is trained: its gradient, and Adam's two moments."""
_LEAST_TOKENS = 16
_WORTH_KEEPING = 4
"""Micro-batches are made this many times smaller before layers are computed twice, which costs a third more."""


class Memory:
    """Without a budget: micro-batches as configured, and every layer keeps its activations."""

    def __init__(self, micro_batch_tokens: int) -> None:
        self._micro_batch_tokens = micro_batch_tokens

    def nodes_at_once(self, wanted: Sequence[TrainedTokens], *, backward: bool = True) -> int:
        """Distinct tokens of one micro-batch of these samples.

        Args:
            backward: Whether a backward pass follows, for which activations are kept.

        Raises:
            TrainerError: a sample alone does not fit.
        """
        return self._micro_batch_tokens

    def computing(self, forest: Forest) -> AbstractContextManager[None]:
        """Around the forward pass of ``forest``."""
        return nullcontext()


class BudgetedMemory(Memory):
    """Within a budget of ``config.memory_gib``."""

    def __init__(self, config: TrainerConfig, model: Any, score: ScoreForest, trained: Sequence[Tensor]) -> None:
        """Measures; every rank must make it. Leaves no gradient.

        Args:
            score: Of ``model``.
            trained: The parameters that learn.

        Raises:
            TrainerError: weights and optimizer leave no room for a batch.
        """
        assert config.memory_gib is not None
        super().__init__(config.micro_batch_tokens)
        self._recomputation = Recomputation(model)
        self._resident = _resident_bytes(config, model, trained)
        self._cost = _Cost.of(model, score, self._recomputation, alone=config.ranks == 1)
        self._budget = int(config.memory_gib * 2**30)
        if not self._fits(_LEAST_TOKENS, _LEAST_TOKENS, recomputed=True):
            least = self._resident + self._cost.bytes(_LEAST_TOKENS, _LEAST_TOKENS, recomputed=True)
            raise TrainerError(
                f"memory_gib = {config.memory_gib:g} holds no batch: weights, gradients and optimizer take "
                f"{_gib(self._resident)} GiB, with the smallest micro-batch {_gib(least)}",
                hint="raise memory_gib, or set method = 'lora', which trains less",
            )

    def nodes_at_once(self, wanted: Sequence[TrainedTokens], *, backward: bool = True) -> int:
        longest = max((int(item.positions[-1]) for item in wanted), default=1)
        if backward and not self._fits(longest, longest, recomputed=True):
            needed = self._resident + self._cost.bytes(longest, longest, recomputed=True)
            raise TrainerError(
                f"a sample of {longest} tokens needs {_gib(needed)} GiB, and memory_gib is {_gib(self._budget)}",
                where=next(item.sample.rollout_id for item in wanted if item.positions[-1] == longest) or None,
                hint="shorten the samples, or raise memory_gib",
            )
        configured = self._micro_batch_tokens
        kept = self._largest(configured, longest, recomputed=False)
        return kept if kept * _WORTH_KEEPING >= configured else self._largest(configured, longest, recomputed=True)

    def computing(self, forest: Forest) -> AbstractContextManager[None]:
        kept = self._fits(forest.num_nodes, int(forest.depths.max()) + 1, recomputed=False)
        return self._recomputation.switched(not kept)

    def _fits(self, nodes: int, longest: int, *, recomputed: bool) -> bool:
        return self._resident + self._cost.bytes(nodes, longest, recomputed=recomputed) <= self._budget

    def _largest(self, most: int, longest: int, *, recomputed: bool) -> int:
        """The largest number of nodes up to ``most`` that fits, 1 at least."""
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle, longest, recomputed=recomputed) else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bytes that one micro-batch takes, with n nodes: ``constant + linear · n``, and what has a bound."""

    constant: float
    """Rounded weights, where there are any, with activations kept; as is the next."""
    linear: float
    constant_recomputed: float
    linear_recomputed: float
    layers: int
    scores: int
    """Of one query and one key, over all heads."""
    logits: int
    """Of one row of logits."""

    @classmethod
    def of(cls, model: Any, score: ScoreForest, recomputation: Recomputation, *, alone: bool) -> _Cost:
        """Measures. What several ranks gather does not depend on n either, but they drop it layer by layer."""
        found = []
        for on in (False, True):
            with recomputation.switched(on):
                first, second = (_kept_bytes(model, score, nodes) for nodes in _PROBES)
            linear = (second - first) / (_PROBES[1] - _PROBES[0])
            found += [first - linear * _PROBES[0] if alone else 0.0, linear]
        weight = model.get_output_embeddings().weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        scores = model.config.get_text_config().num_attention_heads * wide.itemsize
        kept, each, kept_recomputed, each_recomputed = found
        return cls(
            kept,
            each,
            kept_recomputed,
            each_recomputed,
            max(1, len(decoder_layers(model))),
            scores,
            weight.shape[0] * wide.itemsize,
        )

    def bytes(self, nodes: int, longest: int, *, recomputed: bool) -> int:
        layer = max(0.0, self.linear - self.linear_recomputed) * nodes / self.layers
        if recomputed:
            kept = self.constant_recomputed + self.linear_recomputed * nodes
        else:
            kept = self.constant + self.linear_recomputed * nodes + layer * self.layers
        queries = min(nodes, attention._MAX_QUERIES)
        # A block of queries sees the context of all of them.
        scores = self.scores * queries * min(nodes, longest + queries)
        logits = min(nodes * self.logits, logprobs._MAX_KEPT_BYTES)
        chunks = 2 * min(nodes * self.logits, logprobs._MAX_LOGITS_BYTES)
        # Besides what is kept: the layer under way, the gradients that run through it, and scores with theirs.
        return int(kept + 2 * layer + 2 * scores + logits + chunks)


def _resident_bytes(config: TrainerConfig, model: Any, trained: Sequence[Tensor]) -> int:
    """Weights, gradients and optimizer state that this rank holds, and what it gathers of others' while it computes."""
    held = sum(_bytes(here(parameter)) for parameter in model.parameters())
    learned = _OPTIMIZER_COPIES * sum(_bytes(here(parameter)) for parameter in trained)
    if config.ranks == 1:
        return held + learned
    layers = [sum(map(_bytes, layer.parameters())) for layer in decoder_layers(model)]
    rest = sum(map(_bytes, model.parameters())) - sum(layers)
    return held + learned + rest + 2 * max(layers, default=0)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _kept_bytes(model: Any, score: ScoreForest, nodes: int) -> int:
    """What autograd keeps of one chain of ``nodes`` tokens; distinct storages, each once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()  # not by address: what FSDP frees meanwhile leaves its own to others
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = score(_chain(model, nodes)).logprobs
    found.backward(torch.zeros_like(found))  # type: ignore[no-untyped-call]
    weights = {here(parameter).untyped_storage()._cdata for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return sum(size for place, size in kept.items() if place not in weights)


def _chain(model: Any, nodes: int) -> Forest:
    """One sample, all of whose tokens but the first are trained."""
    size = nodes + 1
    token_ids = tuple(number % model.get_input_embeddings().weight.shape[0] for number in range(size))
    zeros = (0.0,) * size
    sample = TrainingSample(token_ids, (0, *(1,) * nodes), zeros, zeros, 0, 0)
    (forest,) = plant([TrainedTokens(sample, np.arange(1, size), nodes)], size)
    return forest


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
