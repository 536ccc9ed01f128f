"""``evergrad serve``: an endpoint that answers with what an alias points at, now and after the alias has moved."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

from evergrad.service._edge import DONE, explain
from evergrad.service._engines import RunningEngine, engine_on
from evergrad.service._models import find_served, open_registry
from evergrad.types import EvergradError, ModelVersion

POLL_S = 1.0
"""How often the alias is looked up; a promotion or rollback shows at the endpoint about this much later."""

_HINTS = """
  curl {url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{alias}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

  from openai import OpenAI
  chat = OpenAI(base_url="{url}", api_key="none").chat.completions
  print(chat.create(model="{alias}", messages=[{{"role": "user", "content": "Hello"}}]).choices[0].message.content)
"""


def serve_alias(run: Path, alias: str, port: int) -> int:
    """Serves until SIGTERM (returns 0) or Ctrl-C (raises ``KeyboardInterrupt``); the engine ends first either way.

    Raises:
        EvergradError: nothing is promoted to ``alias``, the port is taken, or the engine died.
    """
    version = find_served(run, alias)
    return asyncio.run(_serve(run, alias, version, port))


async def _serve(run: Path, alias: str, version: ModelVersion, port: int) -> int:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with engine_on(run, version, _names(alias, version), port=port) as engine:
        url = f"{engine.base_url}/v1"
        print(f"{alias} is {version.version_id}, at {url} (Ctrl-C ends it)", flush=True)
        print(_HINTS.format(url=url, alias=alias), flush=True)
        tasks = {
            asyncio.create_task(engine.placement.watch(), name="watch the engine"),
            asyncio.create_task(_follow(run, alias, version, engine), name="follow the alias"),
            asyncio.create_task(ended.wait(), name="wait for SIGTERM"),
        }
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
    return DONE


async def _follow(run: Path, alias: str, version: ModelVersion, engine: RunningEngine) -> None:
    """Loads whatever the alias points at next. A version that cannot be loaded is reported once; the one before serves on."""
    tried = version.version_id
    with open_registry(run) as registry:
        while True:
            await asyncio.sleep(POLL_S)
            version_id = await asyncio.to_thread(registry.resolve, alias)
            if version_id is None or version_id == tried:
                continue
            tried = version_id
            following = registry.get(version_id)
            try:
                await engine.load(run, following, _names(alias, following))
            except EvergradError as error:
                print(f"error: {explain(error)[0]}; {version.version_id} goes on serving", file=sys.stderr, flush=True)
                continue
            version = following
            print(f"{alias} is now {version.version_id}", flush=True)


def _names(alias: str, version: ModelVersion) -> tuple[str, str]:
    return alias, version.version_id
