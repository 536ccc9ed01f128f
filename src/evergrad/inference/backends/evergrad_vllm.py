"""What a vLLM that the run starts loads of ours: a way in for weights, and a lock on its doors. Imports nothing of the house.

``evergrad.inference.backends.vllm_server`` copies this file and ``evergrad_vllm_slots.py`` into a folder of their own, which
vLLM's interpreter finds as a plugin; its environment need not have evergrad installed.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

BACKEND = "evergrad_slots"
"""Under which vLLM's ``--weight-transfer-config`` knows the way in."""
_PR_SET_PDEATHSIG = 1
_OPEN = ("/health", "/version")


def register() -> None:
    """Called by vLLM in each of its processes, sometimes more than once."""
    if sys.platform == "linux":
        # Its workers end with it, however it ends: one that is killed cannot tell them.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "evergrad_vllm_slots", "SlotWeightTransferEngine")
    except ValueError:
        return  # it is there already


class RequireToken:
    """ASGI middleware: whoever asks for more than whether the server is there must have the run's token.

    vLLM's own ``--api-key`` leaves the routes that change weights open.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._token = app, os.environ.get("EVERGRAD_TOKEN", "")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or self._allowed(scope["headers"]):
            await self._app(scope, receive, send)
            return
        body = json.dumps({"error": {"message": "this server wants the bearer token in EVERGRAD_TOKEN"}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _allowed(self, headers: Any) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        return bool(self._token) and hmac.compare_digest(given, f"Bearer {self._token}".encode())
