"""Looks a machine and an installation over, and says what to do about what it finds."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evergrad.registry import ModelError, find_smollm2_gguf
from evergrad.service._screen import cell, console, table

OK, WARN, FAIL = "ok", "warn", "fail"
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}

MIN_FREE_GB, GOOD_FREE_GB = 2.0, 8.0
MIN_MEMORY_GB, GOOD_MEMORY_GB = 2.0, 4.0
GOOD_GFLOPS = 15.0
"""fp32 matrix rate below which the demo takes more than twice the time that is written down for it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    status: str
    detail: str
    advice: str = ""


def examine() -> int:
    """Prints every finding; 1 when one of them is a failure, else 0."""
    findings = [check() for check in CHECKS]
    rows = [(cell(each.status, _STYLES[each.status]), each.name, each.detail, each.advice) for each in findings]
    console().print(table(("", "check", "found", "next"), rows))
    return 1 if any(each.status == FAIL for each in findings) else 0


def check_python() -> Finding:
    place = "" if sys.prefix != sys.base_prefix else ", not in a virtual environment"
    return Finding("python", OK, f"{platform.python_version()}, {platform.system()} {platform.machine()}{place}")


def check_packages() -> Finding:
    missing, found = [], []
    for name in ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "sqlalchemy"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("packages", FAIL, f"missing: {', '.join(missing)}", "make setup, or pip install evergrad again")
    return Finding("packages", OK, ", ".join(found[:2]))


def check_demo_model() -> Finding:
    try:
        weights = find_smollm2_gguf()
    except ModelError as error:
        return Finding("demo model", WARN, error.what, f"{error.hint} (for make demo)")
    return Finding("demo model", OK, weights.name)


def check_cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return Finding("cores", WARN, f"{cores}", "it works, but expect the demo to take twice its time")
    return Finding("cores", OK, f"{cores}")


def check_memory() -> Finding:
    free = available_memory_gb()
    if free is None:
        return Finding("memory", WARN, "unknown on this system", f"have {GOOD_MEMORY_GB:.0f} GB free")
    if free < MIN_MEMORY_GB:
        return Finding(
            "memory", FAIL, f"{free:.1f} GB free", f"free some: {GOOD_MEMORY_GB:.0f} GB are good for the demo's model"
        )
    if free < GOOD_MEMORY_GB:
        return Finding("memory", WARN, f"{free:.1f} GB free", f"{GOOD_MEMORY_GB:.0f} GB are good for the demo's model")
    return Finding("memory", OK, f"{free:.1f} GB free")


def available_memory_gb() -> float | None:
    """Memory that new processes can have, in GB: the machine's, or the container's if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        if limit != "max":
            free = min(free, int(limit) - int(used))
    except (OSError, ValueError):
        pass
    return free / 1e9


def check_disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    if not os.access(Path.cwd(), os.W_OK):
        return Finding("disk", FAIL, "this folder cannot be written", "go to a folder of your own; runs are kept under ./runs")
    if free < MIN_FREE_GB:
        return Finding("disk", FAIL, f"{free:.1f} GB free here", f"free some: {GOOD_FREE_GB:.0f} GB are good for a run")
    return Finding("disk", WARN if free < GOOD_FREE_GB else OK, f"{free:.1f} GB free here")


def check_matrix_rate() -> Finding:
    """Times short fp32 products of the demo model's shape; about a third of a second after torch is loaded."""
    try:
        import torch
    except ImportError as error:
        return Finding("matrix rate", FAIL, f"torch does not load: {error}", "make setup, or install torch again")
    weights, columns = torch.randn(1536, 576), torch.randn(576, 512)
    torch.mm(weights, columns)
    best, end = 0.0, time.monotonic() + 0.3
    while time.monotonic() < end:
        started = time.perf_counter()
        torch.mm(weights, columns)
        best = max(best, 2 * 1536 * 576 * 512 / (time.perf_counter() - started) / 1e9)
    detail = f"{best:.0f} GFLOP/s fp32 on {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        return Finding("matrix rate", OK, f"{detail}; GPU {torch.cuda.get_device_name()}")
    if best < GOOD_GFLOPS:
        return Finding("matrix rate", WARN, detail, "slow or busy cores: the demo will take longer than written")
    return Finding("matrix rate", OK, detail)


def check_shared_memory() -> Finding:
    """Weights move through an anonymous file that another process opens by its number."""
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", WARN, "no memfd on this system", "weights move through temporary files instead")
    try:
        handle = os.memfd_create("evergrad-doctor")
        try:
            os.ftruncate(handle, 1 << 20)
            with mmap.mmap(handle, 1 << 20) as memory:
                memory[:4] = b"test"
            with open(f"/proc/{os.getpid()}/fd/{handle}", "rb") as again:
                whole = again.read(4) == b"test"
        finally:
            os.close(handle)
    except OSError as error:
        return Finding("shared memory", WARN, f"memfd: {error.strerror}", "weights move through temporary files instead")
    return Finding("shared memory", OK if whole else FAIL, "memfd" if whole else "memfd lost what was written to it")


def check_ports() -> Finding:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(2)
            client.connect(server.getsockname())
    except OSError as error:
        return Finding("ports", FAIL, f"127.0.0.1: {error}", "allow connections to this machine itself; workers talk over them")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", 8000))
        except OSError:
            return Finding("ports", WARN, "8000 is taken", "evergrad serve --port 8001")
    return Finding("ports", OK, "127.0.0.1, 8000 is free")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_demo_model,
    check_cores,
    check_memory,
    check_disk,
    check_shared_memory,
    check_ports,
    check_matrix_rate,
)
