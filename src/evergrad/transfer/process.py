"""What a process asks of its system: to end with its parent, to keep the memory that it frees, and the cores for one thread."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def die_with_parent() -> None:
    """Ends this process when its parent ends, however that happens.

    Linux delivers SIGKILL when the parent thread that started this process is gone. In addition, when stdin is a pipe or
    socket that the parent holds open, its end of file ends the process: this covers a parent that died before the first
    call took effect, and other systems. Call it from the main thread, before anything slow.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    mode = os.fstat(0).st_mode
    # A terminal or /dev/null is not held by the parent; its end of file says nothing.
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        threading.Thread(target=_exit_at_end_of_stdin, name="die-with-parent", daemon=True).start()


def keep_freed_memory() -> None:
    """Tells the allocator to keep what is freed for the next time; does nothing where that is not glibc's.

    By itself glibc gives large blocks back to the system, and each of their pages costs a fault when it is wanted again. A
    training step frees and takes gigabytes, so half of its time can go there, more on a virtual machine whose host takes
    pages back. The price: the process stays as large as its largest step. Call it before the threads that compute begin:
    one pool serves them all, since those of further threads give memory back whatever they are told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)  # no block is a mapping of its own, which is gone as soon as it is freed
        mallopt(_M_TRIM_THRESHOLD, -1)


def in_passing_thread(function: Callable[[], T]) -> T:
    """What ``function`` returns, computed in a thread that is gone afterwards, and its helpers with it.

    GNU's OpenMP gives every thread that computes helpers of its own, and keeps them as long as the thread lives. Once a process
    has more of these than cores, those that wait for work sleep at once instead of watching for it, and a decoding step, which
    is thousands of small operations, spends a fifth of its time waking them up. So where one thread computes all the time,
    what others compute belongs in here.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
