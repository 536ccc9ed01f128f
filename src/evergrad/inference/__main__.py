"""``python -m evergrad.inference``: one engine as a process of its own.

Says ``{"ready": true, "port": N, "pid": P}`` on standard output, in one line, once it answers; everything else it says goes
to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evergrad.inference", description="Serves one model over HTTP.")
    parser.add_argument("--config", type=Path, help="TOML file with an engine's configuration")
    parser.add_argument("--config-json", default=None, help="the same, as JSON; goes before the file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process, or standard input, ends")
    arguments = parser.parse_args()
    if arguments.die_with_parent:
        from evergrad.transfer.process import die_with_parent

        die_with_parent()
    from evergrad.types import EvergradError

    try:
        _serve(arguments)
    except EvergradError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    from evergrad.config import ConfigError, load_config, parse_config
    from evergrad.inference.config import EngineConfig, EngineError

    if arguments.config_json is not None:
        try:
            data = json.loads(arguments.config_json)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", where="--config-json") from error
        config = parse_config(EngineConfig, data, where="--config-json")
    else:
        config = load_config(EngineConfig, arguments.config)
    if not (Path(config.model) / "config.json").is_file():
        raise EngineError("no model here", where=config.model, hint="give a Hugging Face folder with config.json and weights")
    # Bound before the model loads: a port that is taken is known at once, and none can be taken meanwhile.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((arguments.host, arguments.port))
    except OSError as error:
        raise EngineError(
            f"port {arguments.port} cannot be bound: {error.strerror}",
            where=arguments.host,
            hint="give --port 0 for a free one",
        ) from error
    import uvicorn

    from evergrad.inference.engine import Engine
    from evergrad.inference.server import EngineServer

    def announce() -> None:
        print(json.dumps({"ready": True, "port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)

    server = EngineServer(Engine(config), os.environ.get("EVERGRAD_TOKEN"), announce)
    settings = uvicorn.Config(
        server.app, log_config=None, access_log=False, timeout_keep_alive=120, timeout_graceful_shutdown=2
    )
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
