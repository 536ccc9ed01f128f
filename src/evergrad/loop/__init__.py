"""Wires the rooms together and keeps the improvement cycle turning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evergrad.loop.controller import run_loop

__all__ = ["run_loop"]


def __getattr__(name: str) -> Any:
    # The report and the placement are of use without the whole loop, which imports every room.
    if name not in __all__:
        raise AttributeError(f"module 'evergrad.loop' has no attribute '{name}'")
    from evergrad.loop.controller import run_loop

    return run_loop
