"""Environments written to files, as users write theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HEAD = "from evergrad.envs import Environment, EnvironmentConfig, TaskRow, ToolError, reward, tool\n"

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an environment file and returns its path."""

    def written(body: str) -> str:
        path = tmp_path / "my_environment.py"
        path.write_text(HEAD + body)
        return str(path)

    return written
