"""Engines of another make behind the interface of the house's own.

:class:`BackendConfig` names one in a run's configuration; :class:`VllmClient` and :class:`SglangClient` speak to a server;
:class:`VllmServerConfig` starts a vLLM, by ``python -m evergrad.inference.backends.vllm_server``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evergrad.inference.backends.config import BackendConfig, require_servable

if TYPE_CHECKING:
    from evergrad.inference.backends.sglang import SglangClient
    from evergrad.inference.backends.vllm import VllmClient
    from evergrad.inference.backends.vllm_server import VllmServerConfig

__all__ = ["BackendConfig", "SglangClient", "VllmClient", "VllmServerConfig", "require_servable"]

_HOMES = {"SglangClient": "sglang", "VllmClient": "vllm", "VllmServerConfig": "vllm_server"}


def __getattr__(name: str) -> Any:
    # The clients load on first use: who only reads a configuration needs none of them.
    if name not in _HOMES:
        raise AttributeError(f"module 'evergrad.inference.backends' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"evergrad.inference.backends.{_HOMES[name]}"), name)
