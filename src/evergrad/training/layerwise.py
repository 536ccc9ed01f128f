"""What may be done around each decoder layer: computing it with rounded weights, and computing it twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

R = TypeVar("R")


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers that a transformers model repeats, in order."""
    names = set(model._no_split_modules or ())
    # By base classes, too: FSDP makes each layer's class one of its own.
    return [module for module in model.modules() if names.intersection(base.__name__ for base in type(module).__mro__)]


def rounded(
    module: nn.Module, function: Callable[..., R], dtype: torch.dtype, but: Collection[nn.Module] = ()
) -> Callable[..., R]:
    """``function``, computed with the weights of ``module`` rounded to ``dtype``; their gradients reach the weights themselves.

    This is mixed precision with master weights (Micikevicius et al. 2017, arXiv 1710.03740) for one process, as FSDP has it for
    several. It is not ``torch.autocast``, whose rules per operation would not reach the backward passes that are written out
    here.

    Args:
        module: Whose parameters ``function`` reads.
        but: Parts of it that see to themselves.
    """
    call = _Call(module, function)
    others = {id(parameter) for other in but for parameter in other.parameters()}

    def run(*args: Any, **named: Any) -> R:
        weights = {name: p.to(dtype) for name, p in call.named_parameters() if id(p) not in others}
        return functional_call(call, weights, args, named)  # type: ignore[no-any-return]

    return run


class _Call(nn.Module):
    """A function as a module, which is what ``functional_call`` can put other weights under."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._function = module, function

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._function(*args, **named)


class Recomputation:
    """Lets decoder layers keep nothing but their input, and be computed again when the backward pass comes to them
    (Chen et al. 2016, arXiv 1604.06174). Changes no number: these layers draw none at random."""

    def __init__(self, model: Any) -> None:
        self._on = False
        for layer in decoder_layers(model):
            layer.forward = self._around(layer.forward)

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """For forward passes inside, and their backward passes wherever they are."""
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            if not self._on or not torch.is_grad_enabled():
                return forward(*args, **named)
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **named)

        return run
