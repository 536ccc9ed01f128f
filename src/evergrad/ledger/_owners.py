"""Whether the process that holds something still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_FOREIGN_SILENCE_S = 600.0
"""A process on another host counts as dead after so long without a heartbeat; here, it is looked up."""


def this_process() -> dict[str, Any]:
    """What :func:`alive` needs to recognise this very process."""
    return {"host": socket.gethostname(), "boot": _boot_id(), "pid": os.getpid(), "started": _process_start(os.getpid())}


def alive(owner: Mapping[str, Any], heartbeat_at: str) -> bool:
    """Whether ``owner``, as :func:`this_process` described it, still lives; it was last heard of at ``heartbeat_at``."""
    if owner["host"] != socket.gethostname():
        silence = datetime.now(UTC) - datetime.fromisoformat(heartbeat_at)
        return silence.total_seconds() < _FOREIGN_SILENCE_S
    same_boot = owner["boot"] == _boot_id()
    return same_boot and bool(owner["started"] == _process_start(owner["pid"]))


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _process_start(pid: int) -> str | None:
    """When ``pid`` was started, in ticks since boot: tells it from a later process with the same number. ``None`` if gone.

    A zombie counts as gone: it will never write again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
