"""The vLLM that a run starts: its configuration, its words, its door and its end."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from evergrad.inference.backends import BackendConfig, VllmClient, VllmServerConfig
from evergrad.inference.backends.evergrad_vllm import RequireToken
from evergrad.loop.placement import LocalPlacement, WorkerDied


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "sglang"}, "not started by the run.*url"),
        ({"url": "http://a:1"}, "leave url out"),
        ({"backend": "vllm", "url": "gpu1:8000"}, "http://HOST:PORT"),
        ({"backend": "vllm", "url": "http://a:1", "arguments": ["--x"]}, "arguments are for a vLLM that the run starts"),
        ({"backend": "vllm", "arguments": ["--dtype=bfloat16"]}, "'--dtype' is set by the run"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackendConfig(**settings)


def program(folder: Path, text: str) -> str:
    """A ``vllm`` of a few lines."""
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


SERVES = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import entry_points
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/told":
            plugins = [each.value for each in entry_points(group="vllm.general_plugins")]
            self.wfile.write(json.dumps([sys.argv, dict(os.environ), plugins, child.pid]).encode())
    def log_message(self, *words):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


async def test_it_is_told_what_a_run_needs_and_ends_with_all_its_workers(tmp_path: Path) -> None:
    config = VllmServerConfig(
        model="m", command=program(tmp_path, SERVES), threads=1, lora_rank=5, arguments=("--max-num-seqs", "8")
    )
    async with LocalPlacement(tmp_path / "logs", stuck_after_s=1.0) as placement:
        worker = await placement.start("vllm", "evergrad.inference.backends.vllm_server", config)
        await asyncio.sleep(1.5)
        assert worker.process.returncode is None  # its health has no body, and that is well
        told = VllmClient(worker.base_url, tmp_path, route="slots", scratch=tmp_path)
        words, environment, plugins, child = json.loads(await told._http.tell("GET", "/told"))
        await told.close()
        assert words[1:3] == ["serve", "m"]
        for name, value in {"--max-lora-rank": "8", "--dtype": "float32", "--max-num-seqs": "8"}.items():
            assert words[words.index(name) + 1] == value
        assert environment["EVERGRAD_TOKEN"] == worker.token
        assert environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert plugins == ["evergrad_vllm:register"]
        family = [psutil.Process(worker.process.pid), psutil.Process(child)]
        await worker.stop()
        assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.parametrize(
    ("text", "message"), [("raise SystemExit(7)", "exit code 7 before it was ready"), (None, "no program")]
)
async def test_one_that_does_not_start_says_why(tmp_path: Path, text: str | None, message: str) -> None:
    command = str(tmp_path / "nowhere") if text is None else program(tmp_path, text)
    async with LocalPlacement(tmp_path / "logs") as placement:
        with pytest.raises(WorkerDied, match=message):
            await placement.start(
                "vllm", "evergrad.inference.backends.vllm_server", VllmServerConfig(model="m", command=command)
            )


async def test_the_door_wants_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_TOKEN", "secret")
    passed: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    door = RequireToken(app)
    for path, key in (("/pause", b"Bearer secret"), ("/pause", b"Bearer guess"), ("/resume", b""), ("/health", b"")):
        headers = [(b"authorization", key)] if key else []
        await door({"type": "http", "path": path, "headers": headers}, None, send)
    assert passed == ["/pause", "/health"]
    assert [message["status"] for message in sent if "status" in message] == [401, 401]
    monkeypatch.setenv("EVERGRAD_TOKEN", "")
    assert not RequireToken(app)._allowed([(b"authorization", b"Bearer ")])


def test_the_plugin_imports_nothing_of_the_house() -> None:
    """vLLM's environment has no evergrad."""
    folder = Path(__file__).parents[2] / "src" / "evergrad" / "inference" / "backends"
    for name in ("evergrad_vllm.py", "evergrad_vllm_slots.py"):
        text = (folder / name).read_text(encoding="utf-8")
        assert "import evergrad" not in text
        assert "from evergrad" not in text
    code = "import sys; sys.path.insert(0, sys.argv[1]); import evergrad_vllm; print(evergrad_vllm.BACKEND)"
    found = subprocess.run([sys.executable, "-I", "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "evergrad_slots"
