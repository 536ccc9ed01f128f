"""``python -m evergrad.training``: one trainer as a process of its own.

Says ``{"ready": true, "port": N, "pid": P}`` on standard output, in one line, once it answers; everything else it says goes
to standard error. Routes want the bearer token of the environment variable ``EVERGRAD_TOKEN``, when it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path

from evergrad.config import ConfigError, load_config, parse_config
from evergrad.training.config import TrainerConfig, TrainerError, require_model_folder
from evergrad.transfer.process import die_with_parent
from evergrad.types import EvergradError


def main() -> int:
    """Runs until it is told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m evergrad.training", description="Trains one model, told over HTTP.")
    parser.add_argument("--config", type=Path, help="TOML file with a trainer's configuration")
    parser.add_argument("--config-json", help="the same, as JSON; goes before the file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process, or standard input, ends")
    arguments = parser.parse_args()
    if arguments.die_with_parent:
        die_with_parent()
    try:
        _serve(_config(arguments), _bind(arguments.host, arguments.port))
    except EvergradError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _config(arguments: argparse.Namespace) -> TrainerConfig:
    if arguments.config_json is None:
        return load_config(TrainerConfig, arguments.config)
    try:
        data = json.loads(arguments.config_json)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", where="--config-json") from error
    return parse_config(TrainerConfig, data, where="--config-json")


def _bind(host: str, port: int) -> socket.socket:
    # Bound before the model loads: a port that is taken is known at once, and none can be taken meanwhile.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise TrainerError(f"port {port} cannot be bound: {error.strerror}", where=host, hint="give --port 0") from error
    return listener


def _serve(config: TrainerConfig, listener: socket.socket) -> None:
    require_model_folder(config.model)
    import uvicorn
    from transformers.utils import logging

    from evergrad.training.server import TrainerService, trainer_app
    from evergrad.training.trainer import Trainer

    def announce() -> None:
        print(json.dumps({"ready": True, "port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)

    logging.disable_progress_bar()
    app = trainer_app(TrainerService(Trainer(config)), os.environ.get("EVERGRAD_TOKEN"), announce)
    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=120)).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
