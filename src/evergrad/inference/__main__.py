"""``python -m evergrad.inference``: one engine as a process of its own.

Says ``{"ready": true, "port": N, "pid": P}`` on standard output, in one line, once it answers; everything else it says goes
to standard error. When the thread that steps the engine dies, the process ends with exit code 1 and the reason, so that
whoever placed it puts another in its place.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from evergrad.inference.config import EngineConfig, EngineError
from evergrad.transfer.process import in_passing_thread
from evergrad.transfer.worker import announce, run_worker


def main() -> int:
    """Runs until it is told to stop, or its engine dies; returns the exit code."""
    return run_worker("evergrad.inference", "Serves one model over HTTP.", EngineConfig, _serve)


def _serve(config: EngineConfig, listener: socket.socket) -> None:
    if not (Path(config.model) / "config.json").is_file():
        raise EngineError("no model here", where=config.model, hint="give a Hugging Face folder with config.json and weights")
    import uvicorn

    from evergrad.inference.engine import Engine
    from evergrad.inference.server import EngineServer

    deaths: list[Exception] = []

    def end(error: Exception) -> None:
        deaths.append(error)
        # The last answers of a dead engine, its refusals among them, have two seconds to leave.
        http.config.timeout_graceful_shutdown = 2
        http.should_exit = True

    # Loading computes, too; from here on only the thread that steps the engine may.
    engine = in_passing_thread(lambda: Engine(config))
    if engine.notice is not None:
        print(f"notice: {engine.notice}", file=sys.stderr, flush=True)
    server = EngineServer(engine, os.environ.get("EVERGRAD_TOKEN"), on_ready=lambda: announce(listener), on_death=end)
    graceful = config.drain_s
    http = uvicorn.Server(
        uvicorn.Config(
            server.app, log_config=None, access_log=False, timeout_keep_alive=120, timeout_graceful_shutdown=graceful
        )
    )
    http.run(sockets=[listener])
    if deaths:
        raise EngineError(f"the engine stopped: {deaths[0]!r}")


if __name__ == "__main__":
    sys.exit(main())
