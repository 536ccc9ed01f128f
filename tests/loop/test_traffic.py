"""What is kept of live traffic, what becomes of it, and that what is forgotten is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.envs import Taskset, content_hash
from evergrad.ledger import Ledger
from evergrad.loop.traffic import (
    Redacted,
    StoredTrace,
    TrafficError,
    TrafficStore,
    convert,
    digest,
    find_redactor,
    forget,
    traffic_path,
)
from evergrad.loop.traffic.converting import split_of_trace
from evergrad.loop.traffic.redaction import _replace
from evergrad.registry import Registry
from evergrad.types import InputError, Message, ModelVersion, Trace

QUEUES = Path(__file__).parents[2] / "examples" / "queues.py"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrafficStore]:
    with TrafficStore(traffic_path(tmp_path)) as opened:
        yield opened


@pytest.fixture(scope="module")
def taskset() -> Taskset:
    return Taskset(str(QUEUES), {"contract": "v1"})


def said(taskset: Taskset, request: str, reply: str = "a") -> tuple[Message, ...]:
    system = taskset.environment_class.system_prompt(taskset.config.contract)
    return Message("system", system), Message("user", request), Message("assistant", reply)


def turn(
    taskset: Taskset,
    name: str,
    request: str,
    *,
    tenant: str = "default",
    reply: str = "a",
    user: str | None = None,
    **more: str,
) -> Redacted:
    messages = said(taskset, request, reply)
    who = digest(tenant, user) if user else None
    return Redacted(name, tenant, who, "v1", messages, more, system_hash=content_hash(messages[0].content))


def test_feedback_joins_by_completion_and_by_reference_of_its_tenant_alone(store: TrafficStore, taskset: Taskset) -> None:
    ticket = digest("default", "metadata", "ticket", "7")
    first = turn(taskset, "c1", "The lamp of order 11111: refund")
    store.keep(first)
    more = (*first.messages, Message("tool", "ok"), Message("assistant", "done"))
    goes_on = Redacted("c2", "default", None, "v2", more, {}, (ticket,), first.system_hash)
    assert store.keep(goes_on, "c1") == "c1"
    store.keep(turn(taskset, "c9", "The cup of order 11112: refund", tenant="acme"))

    assert store.add_feedback("default", completion_id="c2", score=0.5) == 1
    assert store.add_feedback("default", completion_id="c1", outcome={"queue": "b", "hours": 2}) == 1
    assert store.add_feedback("default", references=[ticket], score=1.0, outcome={"queue": "a"}) == 1
    assert store.add_feedback("acme", completion_id="c1", score=0.0) == 0, "nobody rates another tenant's conversation"
    assert store.add_feedback("default", completion_id="c3", score=0.0) == 0
    assert store.add_feedback("default", score=0.0) == 0

    (trace,) = (each.trace for each in store.traces(["default"]))
    assert (trace.messages, trace.version_id, trace.score) == (more, "v2", 1.0)
    assert trace.outcome == {"queue": "a", "hours": 2}, "later feedback overrides earlier, key by key"


def test_a_key_is_its_tenants_and_without_any_all_are_one(store: TrafficStore) -> None:
    assert store.tenant_of("") == "default"
    key, other = store.add_key("acme"), store.add_key("zen")
    assert (store.tenant_of(key), store.tenant_of(other), store.tenant_of("evg-guess"), store.tenant_of("")) == (
        *("acme", "zen"),
        *(None, None),
    )
    assert store.revoke_keys("acme") == 1
    assert store.tenant_of(key) is None
    with pytest.raises(TrafficError, match="is not a tenant"):
        store.add_key("a b")


async def test_each_conversation_is_converted_or_it_is_said_why_not(store: TrafficStore, taskset: Taskset) -> None:
    gate = taskset.tasks("gate", 24, 0)
    asked = gate[0].prompt[-1].content
    train = {f"c{n}": f"The lamp of order {50000 + n}: refund" for n in range(40)}
    for name, request in train.items():
        store.keep(turn(taskset, name, request, reply="a" if int(name[1:]) % 2 else "b"))
        store.add_feedback("default", completion_id=name, outcome={"queue": "a"})
    odd = {
        "repeated": turn(taskset, "x1", "the lamp  of order 50001: REFUND"),
        "measured": turn(taskset, "x2", asked, user=_user_of_train()),
        "nothing known": turn(taskset, "x3", "The cup of order 60000: refund"),
        "other tools": Redacted(
            "x4", "default", None, "v1", said(taskset, "The cup of order 60001: find"), system_hash="other"
        ),
    }
    for each in odd.values():
        store.keep(each)
        if each.completion_id != "x3":
            store.add_feedback("default", completion_id=each.completion_id, outcome={"queue": "a"})
    long = odd["nothing known"]
    whole = (*long.messages, Message("user", "And now?"), Message("assistant", "b"))
    store.keep(Redacted("x5", "default", None, "v1", whole, system_hash=long.system_hash))

    found = await convert(store, taskset, ["default"], gate)
    assert found.traces == 45
    assert (found.duplicates, found.quarantined, found.continued, found.no_task) == (1, 1, 1, 1)
    assert dict(found.contaminated) == {"same": 1}
    assert found.train + found.kept_aside == 40
    assert found.train > found.kept_aside > 0
    assert found.succeeded == 20, "the verifier on the replies in the trace"
    tasks = store.tasks(contract_hash=taskset.contract_hash)
    assert {each.reward for each in tasks} == {0.0, 1.0}
    by_trace = {each.trace.trace_id: split_of_trace(each) for each in store.traces()}
    assert sorted(each.split for each in tasks) == sorted(by_trace[name] for name in train)
    assert asked not in {each.row.prompt for each in tasks}

    again = await convert(store, taskset, ["default"], gate)
    assert (again.known, again.train, again.kept_aside) == (40, 0, 0)
    assert store.tasks(contract_hash=taskset.contract_hash) == tasks


def _user_of_train() -> str:
    """A customer whose requests are trained on, so that only the gate's task keeps this one out."""
    for number in range(100):
        user = f"u{number}"
        stored = StoredTrace(Trace("x", ()), "default", digest("default", user), "", "")
        if split_of_trace(stored) == "train":
            return user
    raise AssertionError


def test_no_customer_is_on_both_sides_of_the_split(store: TrafficStore, taskset: Taskset) -> None:
    for number in range(60):
        store.keep(turn(taskset, f"c{number}", f"The ring of order {number}: find", user=f"u{number % 12}"))
    sides: dict[str | None, set[str]] = {}
    for each in store.traces():
        sides.setdefault(each.user, set()).add(split_of_trace(each))
    assert len(sides) == 12
    assert all(len(found) == 1 for found in sides.values())


# -- forgetting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, taskset: Taskset) -> Path:
    """A run of three cycles: the second learned from a task of ``acme`` and one of ``zen``; the third goes on from it."""
    run = tmp_path
    with TrafficStore(traffic_path(run)) as store:
        for number, (tenant, user) in enumerate([("acme", "jane"), ("zen", "max"), ("acme", "joe")]):
            request = f"The lamp of order {70000 + number}: SECRET-{tenant}-{user}"
            store.keep(turn(taskset, f"c{number}", request, tenant=tenant, user=user))
            row = taskset.from_trace(_known(store, f"c{number}", tenant))
            assert row is not None
            store.add_task(
                f"c{number}",
                row,
                environment=taskset.name,
                contract_hash=taskset.contract_hash,
                content_hash=str(number),
                task_id=f"queues/{number}",
                split="train",
                reward=0.0,
            )
        for task in store.tasks()[:2]:
            store.record_use("t-c2-rl", task)
            store.record_use("t-c2-rl", task)  # a task may come again in a cycle
    parents = {"t-c1-rl": None, "t-c2-sft": "t-c1-rl", "t-c2-rl": "t-c2-sft", "t-c3-rl": "t-c2-rl", "t-c3-other": "t-c1-rl"}
    with Registry(run / "registry.sqlite") as registry, Ledger(run / "ledger.sqlite") as ledger:
        for name, parent in parents.items():
            cycle = int(name[3])
            registry.register(ModelVersion(name, parent, cycle, f"versions/{name}", "tiny", "ab", "", {"cycle": cycle}))
        registry.promote("production", "t-c3-rl", bootstrap=True)
        for cycle, seconds in ((1, 100), (2, 1000), (3, 10000)):
            ledger.record(f"k{cycle}", subject=f"cycle-{cycle}", phase="train", resource="cpu_core_s", quantity=seconds)
    (run / "rollouts").mkdir()
    lines = [json.dumps({"task_id": f"queues/{number % 3}", "turns": [f"SECRET {number}"]}) for number in range(9)]
    (run / "rollouts" / "step-00001.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (run / "checkpoints" / "c002-learn-00003").mkdir(parents=True)
    (run / "checkpoints" / "c001-learn-00003").mkdir()
    return run


def _known(store: TrafficStore, completion_id: str, tenant: str) -> Trace:
    store.add_feedback(tenant, completion_id=completion_id, outcome={"queue": "a"})
    return next(each.trace for each in store.traces() if each.trace.trace_id == completion_id)


def bytes_of(run: Path) -> bytes:
    return b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


def price(run: Path, *cycles: int) -> Decimal:
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        return sum((ledger.summary(subject=f"cycle-{cycle}").usd or Decimal(0) for cycle in cycles), Decimal(0))


def test_what_is_forgotten_is_gone_and_what_learned_from_it_is_named_with_its_price(trained: Path) -> None:
    found = forget(trained, "acme")
    assert (found.traces, found.tasks, found.rollouts) == (2, 2, 6)
    assert [(each.version_id, each.tasks, each.clean_ancestor, each.cycles) for each in found.tainted] == [
        ("t-c2-rl", 1, "t-c2-sft", (2,)),
        ("t-c3-rl", 0, "t-c2-sft", (2, 3)),
    ]
    assert [each.serves for each in found.tainted] == [(), ("production",)]
    assert [each.rebuild_usd for each in found.tainted] == [price(trained, 2), price(trained, 2, 3)]
    assert found.rebuild_usd == price(trained, 2, 3) > 0
    assert found.checkpoints == ("c002-learn-00003",)
    left = bytes_of(trained)
    assert b"SECRET-acme" not in left, "in no page of the database, and in no file beside it"
    assert b"SECRET-zen" in left
    assert (trained / "rollouts" / "step-00001.jsonl").read_text().count("\n") == 3

    again = forget(trained, "acme")
    assert (again.traces, again.tainted) == (0, found.tainted), "weights remember, so the record of them does"
    with pytest.raises(TrafficError, match="nothing is stored of 'nobody'"):
        forget(trained, "nobody")


def test_one_user_is_forgotten_without_the_others(trained: Path) -> None:
    found = forget(trained, "acme", "joe")
    assert (found.traces, found.tainted) == (1, ())
    left = bytes_of(trained)
    assert b"SECRET-acme-joe" not in left
    assert b"SECRET-acme-jane" in left
    assert [each.version_id for each in forget(trained, "acme", "jane").tainted] == ["t-c2-rl", "t-c3-rl"]


def test_a_price_that_is_not_known_is_not_zero(trained: Path) -> None:
    with Ledger(trained / "ledger.sqlite") as ledger:
        ledger.record("odd", subject="cycle-2", phase="train", resource="no_such_resource", quantity=1)
    found = forget(trained, "zen")
    assert (found.rebuild_usd, found.tainted[0].rebuild_usd) == (None, None)


def test_a_deletion_that_was_killed_half_way_is_made_whole_by_the_next(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object) -> tuple[int, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrafficStore, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            forget(trained, "acme")
    found = forget(trained, "acme")
    assert (found.traces, found.tasks, len(found.tainted)) == (2, 2, 2)
    assert b"SECRET-acme" not in bytes_of(trained)


def test_nothing_is_forgotten_under_a_running_controller(trained: Path) -> None:
    from evergrad.loop._folder import lock_folder

    with lock_folder(trained), pytest.raises(Exception, match="another process is running in this folder"):
        forget(trained, "acme")


# -- redaction -----------------------------------------------------------------------------------------------------------


@given(st.text("abc", max_size=20), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6))
def test_no_character_of_what_was_found_is_left_and_all_others_are(text: str, ends: list[tuple[int, int]]) -> None:
    spans = [(low, high, "K") for low, high in ends if low < high <= len(text)]
    covered = {place for low, high, _ in spans for place in range(low, high)}
    left = "".join(char for place, char in enumerate(text) if place not in covered)
    assert _replace(text, spans).replace("<K>", "") == left


def test_presidio_finds_by_pattern_and_leaves_what_tasks_are_made_of() -> None:
    pytest.importorskip("presidio_analyzer")
    redact = find_redactor("presidio")
    assert redact("Mail jane.doe@example.co.uk, or call +1 212-555-0187.") == "Mail <EMAIL_ADDRESS>, or call <PHONE_NUMBER>."
    assert redact("Card 4111 1111 1111 1111, IBAN GB33BUKB20201555555555") == "Card <CREDIT_CARD>, IBAN <IBAN_CODE>"
    for kept in (
        "Please refund order f-50.",
        "delivered, window open until March 3, paid 44, code 123",
        "order(id=F50)",
        "Tools:\nrefund(id, amount): if window open\nCall one tool or answer.",
        "The lamp of order 50001: refund",
    ):
        assert redact(kept) == kept


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("presido", "no redactor 'presido'.*'presidio'"),
        ("no_such:x", "cannot be loaded"),
        ("os:sep", "no function"),
        ("os:getcwd", "TypeError"),
    ],
)
def test_a_redactor_that_cannot_be_is_refused_at_once(name: str, told: str) -> None:
    with pytest.raises(InputError) as refusal:
        find_redactor(name)
    assert re.search(told, str(refusal.value), re.DOTALL)
