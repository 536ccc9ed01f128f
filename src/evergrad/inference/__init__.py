"""Generates completions, and speaks the model APIs.

What other rooms use: :class:`EngineConfig` to start ``python -m evergrad.inference``, :class:`EngineClient` to talk to it,
:class:`Router` to talk to several as if they were one; both are an :class:`InferenceClient`. The engine itself, for use in
one's own process, is :class:`evergrad.inference.engine.Engine`; it needs torch, these do not.
"""

from evergrad.inference.client import EngineClient, InferenceClient, Piece
from evergrad.inference.config import EngineConfig, EngineError, EngineUnavailable
from evergrad.inference.router import Router

__all__ = ["EngineClient", "EngineConfig", "EngineError", "EngineUnavailable", "InferenceClient", "Piece", "Router"]
