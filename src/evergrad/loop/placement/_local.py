"""Workers as child processes of this one, on this machine.

A worker is a server module (``evergrad.inference`` or ``evergrad.training``) that prints one JSON line when it can answer.
It dies with its parent, whichever way the parent ends: the kernel signals it, and it watches the pipe on its standard input.
One that lives but is stuck is ended here, so that whoever waits for it learns of a death and not of nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from evergrad.config import Config
from evergrad.types import EvergradError

IDLE_START_S = 120.0
"""How long a worker that is not ready yet may compute nothing; a busy machine lets it compute slowly."""
START_LIMIT_S = 1800.0
"""How long a start may take at all: one that computes for ever is stuck, too."""
STOP_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 5.0
LOOKS = 10
"""How many looks in a row must find a worker stuck."""


class WorkerDied(EvergradError):
    """A worker ended by itself; carries what it last said."""


@dataclass
class Worker:
    """A running child: where it listens and the token its admin routes want."""

    name: str
    process: asyncio.subprocess.Process
    base_url: str
    token: str
    log_path: Path
    log_start: int = 0
    """Bytes in the log before this process wrote to it: earlier ones are not asked for its last words."""
    illness: str = ""
    """Why it was ended although it had not died by itself."""
    dismissed: bool = False
    """Whether its end was asked for."""

    async def died(self) -> WorkerDied:
        """Waits for the end of the process and says why it ended, with the last lines of its log."""
        code = await self.process.wait()
        cause = self.illness or (f"signal {-code}" if code < 0 else f"exit code {code}")
        return WorkerDied(f"{self.name} died ({cause}): {_tail(self.log_path, self.log_start)}", where=str(self.log_path))

    async def stop(self, within_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the process: asked first, killed after ``within_s`` seconds."""
        if self.process.returncode is not None:
            return
        self.dismissed = True
        with suppress(ProcessLookupError):  # it may end at any moment, this one included
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), within_s)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()


class LocalPlacement:
    """Starts workers, notices their deaths, stops them all. Use as an async context manager.

    A worker whose ``/health`` has said ``failing`` or nothing at all for ``stuck_after_s`` is killed, and counts as dead.

    Args:
        tell_death: Told of deaths in place of :meth:`watch`.
    """

    def __init__(self, logs: Path, stuck_after_s: float = 60.0, tell_death: Callable[[Exception], None] | None = None) -> None:
        self._logs, self._stuck_after_s, self._tell_death = logs, stuck_after_s, tell_death
        self._workers: list[Worker] = []
        self._deaths: list[Exception] = []
        self._death = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> LocalPlacement:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def start(
        self,
        name: str,
        module: str,
        config: Config,
        arguments: Sequence[str] = (),
        *,
        log: str | None = None,
        on_death: Callable[[WorkerDied], None] | None = None,
    ) -> Worker:
        """Starts ``python -m module`` and waits until it answers.

        Args:
            log: Its file where several may bear one name.
            on_death: Told of its death in place of :meth:`watch`, by who can do without it.

        Raises:
            WorkerDied: it ended before it was ready.
            EvergradError: it was not ready, and computed nothing for two minutes, or not within half an hour.
        """
        token = secrets.token_urlsafe(24)
        log_path = self._logs / (log or f"{name}.log")
        command = [sys.executable, "-m", module, "--config-json", config.model_dump_json(), "--die-with-parent", *arguments]
        with log_path.open("ab") as stderr:
            log_start = os.fstat(stderr.fileno()).st_size
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "EVERGRAD_TOKEN": token, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C goes to the controller alone, which then stops its workers in order
            )
        worker = Worker(name, process, "", token, log_path, log_start)
        self._workers.append(worker)
        assert process.stdout is not None
        try:
            line = await _unless_idle(process.stdout.readline(), process.pid)
        except TimeoutError as error:
            await worker.stop()
            hint = "the same command goes on from there; stop what else keeps the machine busy first"
            raise EvergradError(f"{name} was not ready {error}", where=str(log_path), hint=hint) from None
        if not line:
            raise await worker.died()
        worker.base_url = f"http://127.0.0.1:{json.loads(line)['port']}"
        death = self._report_death(worker, on_death or self.report)
        self._watchers += [asyncio.create_task(each) for each in (death, self._end_when_stuck(worker))]
        return worker

    async def watch(self) -> None:
        """Returns never; raises the first death of a worker, those started meanwhile included."""
        await self._death.wait()
        raise self._deaths[0]

    def report(self, error: Exception) -> None:
        """Has :meth:`watch` raise it, or tells whoever is told of deaths."""
        if self._tell_death is not None:
            self._tell_death(error)
            return
        self._deaths.append(error)
        self._death.set()

    async def _report_death(self, worker: Worker, tell: Callable[[WorkerDied], None]) -> None:
        death = await worker.died()
        if not worker.dismissed:
            tell(death)

    async def _end_when_stuck(self, worker: Worker) -> None:
        # Looks are counted, not seconds: a machine that slept finds its workers as they were.
        interval, ill = self._stuck_after_s / LOOKS, 0
        headers = {"authorization": f"Bearer {worker.token}"}
        timeout = min(HEALTH_TIMEOUT_S, interval)
        async with httpx.AsyncClient(base_url=worker.base_url, headers=headers, timeout=timeout) as http:
            while worker.process.returncode is None:
                _, complaint = await asyncio.gather(asyncio.sleep(interval), _complaint(http))
                ill = ill + 1 if complaint else 0
                if ill >= LOOKS:
                    worker.illness = f"stuck for {self._stuck_after_s:g} s: {complaint}"
                    worker.process.kill()
                    return


async def _unless_idle(line: Coroutine[Any, Any, bytes], pid: int) -> bytes:
    """Waits for ``line`` while the process ``pid`` computes.

    Raises:
        TimeoutError: it computed nothing for too long, or has computed for too long; the message says which.
    """
    reading = asyncio.ensure_future(line)
    started = busy = time.monotonic()
    computed = 0.0
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=min(1.0, IDLE_START_S / LOOKS))
            if done:
                return reading.result()
            now = time.monotonic()
            if (total := _cpu_seconds(pid)) > computed:
                computed, busy = total, now
            if now - busy > IDLE_START_S:
                raise TimeoutError(f"after {now - started:.0f} s, and computed nothing in the last {IDLE_START_S:g} s of them")
            if now - started > START_LIMIT_S:
                raise TimeoutError(f"after {now - started:.0f} s, of which it computed {computed:.0f} s")
    finally:
        reading.cancel()


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children, such as a trainer's ranks; 0 once it is gone."""
    try:
        process = psutil.Process(pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    except psutil.Error:
        return 0.0
    return float(sum(each.user + each.system for each in times))


async def _complaint(http: httpx.AsyncClient) -> str | None:
    """What is wrong with a worker by its own words or its silence; ``None`` when it works, or loads."""
    try:
        answer = await http.get("/health")
        if answer.status_code == 200 and not answer.content:
            return None  # vLLM's way to say that all is well
        health = answer.json()
        return str(health["reason"]) if health["status"] == "failing" else None
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return f"/health does not answer ({type(error).__name__})"


_PROGRESS = re.compile(r"\d+%\|")


def _tail(path: Path, start: int, lines: int = 3) -> str:
    """The last lines since ``start``, without progress bars."""
    with path.open(encoding="utf-8", errors="replace") as log:
        log.seek(start)
        told = (line.strip() for line in log if not _PROGRESS.search(line))
        return " | ".join(deque(filter(None, told), maxlen=lines)) or "it said nothing"
