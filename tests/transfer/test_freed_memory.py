"""What a process frees is still there when it is wanted again, on any of its threads."""

from __future__ import annotations

import platform
import subprocess
import sys

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
