"""``evergrad serve`` as a user meets it: a process that OpenAI's client talks to, that follows its alias and ends cleanly."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from openai import NotFoundError, OpenAI
from safetensors.torch import load_file, save_file

from evergrad.envs import load_environment
from evergrad.inference import EngineClient
from evergrad.loop.traffic import TrafficStore
from evergrad.registry import Registry, base_model, make_tiny
from evergrad.service._canary import Canary
from evergrad.service._serving import _Follower, _hints, _Served
from evergrad.service.cli import command
from evergrad.service.client import Client, ClientError
from evergrad.training import TrainerClient
from evergrad.types import FinishReason, Message, ModelVersion, Verdict

ASK = [Message("user", "Where is my order?")]
START_S = 180


def make_version(run: Path, name: str, parent: str | None, seed: int) -> ModelVersion:
    """A version whose weights are the tiny model's with noise, so that it says something of its own."""
    folder = run / "versions" / name
    shutil.copytree(base_model("tiny"), folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(seed)
    noisy = {key: value + 0.3 * value.std() * torch.randn(value.shape, generator=noise) for key, value in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelVersion(name, parent, seed, f"versions/{name}", "tiny", "ab12", "2026-01-01T00:00:00+00:00")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two versions; ``production`` points at the second."""
    run = tmp_path_factory.mktemp("runs") / "demo"
    with Registry(run / "registry.sqlite") as registry:
        registry.register(make_version(run, "v1", None, 1))
        registry.register(make_version(run, "v2", "v1", 2))
        registry.promote("production", "v1", bootstrap=True)
        registry.promote("production", "v2", Verdict(True, ("better",), {}, "v2", "v1"))
    (run / "config.toml").write_text('name = "demo"\nmodel = "tiny"\n\n[environment]\nname = "support_desk"\n')
    return run


class Server:
    """One ``evergrad serve``, and what it has printed so far."""

    def __init__(self, run: Path) -> None:
        arguments = [sys.executable, "-m", "evergrad.service.cli", "serve", "--run", str(run), "--port", "0"]
        self.log = run / f"serve-{time.time_ns()}.out"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                arguments,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # A shell that runs the tests in the background has them ignore SIGINT; a user's terminal does not.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.url = self.wait_for(r"at (http://127\.0\.0\.1:\d+)/v1")

    def wait_for(self, pattern: str) -> str:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            match = re.search(pattern, self.log.read_text())
            if match:
                return match.group(1)
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"no {pattern!r} in: {self.log.read_text()}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int) -> int:
        """Sends a signal and returns the exit code; no child may be left."""
        children = self.children()
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        _, alive = psutil.wait_procs(children, timeout=15)
        assert children
        assert not alive
        return code


@pytest.fixture
def serve(served: Path) -> Iterator[Callable[[], Server]]:
    started: list[Server] = []

    def start() -> Server:
        started.append(Server(served))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[Server]:
    """One that several tests talk to; a start takes seconds."""
    started = Server(served)
    yield started
    assert started.end(signal.SIGTERM) == 0


@pytest.fixture
def two_bases(tmp_path: Path) -> Path:
    """A run whose ``production`` points at a version on a base model of half the layers, after one on the run's own."""
    run = tmp_path / "run"
    small = make_tiny(tmp_path / "small", layers=2)
    shutil.copytree(small, run / "versions" / "cheap")
    with Registry(run / "registry.sqlite") as registry:
        registry.register(make_version(run, "v1", None, 1))
        registry.register(ModelVersion("cheap", None, 2, "versions/cheap", str(small), "ab12", "2026-01-01T00:00:00+00:00"))
        registry.promote("production", "v1", bootstrap=True)
        registry.promote("production", "cheap", Verdict(True, ("cheaper",), {}, "cheap", "v1"))
    (run / "config.toml").write_text('name = "demo"\nmodel = "tiny"\n\n[environment]\nname = "support_desk"\n')
    return run


def test_an_endpoint_moves_between_base_models_and_cuts_nobody_off(two_bases: Path) -> None:
    server = Server(two_bases)
    try:
        cheap, long = ask(server.url), OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
        # A stream that is under way when the alias moves ends where it began.
        stream = long.completions.create(
            model="production", prompt="order", max_tokens=1500, temperature=1.0, stream=True, seed=3
        )
        begun = next(iter(stream)).choices[0].text
        assert command(["model", "rollback", "--run", str(two_bases)]) == 0
        server.wait_for(r"(production is now v1)")
        large = ask(server.url)
        assert large != cheap
        rest = [each.choices[0] for each in stream]
        assert rest[-1].finish_reason in ("stop", "length"), begun
        assert command(["model", "promote", "cheap", "--run", str(two_bases)]) == 0
        server.wait_for(r"(production is now cheap)")
        assert ask(server.url) == cheap
    finally:
        assert server.end(signal.SIGTERM) == 0


def ask(url: str, model: str = "production") -> str:
    with Client(url) as client:
        return client.chat(ASK, model, temperature=0.0, max_tokens=16).text


def test_the_promoted_version_answers_follows_rollback_and_survives_a_restart(
    serve: Callable[[], Server], served: Path
) -> None:
    server = serve()
    second = ask(server.url)
    assert ask(server.url, "v2") == second
    assert command(["model", "rollback", "--run", str(served)]) == 0
    server.wait_for(r"(production is now v1)")
    first = ask(server.url)
    assert first != second, "the versions of this test say different things"
    with pytest.raises(ClientError, match="v2"):
        ask(server.url, "v2")
    assert server.end(signal.SIGTERM) == 0

    again = serve()
    assert ask(again.url) == first, "bit for bit what the version said before the restart"
    assert command(["model", "promote", "v2", "--run", str(served)]) == 0
    again.wait_for(r"(production is now v2)")
    assert ask(again.url) == second
    assert again.end(signal.SIGINT) == 130
    assert "Traceback" not in again.log.read_text()


async def test_a_rollback_under_load_loses_no_request(serve: Callable[[], Server], served: Path) -> None:
    """200 requests in flight all the time, while the alias goes back."""
    server = serve()
    assert command(["model", "rollback", "--run", str(served)]) == 0
    server.wait_for(r"(production is now v1)")
    first = ask(server.url)
    assert command(["model", "promote", "v2", "--run", str(served)]) == 0
    server.wait_for(r"(production is now v2)")
    answered, over = asyncio.Semaphore(0), asyncio.Event()
    body = {"model": "production", "messages": [{"role": "user", "content": ASK[0].content}], "temperature": 0.0}
    async with httpx.AsyncClient(base_url=server.url, timeout=START_S, limits=httpx.Limits(max_connections=None)) as http:

        async def customer(number: int) -> None:
            while not over.is_set():
                response = await http.post("/v1/chat/completions", json={**body, "max_tokens": 8 + number % 9})
                assert response.status_code == 200, response.text
                assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
                answered.release()

        async with asyncio.TaskGroup() as customers:
            for number in range(200):
                customers.create_task(customer(number))
            for _ in range(200):
                await answered.acquire()
            assert await asyncio.to_thread(command, ["model", "rollback", "--run", str(served)]) == 0
            await asyncio.to_thread(server.wait_for, r"(production is now v1)(?s:.*production is now v1)")
            over.set()
    assert ask(server.url) == first, "bit for bit what the predecessor says"
    assert server.end(signal.SIGTERM) == 0
    assert command(["model", "promote", "v2", "--run", str(served)]) == 0


def test_openai_client_and_ours_see_the_same_answers_whole_and_in_pieces(server: Server) -> None:
    text = ask(server.url)
    chat = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).chat.completions
    messages = [{"role": "user", "content": ASK[0].content}]
    settings = {"model": "production", "temperature": 0.0, "max_tokens": 16}
    assert chat.create(messages=messages, **settings).choices[0].message.content == text
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat.create(messages=messages, stream=True, **settings)]
    assert "".join(pieces) == text
    with pytest.raises(NotFoundError):
        chat.create(model="prodcution", messages=messages)
    with Client(server.url + "/v1") as client:
        assert "".join(client.stream(ASK, temperature=0.0, max_tokens=16)) == text
        assert {"production"} < set(client.models())
        assert client.health()["status"]
        reply = client.chat(ASK, temperature=0.0, max_tokens=2)
        assert reply.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert reply.usage.completion_tokens <= 2
        with pytest.raises(ClientError, match="temperature"):
            client.chat(ASK, temprature=0.0)
        with pytest.raises(ClientError, match="production"):
            list(client.stream(ASK, "prodcution"))


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(server: Server, served: Path) -> None:
    before = ask(server.url)
    with Registry(served / "registry.sqlite") as registry:
        current = registry.resolve("production")
        registry.register(ModelVersion("broken", current, 9, "versions/nowhere", "tiny", "ab12", ""))
        registry.promote("production", "broken", Verdict(True, ("drill",), {}, "broken", current))
    server.wait_for(r"(error: .*goes on serving)")
    assert ask(server.url) == before
    with Registry(served / "registry.sqlite") as registry:
        registry.rollback("production")
    assert ask(server.url) == before


async def test_a_registry_that_cannot_be_read_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evergrad.service._serving.POLL_S", 0.01)
    loaded = asyncio.Queue[str]()

    class Engine:
        async def load(self, run: Path, version: ModelVersion, names: tuple[str, str]) -> None:
            loaded.put_nowait(version.version_id)

    path, told = tmp_path / "registry.sqlite", ""
    with Registry(path) as registry, TrafficStore(tmp_path / "traffic.sqlite") as store:
        first, second = (ModelVersion(name, None, 1, f"versions/{name}", "tiny", "r", "2026") for name in ("v1", "v2"))
        for each in (first, second):
            registry.register(each)
        registry.promote("production", "v1", bootstrap=True)
        engine: Any = Engine()
        follower = _Follower(tmp_path, "production", _Served(first), engine, registry, Canary("production"), store)
        following = asyncio.create_task(follower.follow())
        with sqlite3.connect(path) as connection:
            connection.execute("ALTER TABLE aliases RENAME TO lost")
        while "cannot read the registry database" not in told and not following.done():
            await asyncio.sleep(0.01)
            told += capfd.readouterr().err
        with sqlite3.connect(path) as connection:
            connection.execute("ALTER TABLE lost RENAME TO aliases")
        registry.promote("production", "v2", Verdict(True, ("better",), {}, "v2", "v1"))
        moved = asyncio.create_task(loaded.get())
        await asyncio.wait({moved, following}, return_when=asyncio.FIRST_COMPLETED)
        assert moved.done()
        assert moved.result() == "v2"
        assert "v1 goes on serving" in told
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("environment", ["support_desk", "no_such_thing"])
def test_the_examples_are_requests_of_the_run(tmp_path: Path, environment: str) -> None:
    (tmp_path / "config.toml").write_text(f'model = "tiny"\n[environment]\nname = "{environment}"\n')
    (tmp_path / "state.json").write_text('{"deployed": {"contract": "v2"}}')
    hints = _hints(tmp_path, "production", "http://x/v1")
    words = shlex.split(next(line for line in hints.splitlines() if "curl" in line))
    messages = json.loads(words[words.index("-d") + 1])["messages"]
    assert [message["role"] for message in messages][-1] == "user"
    if environment == "support_desk":
        assert messages[0]["content"] == load_environment(environment).system_prompt("v2")
    source = next(line for line in hints.splitlines() if "messages = " in line)
    assert ast.literal_eval(source.split(" = ")[1].strip()) == messages


def test_the_engine_dies_and_serve_says_so(serve: Callable[[], Server]) -> None:
    server = serve()
    for child in server.children():
        child.kill()
    assert server.process.wait(timeout=60) == 1
    assert re.search(r"error: serve died \(signal 9\)", server.log.read_text())


def test_a_killed_serve_leaves_no_engine_behind(serve: Callable[[], Server]) -> None:
    server = serve()
    children = server.children()
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


def test_a_taken_port_is_named(server: Server, served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.url.rsplit(":", 1)[1]
    assert command(["serve", "--run", str(served), "--port", port]) == 1
    out, error = capsys.readouterr()
    assert "loading" not in out
    assert error.count("\n") == 1
    assert port in error
    assert "Next: " in error


def test_nothing_answers_there() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ClientError, match="evergrad serve"):
        client.models()


def test_eval_measures_a_version_on_tasks_of_its_own(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "v1", "--run", str(served), "-n", "4", "--set", "difficulty=easy", "--json"]
    assert command(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["suite"] == "support_desk@v1/heldout"
    assert len(report["scores"]) == 4
    assert set(report["slices"].values()) == {"easy"}
    assert report["mean"] == 0.0, "a model that says noise solves nothing"
    assert report["ci95"][1] < 0.7
    assert sum(report["outcomes"].values()) >= 4


@contextmanager
def healthy() -> Iterator[int]:
    """The port of a server that says it is well, whatever it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            load = {"running": 0, "waiting": 0, "preemptions": 0, "kv_usage": 0.0, "kv_cache_tokens": 1}
            self.wfile.write(json.dumps({"status": "ok", "policy_version": 1, "load": load}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_no_proxy_stands_between_this_machine_and_itself(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with healthy() as port:
        with Client(f"http://{host}:{port}/v1") as client:
            assert (await asyncio.to_thread(client.health))["status"] == "ok"
        for worker in (TrainerClient(f"http://{host}:{port}"), EngineClient(f"http://{host}:{port}")):
            async with worker:
                assert (await worker.health())["status"] == "ok"
    with Client("http://far.invalid") as client:
        assert client._http.trust_env, "elsewhere, the user's proxy is the way"
