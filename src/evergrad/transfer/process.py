"""What a process asks of its system: to end with its parent, to keep freed memory, large pages, the cores for one thread."""

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
_MADV_HUGEPAGE = 14
_LARGE_PAGE = 2 << 20
"""Bytes; what it is on most systems. Where pages are larger still, the system rounds by itself."""


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


def prefer_large_pages() -> None:
    """Asks for pages of 2 MB wherever the allocator's pool grows next, up to half of the machine's memory.

    A product of few rows reads each weight once, and waits for memory whenever it comes to the end of a page of 4 kB, where the
    processor stops reading ahead and has to look up the next one. Nothing is taken before it is used, and the system falls
    back to small pages where it has no large ones. Does nothing without :func:`keep_freed_memory`, which comes first: what
    the pool gives back to the system comes back without the advice.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # The pool grows by a block this large, which gets the advice, goes back to it, and is what it gives out from then on.
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    block = libc.malloc(num_bytes)
    if block is not None:
        start = -(-block // _LARGE_PAGE) * _LARGE_PAGE
        libc.madvise(start, block + num_bytes - start, _MADV_HUGEPAGE)
        libc.free(block)


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
