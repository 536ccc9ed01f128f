"""What every worker process begins with: its arguments, its port, the line that says where it answers, and its device.

Engine and trainer differ in what they serve, not in how they are started, so that whoever places them knows one way.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from evergrad.config import Config, ConfigError, load_config, parse_config
from evergrad.transfer.process import die_with_parent
from evergrad.types import EvergradError

if TYPE_CHECKING:
    import torch

C = TypeVar("C", bound=Config)


def run_worker(
    module: str,
    purpose: str,
    config_class: type[C],
    serve: Callable[[C, socket.socket], None],
    words: Sequence[str] | None = None,
) -> int:
    """Reads the command line, binds the port and serves until told to stop; returns the exit code.

    An :class:`EvergradError` on the way is one line on standard error and exit code 1.

    Args:
        module: Such as ``evergrad.training``; started with ``python -m``.
        purpose: What ``--help`` says.
        serve: Answers on the bound socket; calls :func:`announce` once it does.
        words: The command line; the process's own by default.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=purpose)
    parser.add_argument("--config", type=Path, help="TOML file with the worker's configuration")
    parser.add_argument("--config-json", help="the same, as JSON; goes before the file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process, or standard input, ends")
    arguments = parser.parse_args(words)
    if arguments.die_with_parent:
        die_with_parent()
    try:
        config = _config(config_class, arguments)
        with _bind(arguments.host, arguments.port) as listener:
            serve(config, listener)
    except EvergradError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def announce(listener: socket.socket) -> None:
    """Says ``{"ready": true, "port": N, "pid": P}`` on standard output: the one line that a parent waits for."""
    listener.listen(1024)  # the server listens a moment later; who reads the line may connect at once
    print(json.dumps({"ready": True, "port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)


def pick_device(name: str) -> torch.device:
    """The device of that name, tried out; ``auto`` is a GPU where there is one.

    Raises:
        EvergradError: there is no such device, or it cannot be used.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EvergradError(f"device '{name}' cannot be used: {error}", hint="use 'cpu', 'cuda' or 'auto'") from error
    return device


def _config(config_class: type[C], arguments: argparse.Namespace) -> C:
    if arguments.config_json is None:
        return load_config(config_class, arguments.config)
    try:
        data = json.loads(arguments.config_json)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", where="--config-json") from error
    return parse_config(config_class, data, where="--config-json")


def _bind(host: str, port: int) -> socket.socket:
    # Bound before the model loads: a port that is taken is known at once, and none can be taken meanwhile.
    # It says that it is TCP, since asyncio turns Nagle's algorithm off only there. An answer's body, a packet of its own, would
    # otherwise wait until the client acknowledges the headers, which clients put off for 40 ms.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        hint = "give --port 0 for a free one"
        raise EvergradError(f"port {port} cannot be bound: {error.strerror}", where=host, hint=hint) from error
    return listener
