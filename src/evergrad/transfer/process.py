"""A child process that never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import threading

_PR_SET_PDEATHSIG = 1


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


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
