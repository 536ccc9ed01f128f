"""The first rank: starts the others, has them do what it does, and notices when one dies.

::

    Trainer.step ──on_all_ranks──▶ Leader.calling ──name and arguments──▶ every follower calls the same method of its trainer
      (collectives meet)           ◀── None, or why it was refused ──     follower waits for the next call

Calls travel over a socket pair for each follower, which also tells the two of each other's end.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evergrad.training.config import TrainerConfig, TrainerError
from evergrad.training.ranks import RanksLost
from evergrad.training.sharding import ShardedRanks
from evergrad.types import EvergradError

_GRACE_S = 10.0
"""How long an operation may go on after a rank has died. gloo ends it at once; what waits on a GPU does not notice."""
_CAUSE_S = 2.0
"""How long to wait for the exit code of a rank whose connection broke."""
_STOP_S = 5.0
_STDERR = 2


class Leader(ShardedRanks):
    """Rank 0. Its followers are processes of this machine that die with it."""

    def __init__(self, config: TrainerConfig) -> None:
        """
        Raises:
            TrainerError: this process belongs to a group of ranks already, or another rank does not start.
        """
        if dist.is_initialized():
            raise TrainerError("this process has ranks already", hint="close the other trainer first")
        self._lost: RanksLost | None = None
        self._on_loss: list[Callable[[RanksLost], None]] = []
        self._closing = False
        self._lock = threading.Lock()
        self._at_rest = threading.Event()
        self._depth = 0
        self._folder = Path(tempfile.mkdtemp(prefix="evergrad-ranks-"))
        self._followers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            for rank in range(1, config.ranks):
                self._followers.append(self._start(config, rank))
            super().__init__(config, 0, self._folder / "meeting-place", self._await_followers)
        except BaseException:
            self.close()
            raise

    def _start(self, config: TrainerConfig, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            # Standard output is the leader's, whose parent waits for a line on it; standard input is held open, see there.
            process = subprocess.Popen(
                [sys.executable, "-m", "evergrad.training.follower", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                pass_fds=[theirs.fileno()],
            )
        connection = Connection(ours.detach())
        with suppress(OSError):  # one that has ended already is missed when the others have come
            connection.send((config, rank, self._folder / "meeting-place"))
        threading.Thread(target=self._wait_for, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        return process, connection

    def _await_followers(self) -> None:
        """Hears that each follower is about to look for the others: nothing ends the search for one that will not come."""
        for rank, (_, connection) in enumerate(self._followers, start=1):
            try:
                refusal = connection.recv()
            except (EOFError, OSError) as error:
                lost = self._lose(f"rank {rank} hung up")
                raise TrainerError(f"the ranks do not start: {lost.what}", hint="see what that rank said above") from error
            if refusal is not None:
                raise TrainerError(f"the ranks do not start: rank {rank}: {refusal}")

    # -- operations --------------------------------------------------------------------------------------------------------

    @contextmanager
    def starting(self) -> Iterator[None]:
        try:
            with self._together():
                yield
        except BaseException:
            self.close()
            raise
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def calling(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
        if self._depth:  # part of an operation that the followers know of
            yield
            return
        with self._together():
            self._tell((method, arguments, named))
            yield

    @contextmanager
    def _together(self) -> Iterator[None]:
        """One operation, from its first word to the last follower's answer."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._at_rest.clear()
        self._depth += 1
        try:
            yield
            self._expect(None)
        except RanksLost:
            raise
        except EvergradError as error:
            self._expect(error)
            raise
        except Exception as error:
            # What the followers wait for will not come; or they are the reason.
            raise self._lose(f"rank 0 failed: {error!r}") from error
        except BaseException:
            self._lose("rank 0 was interrupted", wait_s=0.0)
            raise
        finally:
            self._depth -= 1
            self._at_rest.set()

    def _tell(self, call: tuple[str, Sequence[Any], Mapping[str, Any]]) -> None:
        for rank, (_, connection) in enumerate(self._followers, start=1):
            try:
                connection.send(call)
            except OSError as error:
                raise self._lose(f"rank {rank} cannot be told: {error}") from error

    def _expect(self, own: EvergradError | None) -> None:
        """Hears each follower's answer, which must be what happened here, too."""
        for rank, (_, connection) in enumerate(self._followers, start=1):
            try:
                refusal = connection.recv()
            except (EOFError, OSError) as error:
                raise self._lose(f"rank {rank} gave no answer") from error
            if (refusal is None) != (own is None):
                raise self._lose(f"rank {rank} disagrees: {refusal or 'done'}; rank 0: {own or 'done'}")

    # -- loss --------------------------------------------------------------------------------------------------------------

    def watch(self, on_loss: Callable[[RanksLost], None]) -> None:
        with self._lock:
            self._on_loss.append(on_loss)
            lost = self._lost
        if lost is not None:
            on_loss(lost)

    def _wait_for(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        at_rest = self._at_rest.wait(_GRACE_S)
        with self._lock:
            if self._closing or self._lost is not None:
                return
        if at_rest:
            self._lose("")
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        print(f"error: {_cause({rank: code})}, and what was under way did not end", file=sys.stderr, flush=True)
        os._exit(1)

    def _lose(self, cause: str, wait_s: float = _CAUSE_S) -> RanksLost:
        """Ends the ranks that are left; returns what is to be raised now and whenever the trainer is asked again."""
        # A broken connection is the first sign of a death; the exit code says more, a moment later.
        deadline = time.monotonic() + wait_s
        while not (deaths := self._exit_codes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            if self._lost is not None:
                return self._lost
            self._lost = lost = RanksLost(_cause(deaths) or cause, hint="start the trainer again and load its last checkpoint")
            told = list(self._on_loss)
        for process, _ in self._followers:
            process.kill()
        for on_loss in told:
            on_loss(lost)
        return lost

    def _exit_codes(self) -> dict[int, int]:
        """Of the ranks that have ended."""
        codes = {rank: process.poll() for rank, (process, _) in enumerate(self._followers, start=1)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def close(self) -> None:
        self._finish_writing()
        with self._lock:
            self._closing = True
        self._at_rest.set()
        for process, connection in self._followers:
            connection.close()
            assert process.stdin is not None
            process.stdin.close()
        for process, _ in self._followers:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        super().close()


def _cause(deaths: Mapping[int, int]) -> str:
    """Which rank died and how. One that was killed comes first: the others may have failed for want of it."""
    if not deaths:
        return ""
    rank, code = min(deaths.items(), key=lambda death: (death[1] >= 0, death[0]))
    return f"rank {rank} of the trainer died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
