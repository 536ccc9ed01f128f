"""Looks at the gate's tasks outside of any ruling: put down, so that later rulings can say that there were some."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterable
from pathlib import Path

from evergrad.loop._folder import write_json


def looks_folder(run: Path) -> Path:
    return run / "looks"


def record_look(run: Path, version_id: str, task_ids: Iterable[str]) -> None:
    """Puts down that somebody measured ``version_id`` on these tasks of the gate split."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = looks_folder(run) / f"{now.replace(':', '')}-{secrets.token_hex(4)}.json"
    write_json(path, {"at": now, "version_id": version_id, "tasks": sorted(task_ids)})
