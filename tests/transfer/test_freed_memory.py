"""What a process frees is still there when it is wanted again, on any of its threads, and lies in large pages where it asks."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import resource, threading
import torch
from evergrad.transfer.process import keep_freed_memory

def round_of_work():
    blocks = [torch.ones(2_000_000) for _ in range(10)] + [torch.ones(20_000_000)]  # 8 MB each, and 80 MB

def faults_of_the_last_of_ten():
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        round_of_work()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

keep_freed_memory()
faults_of_the_last_of_ten()
worker = threading.Thread(target=faults_of_the_last_of_ten)
worker.start()
worker.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")
def test_large_blocks_are_not_faulted_in_again() -> None:
    printed = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    pages = (10 * 8_000_000 + 80_000_000) // 4096
    assert [int(faults) < pages / 20 for faults in printed.split()] == [True, True], printed


LARGE = """
import torch
from evergrad.transfer.process import keep_freed_memory, prefer_large_pages

keep_freed_memory()
prefer_large_pages()
blocks = [torch.ones(size) for size in (300_000, 5_000_000) for _ in range(10)]
inside = advised = 0
for line in open("/proc/self/smaps"):
    head = line.split()[0]
    if "-" in head and not head.endswith(":"):
        start, end = (int(part, 16) for part in head.split("-"))
        inside = sum(start <= block.data_ptr() < end for block in blocks)
    elif head == "VmFlags:" and "hg" in line.split():
        advised += inside
print(advised)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")
def test_the_pool_grows_by_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has none")
    printed = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True).stdout
    # A block or two may lie in what the pool had before.
    assert int(printed) >= 18
