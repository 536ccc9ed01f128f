"""The engines that roll out: one, or several behind a router.

With ``max_off_policy_steps = 0`` a run repeats bit for bit, so an engine that dies ends what is under way, like any worker,
and the run goes on from its last saved state. Else nothing depends on which engine drew what: the requests of a dead one go on
at the others, from the token that they had reached, and another takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from evergrad.inference import InferenceClient, Router
from evergrad.loop._engines import EngineMaker
from evergrad.loop.placement import Worker, WorkerDied


class Restarts:
    """How many dead workers may still be replaced, over all of a run's sessions."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0

    def take(self) -> bool:
        """Counts one more; False when there were enough."""
        self.used += 1
        return self.used <= self.most

    def __str__(self) -> str:
        return f"restart {self.used} of {self.most}"


class RolloutEngines:
    """``count`` engines that look like one. Use as an async context manager, after :meth:`start`.

    Args:
        replaceable: Whether the run may go on without an engine that died.
        note: Tells the user.
    """

    def __init__(
        self,
        make: EngineMaker,
        count: int,
        restarts: Restarts,
        replaceable: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        self._make, self._count = make, count
        self._restarts, self._replaceable, self._note = restarts, replaceable, note
        self._router: Router | None = None
        self._workers: dict[str, Worker] = {}
        self._replacing: set[asyncio.Task[None]] = set()
        self._started = 0
        self.client: InferenceClient

    async def start(self) -> None:
        """Starts the engines side by side; ``client`` speaks to all of them from then on."""
        if self._count == 1:
            self.client, _ = await self._make("engine")
            return
        self.client = self._router = Router()
        await asyncio.gather(*(self._start_one() for _ in range(self._count)))

    async def update_weights(self, manifest: Mapping[str, Any], *, full_precision: bool) -> dict[str, Any]:
        """Has every engine take a published version; one that does not is ended, since it would keep the publisher's slot."""
        receipt = await self.client.update_weights(manifest, full_precision=full_precision)
        for name, reason in receipt.get("left_behind", {}).items():
            self._note(f"{name} {reason}")
            if name in self._workers and self._workers[name].process.returncode is None:
                self._workers[name].process.kill()
        return receipt

    async def _start_one(self) -> None:
        assert self._router is not None, "one engine has nobody to take its place"
        self._started += 1
        name = f"engine-{self._started}"
        client, worker = await self._make(name, lambda death: self._died(name, death))
        assert worker is not None, "a server at an address is one, not several"
        try:
            await self._router.add(name, client)
        except BaseException:
            await client.close()
            raise
        self._workers[name] = worker

    def _died(self, name: str, death: WorkerDied) -> None:
        joined = self._workers.pop(name, None) is not None
        if not joined or not self._replaceable() or not self._restarts.take():
            self._make.placement.report(death)
            return
        self._note(f"{death}; the other engines go on, and another takes its place ({self._restarts})")
        task = asyncio.create_task(self._replace(name), name=f"replace {name}")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, name: str) -> None:
        assert self._router is not None
        try:
            await self._router.remove(name)
            await self._start_one()
        except Exception as error:
            # Nobody waits for this task; the run's own watch tells the error, and ends the run or starts it anew.
            self._make.placement.report(error)

    async def __aenter__(self) -> RolloutEngines:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        if hasattr(self, "client"):
            await self.client.close()
