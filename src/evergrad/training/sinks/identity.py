"""Which record of another service belongs to a run folder, so that a run that goes on adds to the same one."""

from __future__ import annotations

import secrets
from pathlib import Path


def kept_identity(folder: Path, service: str) -> str | None:
    """What :func:`remember_identity` kept, if anything."""
    path = _path(folder, service)
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def remember_identity(folder: Path, service: str, identity: str) -> None:
    path = _path(folder, service)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(identity + "\n", encoding="utf-8")
    beside.replace(path)


def run_identity(folder: Path, service: str) -> str:
    """The folder's identity with a service that lets us choose it; made on first use."""
    identity = kept_identity(folder, service)
    if identity is None:
        identity = secrets.token_hex(8)
        remember_identity(folder, service, identity)
    return identity


def _path(folder: Path, service: str) -> Path:
    return folder / "sinks" / f"{service}.id"
