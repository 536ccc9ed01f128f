"""The memory of a slot: made by one process, mapped by others, guarded by a file lock."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from evergrad.transfer.layout import Layout, TensorSpec, TransferError


class OwnedSlot:
    """Memory without a name (memfd), or a temporary file where the system has none."""

    def __init__(self, num_bytes: int, use_memfd: bool) -> None:
        self._file: Path | None = None
        if use_memfd and hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("evergrad-slot")
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        else:
            self.fd, self.path = tempfile.mkstemp(prefix="evergrad-slot-")
            self._file = Path(self.path)
        try:
            # Reserves the pages now: a machine without room says so here, not by a bus error in the middle of a write.
            os.posix_fallocate(self.fd, 0, num_bytes)
            self.memory = mmap.mmap(self.fd, num_bytes)
        except OSError as error:
            self.close()
            raise TransferError(
                f"no room for a slot of {num_bytes / 2**20:.0f} MiB: {error.strerror}",
                hint="free memory, or use the file transport",
            ) from error

    def close(self) -> None:
        # The mapping goes when the last tensor over it does.
        os.close(self.fd)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


@dataclass
class MappedSlot:
    path: str
    inode: int
    layout: Layout
    writable: bool = False

    def __post_init__(self) -> None:
        try:
            self.fd = os.open(self.path, (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"the publisher's slot is gone: {error.strerror}", where=self.path) from error
        status = os.fstat(self.fd)
        # A process id can be reused; the inode and size say whether this is still the same memory.
        if status.st_ino != self.inode or status.st_size < self.layout.num_bytes:
            os.close(self.fd)
            raise TransferError("what is there is not the publisher's slot", where=self.path)
        allowed = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        self.views = views_over(mmap.mmap(self.fd, self.layout.num_bytes, prot=allowed), self.layout)

    def close(self) -> None:
        self.views = {}
        os.close(self.fd)


def views_over(memory: mmap.mmap, layout: Layout) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        # Torch warns of read-only buffers; here that is the point.
        warnings.simplefilter("ignore", UserWarning)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    return {spec.name: _view(whole, spec) for spec in layout.tensors}


def _view(whole: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    part = whole[spec.offset : spec.offset + spec.num_bytes]
    return part.view(getattr(torch, spec.dtype)).view(spec.shape)


def lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
