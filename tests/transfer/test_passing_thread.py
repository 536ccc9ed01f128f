"""Work in a passing thread leaves nothing behind that would compete with the thread that computes all the time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evergrad.transfer.process import in_passing_thread

CHILD = """
import psutil, torch
from evergrad.transfer.process import in_passing_thread

torch.set_num_threads(2)
process = psutil.Process()
factor = torch.ones(512, 512)

def multiplied():
    torch.mm(factor, factor)
    return process.num_threads()

before = process.num_threads()
during = in_passing_thread(multiplied)
while process.num_threads() > before:
    pass
print(during - before)
"""


def test_helpers_go_with_the_thread() -> None:
    printed = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=300).stdout
    assert int(printed) >= 1, "the product was not computed in another thread"


def test_results_and_errors_come_back() -> None:
    assert in_passing_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_passing_thread(lambda: 1 // 0)
