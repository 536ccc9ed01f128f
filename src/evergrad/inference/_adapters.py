"""LoRA adapters beside the base: rows of one step may each have another, or none.

A linear layer's product is computed once for the whole batch; what an adapter adds to it, ``scale · B (A x)``, is computed for
the tokens of the rows that have it (as in Punica, Chen et al. 2023, arXiv 2310.18547, with plain products instead of kernels).

Shape letters: T tokens of the step, R rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evergrad.config import nearest
from evergrad.inference.config import EngineError
from evergrad.transfer.adapters import LoraPart
from evergrad.transfer.proof import all_finite

if TYPE_CHECKING:
    from evergrad.inference._schedule import Chunk

_serials = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter. One that is loaded again under the same name is another one."""

    name: str
    parts: Mapping[str, LoraPart]
    """By full name of the linear layer that it changes."""
    serial: int = field(default_factory=lambda: next(_serials))
    """Never used twice; what was computed under an adapter is found by it."""


@dataclass
class _Share:
    """The tokens of one adapter in a step."""

    adapter: Adapter
    tokens: torch.Tensor
    """Their places in the flat batch."""
    wanted: torch.Tensor
    """Their places among those whose logits are wanted."""


class AdapterLayers:
    """Adds to the linear layers of a model what the adapters of the step's rows say."""

    def __init__(self, module: nn.Module) -> None:
        self._linears = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
        self._hooked: set[str] = set()
        self._shares: list[_Share] = []
        self._num_tokens = 0

    def adopt(self, name: str, parts: Mapping[str, LoraPart], dtype: torch.dtype, device: torch.device) -> Adapter:
        """An adapter on the model's device, in its dtype. May run while steps go on.

        Raises:
            EngineError: it changes a layer that is not linear here, is a DoRA, or has values that are not finite.
        """
        placed: dict[str, LoraPart] = {}
        for layer, part in parts.items():
            if layer not in self._linears:
                what = f"the adapter changes '{layer}', which is no linear layer"
                raise EngineError(what, hint=nearest(layer, self._linears))
            if part.magnitude is not None:
                hint = "load it merged: POST /admin/weights/load"
                raise EngineError("a DoRA adapter depends on the base's rows and cannot be added beside it", hint=hint)
            if not (all_finite(part.lora_a) and all_finite(part.lora_b)):
                raise EngineError(f"the adapter's '{layer}' has values that are not finite")
            # The scale goes into the smaller product once, here.
            placed[layer] = LoraPart(part.lora_a.to(device, dtype), (part.lora_b * part.scale).to(device, dtype), 1.0)
        return Adapter(name, placed)

    def cover(self, adapter: Adapter) -> None:
        """Makes the layers that the adapter changes ready for it; between two steps."""
        for layer in adapter.parts.keys() - self._hooked:
            self._linears[layer].register_forward_hook(self._hook(layer))
            self._hooked.add(layer)

    def plan(self, chunks: Sequence[Chunk], wanted: Sequence[int], device: torch.device) -> None:
        """Says which tokens of the step that comes next are whose."""
        if not self._hooked:
            return
        owners: dict[Adapter, list[int]] = {}
        at = 0
        for chunk in chunks:
            size = chunk.stop - chunk.start
            if chunk.row.adapter is not None:
                owners.setdefault(chunk.row.adapter, []).extend(range(at, at + size))
            at += size
        self._num_tokens = at
        self._shares = []
        for adapter, tokens in owners.items():
            mine = set(tokens)
            ends = [place for place, token in enumerate(wanted) if token in mine]
            self._shares.append(_Share(adapter, _index(tokens, device), _index(ends, device)))

    def _hook(self, layer: str) -> Any:
        def add(module: nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            rows, products = inputs[0].reshape(-1, module.in_features), output.view(-1, module.out_features)
            for share in self._shares:
                part = share.adapter.parts.get(layer)
                if part is None:
                    continue
                # The head sees only the tokens whose logits are wanted; when that is all of them, both indices agree.
                tokens = share.tokens if len(rows) == self._num_tokens else share.wanted
                low = rows.index_select(0, tokens) @ part.lora_a.t()
                products.index_add_(0, tokens, low @ part.lora_b.t())

        return add


def _index(places: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.long, device=device)
