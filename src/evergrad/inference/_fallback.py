"""Architectures that the paged cache does not know: transformers' own forward and cache, one row after another.

What a row has computed stays with it, but is nothing that other rows could go on from. So each prompt is read by each group
that asks it, and a step of many rows costs as much as that many steps of one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from evergrad.inference._adapters import Adapter
from evergrad.inference._model import Model
from evergrad.inference._rows import Row
from evergrad.inference._schedule import Chunk
from evergrad.inference.config import EngineConfig, EngineError
from evergrad.transfer.adapters import LoraPart

LOSSES = (
    "prompts are read again for every turn and group, rows are computed one after another, nothing is guessed ahead, and "
    "adapters serve only merged into the weights"
)


@dataclass
class _State:
    cache: Any
    """What transformers returned for the row, to be given back."""
    length: int
    """Tokens that are in it."""


class FallbackModel(Model):
    """A causal language model as transformers computes it."""

    reuses_blocks = False

    def _attach(self, config: EngineConfig) -> None:
        self._states: WeakKeyDictionary[Row, _State] = WeakKeyDictionary()

    def forward(self, chunks: Sequence[Chunk], wanted: list[int]) -> torch.Tensor:
        logits = torch.cat([self._continue(chunk) for chunk in chunks])
        return logits[torch.tensor(wanted, dtype=torch.long, device=self.device)]

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Nothing is in the blocks: they only count how many tokens rows may keep."""

    def fork(self, row: Row, child: Row) -> None:
        state = self._states.get(row)
        if state is not None and state.length == child.num_computed:
            self._states[child] = copy.deepcopy(state)

    def adopt(self, name: str, parts: Mapping[str, LoraPart]) -> Adapter:
        raise EngineError(f"adapters of a '{self.architecture}' cannot be added beside the base", hint="load them merged")

    @torch.inference_mode()
    def _continue(self, chunk: Chunk) -> torch.Tensor:
        """Logits [T, V] after the chunk's tokens; what the row's cache does not hold is computed before."""
        state = self._states.pop(chunk.row, None)
        start = chunk.start
        if state is None or state.length != start:
            state, start = None, 0
        tokens = torch.tensor([chunk.row.tokens[start : chunk.end]], device=self.device)
        before = {} if state is None else {"past_key_values": state.cache}
        output = self._module(input_ids=tokens, use_cache=True, **before)
        # An architecture that returns no such cache is computed from its beginning every time.
        if getattr(output, "past_key_values", None) is not None:
            self._states[chunk.row] = _State(output.past_key_values, chunk.end)
        logits: torch.Tensor = output.logits[0, chunk.start - start :]
        return logits
