"""The trainer behind HTTP: one process, one model, one operation at a time.

All operations run on one worker thread, in the order they arrived, while ``/health`` goes on answering. The thread owns the
trainer and the publisher of its versions.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from evergrad.config import Config, ConfigError, nearest, parse_config
from evergrad.training.config import TrainerError
from evergrad.training.trainer import Trainer
from evergrad.training.wire import FolderBody, LogprobsBody, PublishBody, ResetBody, ScoreBody, StepBody, ValuesBody
from evergrad.transfer import Publisher, open_publisher
from evergrad.types import EvergradError, plain

BodyT = TypeVar("BodyT", bound=Config)


class TrainerService:
    """What the routes do; made and used on the worker thread only."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._publisher: Publisher | None = None
        self._saves: dict[str, Future[None]] = {}

    def step(self, body: StepBody) -> dict[str, Any]:
        return self.trainer.step(body.batch.noun(), body.loss, body.lr, body.updates)

    def descriptor(self) -> dict[str, Any]:
        adapter = self.trainer.adapter()
        return {**self._opened().descriptor, **({} if adapter is None else {"adapter": adapter})}

    def publish(self, body: PublishBody) -> dict[str, Any]:
        """Writes the weights straight into the slot that nobody reads; returns what an engine needs to take them."""
        self.trainer.check_finite()
        publisher = self._opened()
        try:
            self.trainer.write_weights(publisher)
            manifest = publisher.finish(body.policy_version)
        finally:
            publisher.abort()
        self.trainer.policy_version = body.policy_version
        return manifest.as_dict()

    def save(self, body: FolderBody) -> dict[str, Any]:
        """Begins to write; :meth:`saved` says when the folder is there."""
        self._saves[body.folder] = self.trainer.begin_save(body.folder)
        return self.state()

    def saved(self, folder: str) -> Future[None]:
        """Of the last save to ``folder``. May be asked from any thread.

        Raises:
            TrainerError: nothing has been saved there.
        """
        if folder not in self._saves:
            raise TrainerError("nothing has been saved there", where=folder)
        return self._saves[folder]

    def load(self, body: FolderBody) -> dict[str, Any]:
        self.trainer.load(body.folder)
        return self.state()

    def export(self, body: FolderBody) -> dict[str, Any]:
        self.trainer.export(body.folder)
        return self.state()

    def reset(self, body: ResetBody) -> dict[str, Any]:
        self.trainer.reset(body.weights_uri)
        return self.state()

    def logprobs(self, body: LogprobsBody) -> dict[str, Any]:
        return {"logprobs": self.trainer.logprobs(body.token_ids, body.temperature)}

    def score(self, body: ScoreBody) -> dict[str, Any]:
        return {"logprobs": self.trainer.score([sample.noun() for sample in body.samples], reference=body.reference)}

    def values(self, body: ValuesBody) -> dict[str, Any]:
        logprobs, values = self.trainer.values([sample.noun() for sample in body.samples])
        return {"logprobs": logprobs, "values": values}

    def state(self) -> dict[str, Any]:
        return {"updates": self.trainer.updates, "policy_version": self.trainer.policy_version}

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _opened(self) -> Publisher:
        if self._publisher is None:
            self._publisher = open_publisher(self.trainer.config.transfer, self.trainer.layout())
        return self._publisher


def trainer_app(service: TrainerService, token: str | None, on_ready: Callable[[], None] = lambda: None) -> FastAPI:
    """The routes of one trainer.

    Args:
        service: Must not be used by anyone else afterwards.
        token: Bearer token that every route wants; None opens them, for tests.
        on_ready: Called once when the application can answer.
    """
    worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
    busy: dict[str, Any] = {"operation": None, "since": None}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        on_ready()
        yield
        worker.submit(service.close)
        worker.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="evergrad trainer", lifespan=lifespan)

    @app.middleware("http")
    async def authorize(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        given = request.headers.get("authorization", "")
        if token is not None and not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return _error(401, "missing or wrong bearer token")
        return await call_next(request)

    @app.exception_handler(EvergradError)
    async def explain(_: Request, error: EvergradError) -> JSONResponse:
        return _error(422 if isinstance(error, ConfigError) else 409, str(error))

    @app.exception_handler(Exception)
    async def confess(_: Request, error: Exception) -> JSONResponse:
        return _error(500, f"the trainer failed, see its log: {error!r}")

    async def on_worker(name: str, work: Callable[[], dict[str, Any]]) -> JSONResponse:
        def timed() -> dict[str, Any]:
            busy.update(operation=name, since=time.monotonic())
            try:
                return work()
            finally:
                busy.update(operation=None, since=None)

        # Shielded: a caller that gives up does not stop an operation half-way, and the next waits for its end.
        answer = await asyncio.shield(asyncio.get_running_loop().run_in_executor(worker, timed))
        return JSONResponse(plain(answer, nonfinite="null"))

    async def with_body(request: Request, body: type[BodyT], work: Callable[[BodyT], dict[str, Any]]) -> JSONResponse:
        name = request.url.path
        try:
            data = json.loads(await request.body() or b"{}")
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", where=f"POST {name}") from error
        if not isinstance(data, dict):
            raise ConfigError("the body must be a JSON object", where=f"POST {name}")
        parsed = parse_config(body, data, where=f"POST {name}")
        return await on_worker(name.lstrip("/"), lambda: work(parsed))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        since = busy["since"]
        seconds = round(time.monotonic() - since, 3) if since is not None else None
        return {"status": "ok", **service.state(), "operation": busy["operation"], "seconds": seconds}

    @app.get("/descriptor")
    async def descriptor() -> JSONResponse:
        return await on_worker("descriptor", service.descriptor)

    @app.get("/saved")
    async def saved(folder: str) -> dict[str, Any]:
        # Beside the worker thread: a step that was asked for meanwhile does not wait for the disk.
        await asyncio.shield(asyncio.wrap_future(service.saved(folder)))
        return {}

    routes: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]]]] = {
        "step": (StepBody, service.step),
        "publish": (PublishBody, service.publish),
        "save": (FolderBody, service.save),
        "load": (FolderBody, service.load),
        "export": (FolderBody, service.export),
        "reset": (ResetBody, service.reset),
        "logprobs": (LogprobsBody, service.logprobs),
        "score": (ScoreBody, service.score),
        "values": (ValuesBody, service.values),
    }

    @app.post("/{name}")
    async def operate(name: str, request: Request) -> JSONResponse:
        if name not in routes:
            return _error(404, f"no operation '{name}': {nearest(name, routes)}")
        return await with_body(request, *routes[name])

    return app


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)
