"""A child ends with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CHILD = """
import time
from evergrad.transfer.process import die_with_parent
die_with_parent()
print("up", flush=True)
time.sleep(600)
"""

PARENT = textwrap.dedent(
    """
    import subprocess, sys, time
    stdin = subprocess.PIPE if sys.argv[1] == "pipe" else subprocess.DEVNULL
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=stdin, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(600)
    """
)


def ended(pid: int) -> bool:
    """Waits, through a pidfd, until the process is gone."""
    import select

    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
@pytest.mark.parametrize("stdin", ["pipe", "null"])
def test_the_child_of_a_killed_parent_ends(stdin: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, stdin, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert ended(pid)


def test_closing_stdin_ends_the_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    child.stdin.close()
    assert child.wait(timeout=60) == 0
    child.stdout.close()


def test_the_helper_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, evergrad.transfer, evergrad.transfer.process; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
