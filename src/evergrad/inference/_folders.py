"""Where weights lie that a server is told to read."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlparse

from evergrad.inference.config import EngineError


def local_folder(uri: str) -> Path:
    """
    Raises:
        EngineError: not the path of a folder of this machine.
    """
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file"):
        raise EngineError(f"weights at '{parsed.scheme}://' cannot be read", where=uri, hint="give a local folder")
    folder = Path(unquote(parsed.path) if parsed.scheme else uri)
    if not folder.is_dir():
        raise EngineError("no such folder", where=uri)
    return folder
