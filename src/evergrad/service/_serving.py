"""``evergrad serve``: an endpoint that answers with what an alias points at, now and after the alias has moved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.envs import Taskset
from evergrad.loop.traffic import Redact, TrafficStore, find_redactor, traffic_path
from evergrad.registry import Registry
from evergrad.service._canary import Canary
from evergrad.service._edge import DONE, explain
from evergrad.service._engines import RunningEngine, engine_on
from evergrad.service._gateway import Gateway
from evergrad.service._models import find_served, open_registry
from evergrad.service._runs import run_config
from evergrad.types import EvergradError, Message, ModelVersion

POLL_S = 1.0
"""How often alias and release are looked up; a promotion or rollback shows at the endpoint about this much later."""

_HINTS = """
  curl {url}/chat/completions -H 'Content-Type: application/json' -d {body}

  from openai import OpenAI
  chat = OpenAI(base_url="{url}", api_key="none").chat.completions
  messages = {messages}
  print(chat.create(model={alias}, messages=messages, temperature=0).choices[0].message.content)

A reply is a call of a tool, for you to execute and send back as {{"role": "tool", "content": "…"}}, or the answer.
"""

_KEPT = """
  Requests with store = true are kept in the run folder, redacted; "evergrad traffic" shows them and makes tasks of them.
  What became of one:  curl {url}/feedback -H 'Content-Type: application/json' -d '{{"completion_id": "…", "score": 1}}'
"""


def serve_alias(run: Path, alias: str, port: int, record: str | None = None) -> int:
    """Serves until SIGTERM (returns 0) or Ctrl-C (raises ``KeyboardInterrupt``); the engine ends first either way.

    Args:
        record: Name of the redactor, where what customers agree to is kept; nothing is when absent.

    Raises:
        EvergradError: nothing is promoted to ``alias``, the port is taken, there is no such redactor, or the engine died.
    """
    version = find_served(run, alias)
    _check_port(port)
    redact = find_redactor(record) if record is not None else None
    print(f"loading {version.version_id}…", flush=True)
    return asyncio.run(_serve(run, alias, version, port, redact))


async def _serve(run: Path, alias: str, version: ModelVersion, port: int, redact: Redact | None) -> int:
    ended, served = asyncio.Event(), _Served(version)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    def tell(address: str) -> None:
        print(f"{alias} is {version.version_id}, at {address}/v1 (Ctrl-C ends it)", flush=True)
        print(_hints(run, alias, f"{address}/v1"), flush=True)
        if redact is not None:
            print(_KEPT.format(url=f"{address}/v1"), flush=True)

    behind = 0 if redact is not None else port
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(open_registry(run))
        several = len(_bases(run, registry)) > 1
        async with engine_on(run, version, _names(alias, version), port=behind, several_bases=several) as engine:
            follower = _Follower(run, alias, served, engine, registry)
            tasks = {
                asyncio.create_task(engine.placement.watch(), name="watch the engine"),
                asyncio.create_task(ended.wait(), name="wait for SIGTERM"),
            }
            if redact is None:
                tell(engine.base_url)
            else:
                store = stack.enter_context(TrafficStore(traffic_path(run)))
                follower.canary, follower.store = Canary(alias), store
                await follower.follow_release()  # before the first request: a session may have begun before a restart
                gateway = Gateway(engine.base_url, store, redact, lambda: served.version.version_id, follower.canary)
                tasks.add(
                    asyncio.create_task(gateway.serve(port, lambda found: tell(f"http://127.0.0.1:{found}")), name="gateway")
                )
            tasks.add(asyncio.create_task(follower.follow(), name="follow the alias"))
            await _first_of(tasks)
    return DONE


async def _first_of(tasks: set[asyncio.Task[Any]]) -> None:
    """Waits until the first of them ends, raises what it raised, and ends the others."""
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class _Served:
    """What the engine answers with now."""

    version: ModelVersion


@dataclass
class _Follower:
    """Keeps the endpoint at what the registry says."""

    run: Path
    alias: str
    served: _Served
    engine: RunningEngine
    registry: Registry
    canary: Canary | None = None
    store: TrafficStore | None = None
    """Of a gateway; without one, customers are no part of a canary."""
    told: str = ""

    async def follow(self) -> None:
        """Looks at alias and release for ever. A registry that cannot be read is told of once, and ends nothing."""
        tried, trouble = self.served.version.version_id, ""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                version_id = await asyncio.to_thread(self.registry.resolve, self.alias)
                if version_id is not None and version_id != tried:
                    following, tried = self.registry.get(version_id), version_id
                    await self._load(following)
                trouble = ""
            except EvergradError as error:
                told = f"{explain(error)[0]}; {self.served.version.version_id} goes on serving"
                if told != trouble:
                    print(f"error: {told}", file=sys.stderr, flush=True)
                trouble = told
            # After the alias: a candidate that took it answers its sessions from where it was until our engine has it.
            await self.follow_release()

    async def follow_release(self) -> None:
        """Has the gateway know where the release stands."""
        if self.canary is None or self.store is None:
            return
        try:
            told = await self.canary.follow(self.registry, self.store, self.served.version.version_id)
        except EvergradError as error:  # what cannot be written keeps nobody from his answer
            self.canary.stop()
            told = f"{explain(error)[0]}; the candidate is asked by nobody until that is repaired"
        if told and told != self.told:
            print(f"canary: {told}", flush=True)
        self.told = told or self.told

    async def _load(self, following: ModelVersion) -> None:
        """Loads what the alias points at; it is tried once.

        Raises:
            EvergradError: it cannot be loaded; the one before serves on.
        """
        await self.engine.load(self.run, following, _names(self.alias, following))
        self.served.version = following
        print(f"{self.alias} is now {following.version_id}", flush=True)


def _check_port(port: int) -> None:
    """Before a model is made or loaded for nothing."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise EvergradError(
                f"port {port} cannot be bound: {error.strerror}",
                where="127.0.0.1",
                hint="stop what listens there, choose another --port, or give --port 0 for a free one",
            ) from error


def _hints(run: Path, alias: str, url: str) -> str:
    """How to talk to the endpoint: a request as the run's own environment would make it."""
    messages = [each.as_dict() for each in _first_request(run)]
    body = {"model": alias, "messages": messages, "temperature": 0}
    return _HINTS.format(url=url, alias=json.dumps(alias), body=shlex.quote(json.dumps(body)), messages=json.dumps(messages))


def _first_request(run: Path) -> Sequence[Message]:
    """System message and request of a task of the environment as it is deployed; a greeting where it cannot be loaded."""
    try:
        environment = run_config(run)["environment"]
        state = run / "state.json"
        deployed = json.loads(state.read_text(encoding="utf-8")).get("deployed") if state.is_file() else None
        return Taskset(environment["name"], deployed or environment.get("settings", {})).tasks("train", 1)[0].prompt
    except (EvergradError, OSError, ValueError, LookupError, TypeError):
        return (Message("user", "Hello"),)


def _bases(run: Path, registry: Registry) -> set[str]:
    """The base models of the run's versions, by now and later: its own, and those that arms try."""
    config = run_config(run)
    return {
        str(config["model"]),
        *(str(arm["base_model"]) for arm in config.get("arms", ()) if "base_model" in arm),
        *(version.base_model for version in registry.list()),
    }


def _names(alias: str, version: ModelVersion) -> tuple[str, str]:
    return alias, version.version_id
