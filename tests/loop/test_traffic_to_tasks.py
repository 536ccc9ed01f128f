"""The whole way as its users walk it: serve, ask, say what became of it, make tasks, train on them, forget."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI

from evergrad.envs import Taskset
from evergrad.ledger import Ledger
from evergrad.registry import Registry
from evergrad.service.cli import command
from tests.loop.conftest import Start, finish

QUEUES = Path(__file__).parents[2] / "examples" / "queues.py"
RIGHT = {"refund": "a", "cancel": "b", "find": "c", "status": "d"}
CUSTOMERS = 30

CONFIG = f"""
name = "t"
model = "tiny"
seed = 5

[environment]
name = "{QUEUES}"
settings = {{ contract = "v1" }}

[placement]
threads = 1

[learn.warm_start]
demonstrations = 32
batch_size = 8
settings = {{ log = "mixed" }}
lr = 1e-2

[learn.rl]
steps = 4
groups_per_step = 4
group_size = 4
lr = 1e-3
traffic_share = 0.5

[trainer]
method = "full"

[eval]
n = 12

[gate]
min_n = 12
max_latency_increase = 100.0

[watch]
requests = 0
"""


def address(process: subprocess.Popen[str]) -> str:
    """Where ``evergrad serve`` says that it answers."""
    assert process.stdout is not None
    told = ""
    for line in process.stdout:
        told += line
        if found := re.search(r"at (http://127\.0\.0\.1:\d+/v1)", line):
            return found[1]
    raise AssertionError(told)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert command([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def texts_in(run: Path) -> bytes:
    return b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


class Customers:
    """OpenAI's own client, as customers have it."""

    def __init__(self, url: str, system: str, key: str = "none") -> None:
        self.client = OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)
        self.system = {"role": "system", "content": system}

    def ask(self, request: str, *said: dict[str, str], **more: Any) -> Any:
        messages: Any = [self.system, {"role": "user", "content": request}, *said]
        settings = {"model": "production", "store": True, "temperature": 0.0, "max_tokens": 4} | more
        return self.client.chat.completions.create(messages=messages, **settings)

    def tell(self, **body: Any) -> Any:
        return self.client.post("/feedback", cast_to=object, body=body)


@pytest.mark.slow
def test_from_a_request_to_a_trained_version_and_back(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str], redactor: str
) -> None:
    (tmp_path / "t.toml").write_text(CONFIG)
    run = tmp_path / "run"
    finish(start("run", "t.toml", "--run-dir", str(run)))

    serving = start("serve", "--run", str(run), "--port", "0", "--record", redactor)
    taskset = Taskset(str(QUEUES), {"contract": "v1"})
    customers = Customers(address(serving), taskset.environment_class.system_prompt("v1"))
    be_customers(customers, taskset)
    be_tenants(customers, run, capsys)
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=60) == 0

    kept = shown(capsys, "traffic", "list", "--run", str(run))
    assert len(kept) == CUSTOMERS + 3
    assert b"jane@example.com" not in texts_in(run), "redacted before anything was written"
    assert b"nobody agreed" not in texts_in(run)
    assert command(["traffic", "tasks", "--run", str(run)]) == 2
    assert "--tenant acme --tenant default" in capsys.readouterr().err
    found = shown(capsys, "traffic", "tasks", "--run", str(run), "--tenant", "default")
    assert found["train"] + found["kept_aside"] == CUSTOMERS
    assert found["contaminated"] == {"same": 1}
    assert found["no_task"] == 1, "of the one of whom nobody knows what became"

    told = finish(start("run", "t.toml", "--run-dir", str(run), "--set", "budget.cycles=2"))
    assert f"of live traffic, {found['train']} tasks are trained on: 50% of the groups" in told
    with Registry(run / "registry.sqlite") as registry:
        verdict = next(each for each in registry.verdicts("t-c2-rl"))
    assert verdict.evidence["contamination"]["overlaps"] == {}
    assert 0 < verdict.evidence["contamination"]["trained_on"] <= 8
    assert verdict.evidence["latency"]["ratio"] > 0
    assert command(["audit", "t-c2-rl", "--run", str(run)]) == 0, "the ruling is made again from what is on record"
    assert b"order 20003:" in texts_in(run)

    forgotten = shown(capsys, "traffic", "forget", "default", "--run", str(run))
    assert (forgotten["traces"], forgotten["tasks"]) == (CUSTOMERS + 2, CUSTOMERS)
    assert forgotten["rollouts"] == 4 * 8, "half of the groups of four"
    (tainted,) = forgotten["tainted"]
    assert (tainted["version_id"], tainted["clean_ancestor"], tainted["cycles"]) == ("t-c2-rl", "t-c2-sft", [2])
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        usd = ledger.summary(subject="cycle-2").usd
    assert usd is not None
    assert forgotten["rebuild_usd"] == tainted["rebuild_usd"] == float(usd) > 0
    assert not re.search(rb"order 2\d{4}:", texts_in(run)), "no text of theirs is left in any file"


def be_customers(customers: Customers, taskset: Taskset) -> None:
    """Thirty who agree and whose ticket's queue becomes known, and a few who are special."""
    for number in range(CUSTOMERS):
        verb = list(RIGHT)[number % 4]
        mail = " for jane@example.com" if number == 3 else ""
        request = f"The lamp of order {20_000 + number}:{mail} {verb}"
        answer = customers.ask(request, user=f"u{number}", metadata={"ticket": f"t-{number}"}, stream=number % 2 == 1)
        completion_id = [chunk.id for chunk in answer][-1] if number % 2 else answer.id
        # Some say it of the completion, most of the ticket, days later.
        name = {"completion_id": completion_id} if number < 5 else {"metadata": {"ticket": f"t-{number}"}}
        assert customers.tell(**name, outcome={"queue": RIGHT[verb]}) == {"object": "feedback", "joined": 1}
    private = customers.ask("The cup of order 30001: find; nobody agreed", store=False)
    with pytest.raises(NotFoundError, match="not sent with store = true"):
        customers.tell(completion_id=private.id, score=1.0)
    # A conversation of two turns is one trace, whichever of its completions is named.
    first = customers.ask("The ring of order 29999: find").choices[0].message.content
    second = customers.ask(
        "The ring of order 29999: find", {"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}
    )
    assert customers.tell(completion_id=second.id, score=0.5)["joined"] == 1
    # Somebody asks the very thing that the gate asks, and is on the training side of the split.
    measured = taskset.tasks("gate", 1, 5)[0].prompt[-1].content
    asked = customers.ask(measured, user="u-measured-1")
    customers.tell(completion_id=asked.id, outcome={"queue": "a"})
    for body, told in (
        ({"completion_id": asked.id, "score": 2}, "score"),
        ({"completion_id": asked.id}, "nothing is said"),
        ({"score": 1}, "name one conversation"),
        ({"completion": asked.id, "score": 1}, "completion_id"),
    ):
        with pytest.raises(BadRequestError, match=told):
            customers.tell(**body)
    with pytest.raises(BadRequestError, match="which one counts"):
        customers.ask("The cup of order 30002: find", n=2)
    with pytest.raises(NotFoundError, match="production"):
        customers.ask("The cup of order 30004: find", model="prodcution")
    assert "production" in {model.id for model in customers.client.models.list()}


def be_tenants(customers: Customers, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the first key on, who has none is nobody, and tenants do not see each other."""
    known = customers.ask("The cup of order 20003: find", store=False).id
    capsys.readouterr()
    assert command(["traffic", "key", "acme", "--run", str(run)]) == 0
    key = capsys.readouterr().out.strip()
    with pytest.raises(AuthenticationError, match="evergrad traffic key"):
        customers.ask("The cup of order 30003: find")
    acme = Customers(str(customers.client.base_url), customers.system["content"], key)
    answer = acme.ask("The cup of order 40000: find", metadata={"ticket": "t-1"})
    assert acme.tell(metadata={"ticket": "t-1"}, score=1.0)["joined"] == 1, "its own, not that of the other tenant"
    with pytest.raises(NotFoundError):
        acme.tell(completion_id=known, score=0.0)
    assert acme.tell(completion_id=answer.id, outcome={"queue": "c"})["joined"] == 1
