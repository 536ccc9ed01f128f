"""Customers in a canary: a session has one side from its first request to its last, and no request is lost when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from evergrad.inference import place
from evergrad.loop.traffic import TrafficStore, digest
from evergrad.registry import Registry, base_model
from evergrad.service._canary import Canary
from evergrad.service._gateway import Gateway, _Server
from evergrad.types import ModelVersion, Release, ReleaseState, Side, Verdict
from tests.inference.test_server import serving


class Engine:
    """Says its own name to every chat, or what it is told to answer."""

    def __init__(self, name: str, serves: str) -> None:
        self.name, self.serves, self.asked, self.status = name, serves, list[dict[str, Any]](), 200
        self._server: uvicorn.Server | None = None

    async def start(self, port: int = 0) -> str:
        app = FastAPI()
        app.post("/v1/chat/completions")(self._chat)
        app.get("/v1/models")(self._models)
        listener = socket.create_server(("127.0.0.1", port))
        self._server = _Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            await self._running

    async def _models(self) -> Any:
        return {"data": [{"id": self.serves}]}

    async def _chat(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        if asked["model"] != self.serves:
            return JSONResponse({"error": {"message": "not served"}}, status_code=404)
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, status_code=self.status)
        number = f"{self.name}-{len(self.asked)}"
        return JSONResponse({"id": number, "choices": [{"message": {"role": "assistant", "content": self.name}}]})


@dataclass
class House:
    """A release under way, two engines, and a gateway before them that a test may start anew."""

    registry: Registry
    store: TrafficStore
    ours: Engine
    theirs: Engine
    ours_url: str = ""
    theirs_url: str = ""
    client: httpx.AsyncClient = field(default_factory=httpx.AsyncClient)
    canary: Canary = field(default_factory=lambda: Canary("production"))

    def release(self) -> Release:
        found = self.registry.releases.last("production")
        assert found is not None
        return found

    async def look(self) -> str:
        return await self.canary.follow(self.registry, self.store, "v1")

    async def start_gateway(self, *, look: bool = True) -> None:
        self.canary = Canary("production")
        if look:
            await self.look()
        gateway = Gateway(self.ours_url, self.store, lambda text: text, lambda: "v1", self.canary)
        self.gateway = gateway
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app), base_url="http://gateway", timeout=60)

    async def ask(self, *said: str, **more: Any) -> str:
        messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(said)]
        answer = await self.client.post(
            "/v1/chat/completions", json={"model": "production", "messages": messages, "store": True, **more}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def settle(self) -> None:
        while self.gateway._keeping:
            await asyncio.gather(*self.gateway._keeping)

    def side(self, session: str) -> Side:
        """Of a session by its name, as the gateway's record has it."""
        at = place(self.release().salt, digest("default", "", "session", session))
        return Side.CANDIDATE if at < self.release().share else Side.INCUMBENT


PLAN = {"shadow": 0, "shares": [0.3, 0.6], "outcomes": 50, "alpha": 0.05, "margin": 0.0}


def begin(registry: Registry, state: ReleaseState = ReleaseState.CANARY, share: float = 0.3) -> Release:
    return registry.releases.begin("production", Verdict(True, ("better",), {}, "v2", "v1"), PLAN, state=state, share=share)


@asynccontextmanager
async def house(tmp_path: Path, *, released: bool = True, offered: bool = True) -> AsyncIterator[House]:
    registry = Registry(tmp_path / "registry.sqlite")
    for name in ("v1", "v2"):
        registry.register(ModelVersion(name, None, 1, f"versions/{name}", "tiny", "r", "2026-01-01"))
    registry.promote("production", "v1", bootstrap=True)
    ours, theirs = Engine("ours", "production"), Engine("theirs", "v2")
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        found = House(registry, store, ours, theirs, await ours.start(), await theirs.start())
        if released:
            begin(registry)
        if released and offered:
            registry.releases.offer(found.release(), found.theirs_url)
        await found.start_gateway()
        yield found
        await found.settle()
        await asyncio.gather(ours.stop(), theirs.stop())
    registry.close()


async def test_a_session_has_one_version_and_what_is_kept_says_which(tmp_path: Path) -> None:
    """Sixty conversations of three turns at once, while the share grows between two turns."""
    async with house(tmp_path) as found:
        before = {f"s{number}": found.side(f"s{number}") for number in range(40)}

        async def converse(session: str) -> list[str]:
            said, replies = ["hello"], list[str]()
            for turn in range(3):
                replies.append(await found.ask(*said, session_id=session))
                said += [replies[-1], "go on"]
                if turn == 0:
                    await widened.wait()
            return replies

        widened = asyncio.Event()
        first = {session: asyncio.create_task(converse(session)) for session in before}
        while len(found.ours.asked) + len(found.theirs.asked) < len(before):  # noqa: ASYNC110 (there is no event in an engine)
            await asyncio.sleep(0.01)
        found.registry.releases.widen(found.release(), 0.6, reason="no harm")
        assert await found.look() == "v2 answers 0.6 of the sessions"
        widened.set()
        for session, task in first.items():
            assert await task == ["theirs" if before[session] is Side.CANDIDATE else "ours"] * 3
        late = [f"late{number}" for number in range(20)]
        for session in late:
            assert await found.ask("hello", session_id=session) == (
                "theirs" if found.side(session) is Side.CANDIDATE else "ours"
            )
        await found.settle()
        said = Counter((each.trace.version_id, each.trace.replies[-1]) for each in found.store.traces())
        assert set(said) == {("v1", "ours"), ("v2", "theirs")}
        rows = found.store.canary.of_release(1)
        assert len(rows) == len({each.number for each in rows}) == 60
        assert Counter(each.share for each in rows) == {0.3: 40, 0.6: 20}
        assert {each.trace.version_id for each in found.store.traces() if each.session is None} == set()
        assert all(each["model"] == "v2" and each["store"] is True for each in found.theirs.asked)
        assert found.registry.releases.gateways(found.release()) == (os.getpid(),)


async def test_a_conversation_without_a_name_is_known_by_how_it_began(tmp_path: Path) -> None:
    async with house(tmp_path) as found:
        for number in range(30):
            said = [f"hello, I am number {number}"]
            first = await found.ask(*said, user="u")
            for _ in range(2):
                said += [first, "go on"]
                assert await found.ask(*said, user="u") == first
        assert found.ours.asked
        assert found.theirs.asked
        await found.settle()
        assert len(found.store.canary.of_release(1)) == 30


async def test_nobody_meets_a_candidate_in_its_shadow_nor_without_a_release_nor_by_another_name(tmp_path: Path) -> None:
    async with house(tmp_path, released=False) as found:

        async def come(prefix: str, **more: Any) -> None:
            for number in range(20):
                await found.ask("hello", session_id=f"{prefix}{number}", **more)

        await come("before")
        shadow = begin(found.registry, ReleaseState.SHADOW, 0.0)
        found.registry.releases.offer(shadow, found.theirs_url)
        assert await found.look() == ""
        await come("shadow")
        found.registry.releases.widen(shadow, 0.3, reason="it answers")
        assert await found.look() == "v2 answers 0.3 of the sessions"
        answer = await found.client.post(
            "/v1/chat/completions", json={"model": "v1", "messages": [{"role": "user", "content": "x"}]}
        )
        assert answer.status_code == 404, "our engine of this test knows no v1; the candidate's was not asked"
        for number in range(20):  # they began before the candidate was asked, and go on
            assert await found.ask("hello", "ours", "go on", session_id=f"before{number}") == "ours"
        assert found.theirs.asked == []
        await found.settle()
        assert found.store.canary.of_release(1) == [], "no coin was tossed for them"
        await come("now")
        assert found.theirs.asked


async def test_what_the_candidate_cannot_answer_is_harm_and_no_customer_sees_it(tmp_path: Path) -> None:
    async with house(tmp_path) as found:
        session = next(name for name in map(str, range(99)) if found.side(name) is Side.CANDIDATE)
        other = next(name for name in map(str, range(99)) if found.side(name) is Side.INCUMBENT)
        found.theirs.status = found.ours.status = 400
        for each in (session, other):  # too long, say: the customer's doing, and nobody's fault
            refused = await found.client.post(
                "/v1/chat/completions",
                json={"model": "production", "messages": [], "store": True, "session_id": each},
            )
            assert refused.status_code == 400
        assert [len(found.ours.asked), len(found.theirs.asked)] == [2, 1]
        await found.settle()
        assert found.store.canary.of_release(1) == []
        found.ours.status, found.theirs.status = 200, 500
        assert await found.ask("hello", session_id=session) == "ours"
        assert await found.ask("hello", "ours", "go on", session_id=session) == "ours"
        assert len(found.theirs.asked) == 2, "a session that was taken over is not given back"
        found.ours.status = 500
        failed = await found.client.post(
            "/v1/chat/completions", json={"model": "production", "messages": [], "store": True, "session_id": other}
        )
        assert failed.status_code == 500
        await found.settle()
        rows = [(each.side, each.failed) for each in found.store.canary.of_release(1)]
        assert rows == [(Side.CANDIDATE, True), (Side.INCUMBENT, True)], "each side's failures count alike"
        assert {each.trace.version_id for each in found.store.traces()} == {"v1"}


async def test_while_the_candidates_engine_is_gone_the_predecessor_answers_and_nobody_is_blamed(tmp_path: Path) -> None:
    """As between a kill of the run and its return: another process has the port for a while, then there is a new engine."""
    async with house(tmp_path) as found:
        mine = [name for name in map(str, range(200)) if found.side(name) is Side.CANDIDATE]
        assert await found.ask("hello", session_id=mine[0]) == "theirs"
        await found.theirs.stop()
        assert await found.ask("hello", "theirs", "go on", session_id=mine[0]) == "ours"
        for name in mine[1:5]:
            assert await found.ask("hello", session_id=name) == "ours"
        assert await found.look() == ""
        stranger = Engine("stranger", "t-c9-rl")
        await stranger.start(int(found.theirs_url.rpartition(":")[2]))
        found.canary._url = found.theirs_url  # as when the port changes hands between two looks
        assert await found.ask("hello", "theirs", "go on", session_id=mine[0]) == "ours"
        assert len(stranger.asked) == 1
        await found.look()
        assert await found.ask("hello", session_id=mine[5]) == "ours"
        assert found.registry.releases.gateways(found.release()) == ()
        await found.settle()
        assert [(each.failed, each.share) for each in found.store.canary.of_release(1)] == [(False, 0.3)]
        back = Engine("back", "v2")
        found.registry.releases.offer(found.release(), await back.start())
        assert await found.look() == "v2 answers 0.3 of the sessions"
        assert await found.ask("hello", "theirs", "go on", "ours", "and on", session_id=mine[0]) == "back"
        for name in mine[1:6]:
            assert await found.ask("hello", "ours", "go on", session_id=name) == "ours", "it began with the predecessor"
        assert await found.ask("hello", session_id=mine[6]) == "back"
        assert len(stranger.asked) == 1, "it refused the version, and was asked no more"
        await asyncio.gather(stranger.stop(), back.stop())


async def test_a_gateway_that_was_killed_deals_as_before(tmp_path: Path) -> None:
    """Sessions that began at a smaller share, too; those who agreed to be kept are known again."""
    async with house(tmp_path) as found:
        sessions = [f"s{number}" for number in range(60)]
        before = {session: await found.ask("hello", session_id=session) for session in sessions}
        found.registry.releases.widen(found.release(), 0.6, reason="no harm")
        await found.settle()
        await found.start_gateway()
        for session, said in before.items():
            assert await found.ask("hello", said, "go on", session_id=session) == said
            assert await found.ask("hello", session_id=session) == said
        await found.settle()
        assert Counter(each.share for each in found.store.canary.of_release(1)) == {0.3: 60}
        # One that was not kept goes on where the hash says, and is no evidence.
        unknown = next(name for name in map(str, range(99)) if found.side(name) is Side.CANDIDATE)
        assert await found.ask("hello", "theirs", "go on", session_id=unknown) == "theirs"
        await found.settle()
        assert len(found.store.canary.of_release(1)) == 60


async def test_without_consent_a_session_is_dealt_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    async with house(tmp_path) as found:
        failed = next(name for name in map(str, range(99)) if found.side(name) is Side.CANDIDATE)
        found.theirs.status = 500
        for said in (["hello"], ["hello", "ours", "go on"]):
            assert await found.ask(*said, session_id=failed, store=False) == "ours"
        assert len(found.theirs.asked) == 1, "taken over to its end"
        found.theirs.status = 200
        for number in range(20):
            await found.ask("hello", session_id=f"s{number}", store=False)
        assert found.theirs.asked
        await found.settle()
        assert found.store.canary.of_release(1) == []
        assert found.store.traces() == []


async def test_rollback_under_load_loses_no_customer(tmp_path: Path) -> None:
    """Real engines, 120 requests under way, half of them streams, while the release is rolled back and the candidate's engine
    is ended as the run ends it: once the gateway has left it."""
    tiny = base_model("tiny")
    with serving(tiny, served_names=["production"]) as first, serving(tiny, served_names=["v2"]) as second:
        async with house(tmp_path, offered=False) as found:
            found.ours_url = f"http://127.0.0.1:{first.port}"
            found.registry.releases.widen(found.release(), 0.6, reason="no harm")
            found.registry.releases.offer(found.release(), f"http://127.0.0.1:{second.port}")
            await found.start_gateway()
            ended = asyncio.Semaphore(0)

            async def ask(number: int) -> tuple[int, str]:
                body = {"model": "production", "messages": [{"role": "user", "content": f"number {number}"}]}
                more = {"max_tokens": 24, "temperature": 0.0, "store": True, "stream": number % 2 == 0}
                answer = await found.client.post("/v1/chat/completions", json={**body, **more, "session_id": str(number)})
                ended.release()
                return answer.status_code, answer.text

            flying = [asyncio.create_task(ask(number)) for number in range(120)]
            for _ in range(10):
                await ended.acquire()
            at_candidate = found.canary._sending + sum(not each.is_closed for each in found.canary._answers)
            assert at_candidate > 10, "requests of canary sessions are under way"
            found.registry.releases.roll_back(found.release(), reason="harm")
            assert await found.look() == "the engine of v2 is asked no more"
            assert found.registry.releases.gateways(found.release()) == (os.getpid(),), "still under way there"
            while found.registry.releases.gateways(found.release()):
                await asyncio.sleep(0.05)
                await found.look()
            second.process.send_signal(signal.SIGTERM)
            done = await asyncio.gather(*flying)
            await found.settle()
            for number, (status, text) in enumerate(done):
                assert status == 200, text
                if number % 2 == 0:
                    assert text.rstrip().endswith("data: [DONE]")
                    assert '"error"' not in text
                else:
                    assert json.loads(text)["choices"][0]["finish_reason"] in ("length", "stop")
            traces = found.store.traces()
            assert len(traces) == 120
            assert min(Counter(each.trace.version_id for each in traces).values()) > 20
            assert not any(each.failed for each in found.store.canary.of_release(1))
            assert (await ask(0))[0] == 200, "the session of a canary goes on with the predecessor"
            await found.settle()


async def test_a_gateway_whose_engine_serves_another_version_keeps_out_of_it(tmp_path: Path) -> None:
    async with house(tmp_path) as found:
        assert await found.canary.follow(found.registry, found.store, "another") == "the engine of v2 is asked no more"
        assert await found.ask("hello", session_id="a") == "ours"
        assert found.theirs.asked == []
