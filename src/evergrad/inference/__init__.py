"""Generates completions, and speaks the model APIs.

What other rooms use: :class:`EngineConfig` to start ``python -m evergrad.inference``, :class:`EngineClient` to talk to it,
:class:`Router` to talk to several as if they were one; both are an :class:`InferenceClient`. :class:`Front` and :class:`Shadow`
stand before the two versions of a release. The engine itself, for use in one's own process, is
:class:`evergrad.inference.engine.Engine`; it needs torch, these do not.
"""

from evergrad.inference._replica import ReplicaClient
from evergrad.inference.client import Completes, EngineClient, InferenceClient, Piece
from evergrad.inference.config import EngineConfig, EngineError, EngineUnavailable
from evergrad.inference.front import Front, Shadow, Split, place
from evergrad.inference.router import Router

__all__ = [
    "Completes",
    "EngineClient",
    "EngineConfig",
    "EngineError",
    "EngineUnavailable",
    "Front",
    "InferenceClient",
    "Piece",
    "ReplicaClient",
    "Router",
    "Shadow",
    "Split",
    "place",
]
