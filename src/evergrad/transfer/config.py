"""How a trainer's weights travel to its engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from evergrad.config import Config, nearest
from evergrad.transfer.codecs import CODECS


class TransferConfig(Config):
    """Transport and codec of published weights.

    >>> TransferConfig(transport="tcp", codec="sparse").host
    '127.0.0.1'
    """

    transport: Literal["shared_memory", "tcp", "nixl", "files"] = "shared_memory"
    """Shared memory within a machine. Between machines: TCP, NIXL (RDMA; needs the extra ``nixl``), or files in a folder or
    object store."""
    codec: str = "identity"
    """``identity``, ``bfloat16``, ``float8_block``, or ``sparse``, which moves what changed. Shared memory holds every bit."""
    adapter_only: bool = False
    """Moves a LoRA's two thin matrices, and has each engine merge them with the base it started from."""
    host: str = "127.0.0.1"
    """Address of the trainer that TCP listens at; engines must reach it under this name."""
    url: str | None = None
    """Folder or object store for ``files``, such as ``/shared/weights`` or ``s3://bucket/weights``; what it held is removed."""
    keep: int = Field(default=2, ge=1)
    """Versions that stay there."""

    @model_validator(mode="after")
    def _fits(self) -> TransferConfig:
        if self.codec not in CODECS:
            raise ValueError(f"no codec '{self.codec}': {nearest(self.codec, CODECS)}")
        if self.transport == "shared_memory" and self.codec != "identity":
            what = f"codec = '{self.codec}' needs transport = 'tcp', 'nixl' or 'files'"
            raise ValueError(f"{what}; in shared memory nothing travels")
        if (self.transport == "files") != (self.url is not None):
            raise ValueError("url goes with transport = 'files', and that needs one")
        return self
