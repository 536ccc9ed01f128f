"""Generates completions, and speaks the model APIs.

What other rooms use: :class:`EngineConfig` to start ``python -m evergrad.inference``, :class:`EngineClient` to talk to it. The
engine itself, for use in one's own process, is :class:`evergrad.inference.engine.Engine`; it needs torch, these do not.
"""

from evergrad.inference.client import EngineClient
from evergrad.inference.config import EngineConfig, EngineError

__all__ = ["EngineClient", "EngineConfig", "EngineError"]
