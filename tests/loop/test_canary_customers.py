"""Customers of a real gateway beside a real run: they meet the candidate, say what it was like, and have it rolled back."""

from __future__ import annotations

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from evergrad.evals import CanaryConfig
from evergrad.loop.traffic import TrafficStore, traffic_path
from evergrad.registry import Registry
from evergrad.types import Release, ReleaseState
from tests.loop.conftest import PATIENCE_S, Start, finish, half_written, workers
from tests.loop.test_releasing import alone, planted, trained  # noqa: F401 (fixtures)
from tests.loop.test_traffic_to_tasks import address


@dataclass
class Customers:
    """Each is one session; who is answered by the candidate complains."""

    url: str
    complain: bool = True
    versions: dict[str, list[str]] = field(default_factory=dict)
    """By session, what the model of each answer was named."""

    def ask(self, session: str, turn: int = 0) -> str:
        messages = [{"role": "user", "content": f"one two one two {session} blue"}]
        for _ in range(turn):
            messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "and now?"}]
        body = {"model": "production", "messages": messages, "store": True, "session_id": session, "max_tokens": 4}
        answer = httpx.post(f"{self.url}/chat/completions", json={**body, "temperature": 0}, timeout=600)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        self.versions.setdefault(session, []).append(told["model"])
        score = 0.0 if self.complain and told["model"] == "planted" else 1.0
        # Some say nothing.
        if int(session) % 4:
            said = httpx.post(f"{self.url}/feedback", json={"completion_id": told["id"], "score": score}, timeout=600)
            assert said.status_code == 200, said.text
        return str(told["model"])

    def come(self, sessions: range, turn: int = 0) -> None:
        with ThreadPoolExecutor(4) as crowd:
            list(crowd.map(lambda number: self.ask(str(number), turn), sessions))


def standing(registry: Registry) -> Release:
    found = registry.releases.last("production")
    assert found is not None
    return found


def wait_until_offered(registry: Registry, process: subprocess.Popen[str], but: str = "") -> None:
    """Until the candidate's engine is asked by a gateway.

    Args:
        but: Its address before the run was killed.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = standing(registry)
        if registry.releases.offered(found) not in ("", but) and registry.releases.gateways(found):
            break
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.5)  # the gateway has said that it is about to ask there


@pytest.mark.slow
def test_customers_roll_a_candidate_back_and_a_kill_in_between_moves_none_of_them(
    trained: Path,  # noqa: F811
    tmp_path: Path,
    start: Start,
    redactor: str,
) -> None:
    """What the run plays itself goes as well on either side: the weights are the same."""
    run = planted(trained, tmp_path / "met", CanaryConfig(shares=(0.4,), outcomes=100_000), spoil=False)
    serving = start("serve", "--run", str(run), "--port", "0", "--record", redactor)
    customers = Customers(address(serving))
    with Registry(run / "registry.sqlite") as registry:
        customers.come(range(10))
        assert set(map(tuple, customers.versions.values())) == {("production",)}, "nobody carries the release out yet"
        running = start("run", str(tmp_path / "canary.toml"), "--run-dir", str(run))
        wait_until_offered(registry, running)
        customers.come(range(100, 120))
        met = [name for name, versions in customers.versions.items() if versions == ["planted"]]
        assert 1 < len(met) < 20
        before = standing(registry)

        children = workers(running.pid)
        running.kill()
        running.wait()
        psutil.wait_procs(children, timeout=30)
        assert standing(registry) == before
        customers.come(range(100, 110), turn=1)
        assert {customers.versions[str(number)][1] for number in range(100, 110)} == {"production"}, "nobody is lost"

        running = start("run", str(tmp_path / "canary.toml"), "--run-dir", str(run))
        wait_until_offered(registry, running, but=registry.releases.offered(before))
        assert standing(registry) == before, "the same share"
        customers.come(range(110, 120), turn=1)
        for number in range(110, 120):
            first, second = customers.versions[str(number)]
            assert first == second, "the same side"
        number = 200
        while standing(registry).state.is_open:
            assert number < 1200, "the complaints of so many are harm"
            customers.come(range(number, number + 20))
            number += 20
        finish(running)
        found = standing(registry)
        assert found.state is ReleaseState.ROLLED_BACK
        last = registry.releases.events(found.release_id)[-1]
        assert last.actor == "canary"
        assert last.evidence["customers"]["candidate"]["mean"] == 0.0
        assert last.evidence["customers"]["incumbent"]["mean"] == 1.0
        assert last.evidence["e_value"] >= 20
        assert registry.releases.gateways(found) == (), "the engine ended when the gateway had left it"
        customers.come(range(2000, 2020))
        assert {customers.versions[str(each)][0] for each in range(2000, 2020)} == {"production"}
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=600) == 0
    with TrafficStore(traffic_path(run)) as store:
        kept = {each.trace.version_id for each in store.traces()}
        assert kept == {"planted", found.incumbent_id}
        assert all(each.session == str(each.number) for each in store.canary.of_release(found.release_id))
    assert half_written(run) == []


@pytest.mark.slow
def test_while_a_harmless_candidate_is_promoted_no_customer_is_lost(
    trained: Path,  # noqa: F811
    tmp_path: Path,
    start: Start,
    redactor: str,
) -> None:
    """Customers come all the time, and go on while the endpoint takes over what the candidate's own engine answered."""
    run = planted(trained, tmp_path / "kept", CanaryConfig(shares=(0.3, 0.6), outcomes=60), spoil=False)
    serving = start("serve", "--run", str(run), "--port", "0", "--record", redactor)
    customers = Customers(address(serving), complain=False)
    running = start("run", str(tmp_path / "canary.toml"), "--run-dir", str(run))
    number = 0
    while running.poll() is None:
        customers.come(range(number, number + 8))
        customers.come(range(number, number + 8), turn=1)
        number += 8
    finish(running)
    with Registry(run / "registry.sqlite") as registry:
        found = standing(registry)
        assert found.state is ReleaseState.PROMOTED
        assert registry.resolve("production") == "planted"
        assert registry.releases.gateways(found) == ()
    customers.come(range(number, number + 8))
    assert {customers.versions[str(each)][0] for each in range(number, number + 8)} == {"production"}
    assert ["planted", "planted"] in customers.versions.values()
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=600) == 0
    with TrafficStore(traffic_path(run)) as store:
        assert len(store.canary.of_release(found.release_id)) > 4
        assert not any(each.failed for each in store.canary.of_release(found.release_id))
