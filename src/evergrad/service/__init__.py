"""The ways in: the command line, the client, and what they show.

``evergrad.service.cli:main`` is the command ``evergrad``; :class:`Client` talks to a served endpoint. The client's module
loads on first use, so that the command line starts without an HTTP library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evergrad.service.client import Client, ClientError, Reply

__all__ = ["Client", "ClientError", "Reply"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'evergrad.service' has no attribute '{name}'")
    from evergrad.service import client

    return getattr(client, name)
