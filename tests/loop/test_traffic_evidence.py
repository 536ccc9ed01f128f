"""What customers' stored conversations say of the version that serves, and which triggers that sets off."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from evergrad.envs import Taskset, content_hash
from evergrad.loop._folder import LoopState
from evergrad.loop._watching import _customers, _drift
from evergrad.loop.config import RunConfig
from evergrad.loop.traffic import CustomerOutcomes, DealtSession, Redacted, ServedTraffic, TrafficStore
from evergrad.loop.triggers import Live, WatchConfig, fired
from evergrad.types import (
    Completion,
    FinishReason,
    Message,
    ModelVersion,
    Outcome,
    PolicySpan,
    Rollout,
    SessionOutcome,
    Side,
    Turn,
)
from tests.loop.conftest import Start, finish
from tests.loop.test_traffic_to_tasks import CONFIG, QUEUES, Customers, address

V1, V2 = "Queues a b c d", "Queues m n o p"
TASKSET = Taskset(str(QUEUES), {"contract": "v1"})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrafficStore]:
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        yield store


def keep(
    store: TrafficStore, name: str, reply: str = "b", *, version: str = "v", system: str = V1, ask: str = "cancel"
) -> None:
    said = (Message("system", system), Message("user", f"The lamp of order {name}: {ask}"), Message("assistant", reply))
    store.keep(Redacted(name, "default", None, version, said, system_hash=content_hash(system)))


async def test_conversations_are_judged_by_customers_else_by_the_verifier(store: TrafficStore) -> None:
    served = ServedTraffic(store)
    assert await served.outcomes(TASKSET, "v") == CustomerOutcomes()
    for name, reply in (("1", "b"), ("2", "b"), ("3", "a"), ("4", "b")):
        keep(store, name, reply)
    keep(store, "5", version="other")
    keep(store, "6", "n", system=V2)
    for name in ("5", "6"):
        store.add_feedback("default", completion_id=name, score=0.0)
    assert await served.outcomes(TASKSET, "v") == CustomerOutcomes((), 0, 4), "nobody knows yet what would have been right"
    store.add_feedback("default", completion_id="1", score=0.5)
    for name in ("2", "3"):
        store.add_feedback("default", completion_id=name, outcome={"queue": "b"})
    found = await served.outcomes(TASKSET, "v")
    assert found == CustomerOutcomes((0.5, 1.0, 0.0), 1, 1, ("1", "3"))
    assert found.successes == 1
    # What is said later counts: an outcome that was wrong, a customer who thinks better of it.
    store.add_feedback("default", completion_id="2", outcome={"queue": "c"})
    store.add_feedback("default", completion_id="1", score=1.0)
    store.add_feedback("default", completion_id="4", outcome={"queue": "b"}, score=0.0)
    assert await served.outcomes(TASKSET, "v") == CustomerOutcomes((1.0, 0.0, 0.0, 0.0), 2, 0, ("2", "3", "4"))


async def test_a_conversation_counts_once_however_often_it_goes_on(store: TrafficStore) -> None:
    keep(store, "1")
    said = (Message("system", V1), Message("user", "The lamp of order 1: cancel"), Message("assistant", "b"))
    longer = (*said, Message("user", "Sure?"), Message("assistant", "b"))
    store.keep(Redacted("2", "default", None, "v", longer, system_hash=content_hash(V1)))
    served = ServedTraffic(store)
    store.add_feedback("default", completion_id="2", score=1.0)
    assert await served.outcomes(TASKSET, "v") == CustomerOutcomes((1.0,), 1)
    # Another customer may have said the same so far, and have given up.
    store.add_feedback("default", completion_id="1", score=0.0)
    assert await served.outcomes(TASKSET, "v") == CustomerOutcomes((0.0, 1.0), 2, 0, ("1",))


async def test_a_conversation_that_the_environment_cannot_read_ends_nothing(store: TrafficStore, tmp_path: Path) -> None:
    file = tmp_path / "strict.py"
    file.write_text(
        QUEUES.read_text().replace("    def from_trace(", "    def _lenient(", 1)
        + """
    @classmethod
    def from_trace(cls, trace, config):
        raise KeyError(trace.request)
"""
    )
    keep(store, "1")
    assert await ServedTraffic(store).outcomes(Taskset(str(file), {"contract": "v1"}), "v") == CustomerOutcomes((), 0, 1)


async def test_what_is_read_bit_by_bit_says_what_all_of_it_says(store: TrafficStore) -> None:
    """Random turns, continuations and feedback; after each a look that knows the rest, and one that reads everything."""
    rng, served, texts = Random(4), ServedTraffic(store), dict[str, tuple[Message, ...]]()
    for number in range(120):
        name, system = str(number), rng.choice([V1, V1, V2])
        goes_on = rng.choice([*texts, None]) if texts else None
        said = texts[goes_on] if goes_on else (Message("system", system),)
        said = (
            *said,
            Message("user", f"The lamp of order {rng.randint(1, 9)}: cancel"),
            Message("assistant", rng.choice("ab")),
        )
        in_place = goes_on if rng.random() < 0.5 else None  # else a gateway that was started anew, and knows none of them
        version = rng.choice(["v", "w"])
        stored = store.keep(Redacted(name, "default", None, version, said, system_hash=content_hash(said[0].content)), in_place)
        texts[stored] = said
        told = {"score": float(rng.random() < 0.5)} if rng.random() < 0.3 else {"outcome": {"queue": rng.choice("ab")}}
        if rng.random() < 0.6:
            store.add_feedback("default", completion_id=name, **told)
        if number == 80:
            store.delete("nobody", None, [])
        fresh = ServedTraffic(store)
        assert await served.outcomes(TASKSET, "v") == await fresh.outcomes(TASKSET, "v")
        assert await served.requests(number // 2, 10) == await fresh.requests(number // 2, 10)
    assert len((await served.outcomes(TASKSET, "v")).scores) > 20
    store.delete("default", None, [])
    assert await served.outcomes(TASKSET, "v") == CustomerOutcomes()


async def test_one_look_has_the_verifier_judge_so_many_and_the_next_ones_the_others(
    store: TrafficStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evergrad.loop.traffic.evidence.VERIFIED_AT_ONCE", 4)
    served = ServedTraffic(store)
    for number in range(10):
        keep(store, str(number))
        store.add_feedback("default", completion_id=str(number), outcome={"queue": "b"})
    found = [await served.outcomes(TASKSET, "v") for _ in range(4)]
    assert [(len(each.scores), each.pending) for each in found] == [(4, 6), (8, 2), (10, 0), (10, 0)]


async def test_sessions_of_a_canary_count_once_for_the_side_that_they_were_dealt_to(store: TrafficStore) -> None:
    def begin(name: str, side: Side, *, share: float = 0.25, failed: bool = False, release_id: int = 1) -> int:
        return store.canary.put_down(DealtSession(release_id, name, "default", None, side, share, failed))

    def said_in(session: int, name: str, reply: str, version: str) -> None:
        said = (Message("system", V1), Message("user", f"The lamp of order {name}: cancel"), Message("assistant", reply))
        store.keep(Redacted(name, "default", None, version, said, system_hash=content_hash(V1), session=session))

    one, two, three = begin("s1", Side.CANDIDATE), begin("s2", Side.INCUMBENT), begin("s3", Side.CANDIDATE, share=0.5)
    assert begin("s1", Side.INCUMBENT, share=0.5) == one, "as it was dealt first"
    for name, session, reply, version in (("1", one, "b", "new"), ("2", two, "a", "old"), ("3", three, "b", "old")):
        said_in(session, name, reply, version)
        store.add_feedback("default", completion_id=name, outcome={"queue": "b"})
    said_in(one, "4", "a", "new")  # the same session, a second conversation
    store.add_feedback("default", completion_id="4", score=0.0)
    said_in(begin("silent", Side.CANDIDATE), "5", "b", "new")
    begin("lost", Side.CANDIDATE, failed=True)
    begin("of another release", Side.CANDIDATE, failed=True, release_id=2)
    found = await ServedTraffic(store).of_canary(TASKSET, 1, {"customer-2"})
    assert found == [
        SessionOutcome("customer-1", Side.CANDIDATE, 1.0, 0.25, by_customer=True),
        SessionOutcome("customer-3", Side.CANDIDATE, 1.0, 0.5, by_customer=True),
        SessionOutcome("customer-5", Side.CANDIDATE, None, 0.25, by_customer=True),
    ]
    assert [each.session for each in store.canary.of_release(1)] == ["s1", "s2", "s3", "silent", "lost"]
    store.canary.end_but(1)
    assert [each.session for each in store.canary.of_release(2)] == ["6"]
    store.canary.end_but(None)
    assert [each.session for each in store.canary.of_release(1)] == ["1", "2", "3", "4", "5"], "nobody can be told from it"
    store.delete("default", None, [])
    assert store.canary.of_release(1) == store.canary.of_release(2) == []


DESK = """
from evergrad.envs import Environment, TaskRow, reward, tool

class Desk(Environment):
    @classmethod
    def tasks(cls, rng, config):
        while True:
            yield TaskRow(f"lamp {rng.randint(1, 10**6)}", {"queue": "b"})

    @classmethod
    def from_trace(cls, trace, config):
        queue = trace.outcome.get("queue")
        return TaskRow(trace.request, {"queue": queue}) if queue else None

    @tool
    async def find(self, item: str) -> str:
        return "shelf 3"

    @reward
    async def right(self, answer: str) -> float:
        return float(answer == self.facts["queue"])

    def demonstrate(self):
        return ["b"]
"""


async def test_a_conversation_that_goes_on_is_not_judged_by_its_beginning(
    store: TrafficStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "desk.py").write_text(DESK)
    taskset = Taskset(str(tmp_path / "desk.py"))
    system = taskset.environment_class.system_prompt(taskset.config.contract)
    said = [Message("system", system), Message("user", "lamp 7"), Message("assistant", "find(item=lamp)")]

    def turn(name: str, goes_on: str | None = None) -> None:
        session = store.canary.put_down(DealtSession(1, "s", "default", None, Side.CANDIDATE, 0.5))
        turns, hashed = tuple(said), content_hash(system)
        store.keep(Redacted(name, "default", None, "v", turns, system_hash=hashed, session=session), goes_on)
        store.add_feedback("default", completion_id=name, outcome={"queue": "b"})

    served = ServedTraffic(store)
    turn("1")
    assert await served.of_canary(taskset, 1, ()) == []
    assert (await served.outcomes(taskset, "v")).scores == (0.0,), "the watch looks again when there is more"
    with monkeypatch.context() as later:
        later.setattr("evergrad.loop.traffic.evidence.QUIET_S", -1.0)
        (gave_up,) = await served.of_canary(taskset, 1, ())
    said += [Message("tool", "shelf 3"), Message("assistant", "b")]
    turn("2", "1")
    (ended,) = await served.of_canary(taskset, 1, ())
    assert (gave_up.score, ended.score) == (0.0, 1.0)


def test_a_store_from_before_canaries_of_customers_is_brought_up(store: TrafficStore, tmp_path: Path) -> None:
    keep(store, "1")
    with sqlite3.connect(tmp_path / "traffic.sqlite") as connection:
        connection.executescript(
            "DROP TABLE canary_sessions; DROP INDEX ix_traces_changed; ALTER TABLE traces DROP COLUMN changed;"
            "ALTER TABLE traces DROP COLUMN session; UPDATE evergrad_schemas SET version = 1;"
        )
    with TrafficStore(tmp_path / "traffic.sqlite") as again:
        (old,) = again.traces(after=-1)
        assert (old.changed, old.session) == (0, None)
        keep(again, "2")
        assert [each.trace.trace_id for each in again.traces(after=0)] == ["2"]
        assert again.canary.of_release(1) == []


def test_customers_are_judged_beside_the_runs_own_traffic_and_never_pooled_with_it() -> None:
    angry = CustomerOutcomes((0.0,) * 9 + (1.0,) * 3, 12)
    live = Live(2400, 2400, expected=0.95, n_gate=96, customers=angry)
    assert fired(live, WatchConfig()) == {
        "fall": "success of customers' conversations fell to 3/12 (promoted at 0.95; with 99.5% confidence it is at most 0.74)"
    }
    happy = CustomerOutcomes((1.0,) * 2400, 0)
    both = fired(Live(3, 24, expected=0.95, n_gate=96, customers=angry), WatchConfig())["fall"]
    assert both.startswith("live success fell to 3/24")
    assert "; success of customers' conversations fell to 3/12" in both
    assert "fall" in fired(Live(3, 24, expected=0.95, n_gate=96, customers=happy), WatchConfig())
    assert fired(Live(24, 24, expected=0.95, n_gate=96, customers=happy), WatchConfig()) == {}
    assert fired(Live(24, 24, expected=None, customers=angry), WatchConfig()) == {}, "never measured: nothing to fall below"


def test_two_kinds_of_traffic_alarm_as_seldom_as_one_would() -> None:
    """Of 300 series of 200 requests each, where both kinds succeed as often as the gate measured, few alarm at 10%."""
    config, alarms = WatchConfig(alpha=0.1), 0
    for seed in range(300):
        rng, own, theirs = Random(seed), list[float](), list[float]()
        for _ in range(10):
            own += [float(rng.random() < 0.8) for _ in range(20)]
            theirs += [float(rng.random() < 0.8) for _ in range(20)]
            live = Live(int(sum(own)), len(own), expected=0.8, n_gate=96, customers=CustomerOutcomes(tuple(theirs)))
            if fired(live, config):
                alarms += 1
                break
    assert alarms <= 0.1 * 300


class Loop:
    """As much of a session as a look at stored traffic needs."""

    def __init__(self, store: TrafficStore, requests: int = 8) -> None:
        watch = {"requests": requests, "drift_alpha": 0.05}
        self.config = RunConfig.model_validate({"environment": {"name": str(QUEUES)}, "watch": watch})
        self.state = LoopState(deployed={"contract": "v1"})
        self.clock = SimpleNamespace(phase=lambda name: nullcontext())
        self.served_traffic: ServedTraffic | None = ServedTraffic(store)
        self.told: list[str] = []

    def taskset(self, settings: Any) -> Taskset:
        return TASKSET

    def event(self, text: str) -> None:
        self.told.append(text)


def version_of(name: str) -> ModelVersion:
    return ModelVersion(name, None, 1, "versions/v", "tiny", "r", "2026-01-01")


async def test_new_failures_of_customers_count_once_in_a_cycle(store: TrafficStore) -> None:
    session: Any = Loop(store)
    for name in ("1", "2", "3"):
        keep(store, name)
        store.add_feedback("default", completion_id=name, score=float(name == "1"))
    await _customers(session, version_of("v"), "queues@v1")
    await _customers(session, version_of("v"), "queues@v1")
    assert session.state.new_failures == 2
    assert session.told[-1] == (
        "customers of v on queues@v1: 1/3 conversations succeeded (3 by their own score, 0 not judged yet)"
    )
    (row,) = session.state.scores
    assert (row["label"], row["n"], row["mean"]) == ("live, customers of v on queues@v1", 3, pytest.approx(1 / 3))
    session.state.new_failures = 0  # of the next cycle
    store.add_feedback("default", completion_id="1", score=0.0)
    store.add_feedback("default", completion_id="2", score=1.0)
    await _customers(session, version_of("v"), "queues@v1")
    assert session.state.new_failures == 1, "one more, whatever became of another"
    await _customers(session, version_of("w"), "queues@v1")
    keep(store, "4", version="w")
    store.add_feedback("default", completion_id="4", score=0.0)
    await _customers(session, version_of("w"), "queues@v1")
    assert session.state.new_failures == 2, "another version has failures of its own"
    session.state.new_failures = 0
    await _customers(session, version_of("v"), "queues@v1")
    await _customers(session, version_of("v"), "queues@v2")
    assert session.state.new_failures == 0, "back to the first one: its failures are known, under any contract"
    session.served_traffic = None
    assert await _customers(session, version_of("w"), "queues@v1") is None


def asked(count: int) -> list[Rollout]:
    """As the environment's own customers ask."""
    span = (PolicySpan(1, 0, 1),)
    said = Completion((5,), (-0.1,), FinishReason.STOP, span)
    return [
        Rollout(f"r{index}", "g", task.task_id, (Turn(task.prompt, (1,), said),), Outcome.SCORED, 1.0)
        for index, task in enumerate(TASKSET.tasks("heldout", count, seed=1))
    ]


async def test_customers_drift_from_what_they_asked_before_not_from_unredacted_texts(store: TrafficStore) -> None:
    session: Any = Loop(store)
    own, rng = asked(8), Random(0)

    def customers(count: int, words: str) -> None:
        for _ in range(count):
            number = str(rng.randint(10, 10**9))
            keep(store, number, ask=words.format(rng.choice(["refund", "cancel", "find", "status"])))

    customers(24, "<PHONE_NUMBER> {}")
    p_value, _ = await _drift(session, own)
    assert p_value is not None
    assert p_value > 0.05, "redacted texts differ from the environment's, and are not held against them"
    seen = session.state.customers_seen
    customers(5, "<PHONE_NUMBER> {}")
    await _drift(session, own)
    assert session.state.customers_seen == seen, "too few to look at yet"
    customers(5, "<PHONE_NUMBER> {}")
    p_value, _ = await _drift(session, own)
    assert p_value is not None
    assert p_value > 0.05
    customers(12, "please sing a song, {} it")
    p_value, what = await _drift(session, own)
    assert p_value is not None
    assert p_value < 0.01
    assert what == "customers ask for other things than they did"
    told = fired(Live(8, 8, expected=None, drift=p_value, drifted=what), session.config.watch)
    assert told["drift"].startswith("customers ask for other things than they did (p = ")
    session.served_traffic = None
    assert (await _drift(session, own))[0] is not None


REFUSING = """
[[trials]]
cycle = 2
warm_start = { demonstrations = 0 }
rl = { steps = 1, groups_per_step = 2, group_size = 2, lr = 1e-9 }
"""


@pytest.mark.slow
def test_what_customers_say_at_the_gateway_is_heard_at_the_next_check(tmp_path: Path, start: Start, redactor: str) -> None:
    """A run, ``evergrad serve --record`` beside its folder, OpenAI's client, feedback of both kinds, and the run again."""
    config = CONFIG.replace("requests = 0", "requests = 4\nfailures = 20") + REFUSING
    (tmp_path / "t.toml").write_text(config)
    run = tmp_path / "run"
    finish(start("run", "t.toml", "--run-dir", str(run)))
    serving = start("serve", "--run", str(run), "--port", "0", "--record", redactor)
    customers = Customers(address(serving), V1)
    for number in range(24):
        answer = customers.ask(f"The lamp of order {20_000 + number}: cancel")
        said = answer.choices[0].message.content
        # Half of them complain; of the others it becomes known that another queue would have been right.
        told = {"score": 0.0} if number % 2 else {"outcome": {"queue": "a" if said != "a" else "b"}}
        customers.tell(completion_id=answer.id, **told)
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=60) == 0
    finish(start("run", "t.toml", "--run-dir", str(run), "--set", "budget.cycles=2"))
    report = json.loads((run / "report.json").read_text())
    served = report["serving"]["version_id"]
    assert report["cycles"][-1]["verdict"] == "refused", "or another version would serve, of whom customers have said nothing"
    told = [each["event"] for each in report["timeline"] if each["event"].startswith("customers of ")]
    assert told == [
        f"customers of {served} on queues@v1: 0/24 conversations succeeded (12 by their own score, 0 not judged yet)"
    ]
    assert "failures" in report["decisions"][-1]["evidence"]["fired"]
    (row,) = [each for each in report["scores"] if each["label"] == f"live, customers of {served} on queues@v1"]
    assert (row["n"], row["mean"]) == (24, 0.0)
