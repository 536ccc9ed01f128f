"""A smaller base model that serves for less: configured, chosen, measured by turns, gated, served, trained on, rolled back.

Slow: a run of five cycles, once undisturbed, and once killed in every state of the cycle whose smaller model is promoted.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from evergrad.config import ConfigError, load_config
from evergrad.ledger import Ledger
from evergrad.loop._checking import check_inputs
from evergrad.loop._choosing import Proposal, choose, open_arms, tries_on
from evergrad.loop._console import LoopConsole
from evergrad.loop._folder import LoopState
from evergrad.loop._teaching import scorer_of
from evergrad.loop._turns import saved_per_attempt, turns_on_record
from evergrad.loop.auditing import State, audit, read_certificate
from evergrad.loop.config import RunConfig
from evergrad.registry import Registry, base_model, make_tiny
from evergrad.service.cli import command
from evergrad.service.client import Client
from evergrad.types import InputError, Message, ModelVersion, Verdict
from tests.loop.conftest import LETTERS, Start, finish, half_written
from tests.loop.test_killed_everywhere import assert_billed_once, kill_in_every_state, state_of
from tests.service.test_serving import Server

ENVIRONMENT = '''
"""Tickets by colour, whose letter is asked for: what any model learns from a few demonstrations."""

from collections.abc import Iterator
from random import Random
from typing import Any

from evergrad.envs import Environment, TaskRow, reward
from evergrad.types import Limits


class Tickets(Environment):
    limits = Limits(max_turns=1, max_tokens_per_turn=4)

    @classmethod
    def tasks(cls, rng: Random, config: Any) -> Iterator[TaskRow]:
        while True:
            colour = rng.choice(["green", "blue"])
            yield TaskRow(f"ticket {rng.randint(100, 9999)} {colour}", {"right": colour[0]})

    @reward
    async def right(self, answer: str) -> float:
        return float(answer == self.facts["right"])

    def demonstrate(self) -> list[str]:
        return [self.facts["right"]]
'''

# The level of each try is the whole of alpha: how uneven the machine is while this runs is not what is tested.
RUN = """
name = "t"
model = "./large"
seed = 5

[environment]
name = "tickets.py"

[budget]
cycles = 5

[placement]
threads = 1

[learn.warm_start]
demonstrations = 320
batch_size = 8
lr = 1e-3

[learn.rl]
steps = 0

[[arms]]
name = "careless"
base_model = "./small"
warm_start = { demonstrations = 8, batch_size = 8, lr = 1e-9 }
rl = { steps = 0 }

[[arms]]
name = "smaller"
base_model = "./small"
warm_start = { demonstrations = 240, batch_size = 8, lr = 1e-2 }
rl = { steps = 1, groups_per_step = 2, group_size = 4, lr = 1e-9 }

[[trials]]
cycle = 3
warm_start = { demonstrations = 8, batch_size = 8, lr = 1e-9 }
rl = { steps = 1, groups_per_step = 2, group_size = 4, lr = 1e-9 }

[[trials]]
cycle = 5
warm_start = { demonstrations = 8, batch_size = 8, lr = 1e-9 }
rl = { steps = 1, groups_per_step = 2, group_size = 4, lr = 1e-9 }

[worth]
usd_per_success = 0.01
attempts = 1000000

[trainer]
method = "full"

[eval]
n = 48

[gate]
min_n = 48
guard_margin = 0.2
series = "fixed"

[watch]
requests = 8
"""

# ── The configuration ────────────────────────────────────────────────────────────────────────────────────────────────────

WORTH = "[worth]\nusd_per_success = 0.01\nattempts = 1000\n"


def configured(folder: Path, arm: str, rest: str = WORTH) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(f'model = "tiny"\n[environment]\nname = "{LETTERS}"\n[[arms]]\nname = "smaller"\n{arm}\n{rest}')
    return load_config(RunConfig, path)


@pytest.mark.parametrize(
    ("arm", "rest", "says"),
    [
        ('base_model = "tiny"', WORTH, "'tiny' is the run's own; name a smaller one"),
        ('base_model = "other"', "", r"add a \[worth\] table with usd_per_success above 0"),
        ('base_model = "other"', "[worth]\nusd_per_success = 0.0\nattempts = 9", r"add a \[worth\] table"),
        ('base_modl = "other"', WORTH, "did you mean 'base_model'"),
        ('base_model = "other"\nprompts = ["Be brief."]', WORTH, "has prompts and a base_model"),
        ('base_model = "other"\nmerge = { shares = [0.5] }', WORTH, "has a merge and a base_model"),
        ('base_model = "other"\nwarm_start = { demonstrations = 0 }\nrl = { steps = 0 }', WORTH, "trains nothing"),
        ('base_model = "other"', f"{WORTH}[canary]\n", "a canary compares versions on one base model only"),
        ('base_model = "other"', f'{WORTH}[gate]\nseries = "e_lond"', "no e-value of a saving"),
        ('base_model = "other"', f"{WORTH}[eval]\nn = 12\n[gate]\nmin_n = 12", "set eval.n to 24 at least"),
        (
            'base_model = "other"',
            f'{WORTH}[engine]\nbackend = "vllm"\nurl = "http://gpu1:8000"\n[transfer]\nadapter_only = true',
            "the server at engine.url holds one model",
        ),
    ],
)
def test_an_arm_that_cannot_be_is_refused(tmp_path: Path, arm: str, rest: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configured(tmp_path, arm, rest)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the tiny model's layers."""
    return make_tiny(tmp_path_factory.mktemp("bases") / "small", layers=2)


def test_a_base_that_is_not_smaller_is_refused_before_anything_starts(tmp_path: Path, small: Path) -> None:
    check_inputs(configured(tmp_path, f'base_model = "{small}"'), LoopConsole())
    same = shutil.copytree(base_model("tiny"), tmp_path / "same")
    with pytest.raises(InputError, match=r"has 455,520 parameters, and 'tiny' has 455,520"):
        check_inputs(configured(tmp_path, f'base_model = "{same}"'), LoopConsole())
    with pytest.raises(InputError, match="no base model"):
        check_inputs(configured(tmp_path, 'base_model = "nowhere"'), LoopConsole())


def test_too_few_tasks_to_show_that_nothing_is_lost_are_told(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_inputs(configured(tmp_path, f'base_model = "{small}"'), LoopConsole())
    assert "102 do" in " ".join(capsys.readouterr().out.split())
    check_inputs(configured(tmp_path, f'base_model = "{small}"', f"{WORTH}[eval]\nn = 102"), LoopConsole())
    assert "at the level of a first try" not in capsys.readouterr().out


def test_an_arm_learns_from_the_teacher_of_its_own_recipe(tmp_path: Path) -> None:
    distilled = 'rl = { loss = { name = "reverse_kl" }, advantage = "constant", distill = { version = "run-c1-sft" } }'
    config = configured(tmp_path, f'base_model = "other"\n{distilled}')
    scorer = scorer_of(config, 3, "smaller")
    assert scorer is not None
    assert scorer.version == "run-c1-sft"
    assert scorer_of(config, 3) is None


# ── The choice ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def add(registry: Registry, name: str, base: str) -> None:
    registry.register(ModelVersion(name, None, 1, f"versions/{name}", base, "r", "2026-01-01", {"cycle": 1}))


def test_it_is_open_while_what_serves_is_on_a_larger_base(tmp_path: Path, small: Path) -> None:
    config = configured(tmp_path, f'base_model = "{small}"')
    state = LoopState(cycle=3)
    with Registry(tmp_path / "registry.sqlite") as registry:
        add(registry, "large", "tiny")
        add(registry, "cheap", str(small))
        registry.promote("production", "large", bootstrap=True)
        found = open_arms(config, state, registry, "letters@v1", tmp_path)
        assert found == {"smaller": Proposal(base_model=str(small))}
        assert found["smaller"].aim == "cost"
        registry.promote("production", "cheap", Verdict(True, ("cheaper",), {}, "cheap", "large"))
        assert open_arms(config, state, registry, "letters@v1", tmp_path) == {}
        registry.rollback("production", "by hand")
        assert list(open_arms(config, state, registry, "letters@v1", tmp_path)) == ["smaller"]


def row(verdict: str, saved: float | None, before: float = 0.9, after: float = 0.88) -> dict[str, Any]:
    scores = {"score_before": before, "score_after": after, "saved_usd_per_attempt": saved}
    return {"cycle": 2, "arm": "smaller", "suite": "letters@v1#2", "verdict": verdict, "usd": 0.5, **scores}


def test_dollars_saved_are_a_gain_of_as_many_successes_as_they_are_worth() -> None:
    state = LoopState(cycles=[row("promoted", 0.001), row("refused", 0.001), row("promoted", 0.0001), row("promoted", None)])
    gains = [each.gain for each in tries_on(state, "letters@v1", usd_per_success=0.01)]
    # Value per attempt is V · score − cost: what the lower score loses is taken off.
    assert gains == pytest.approx([0.1 - 0.02, 0.0, 0.0, 0.0])
    assert [each.gain for each in tries_on(state, "letters@v1")] == [0.0] * 4, "without a worth, only scores are gains"


def test_one_that_never_saved_enough_gives_way_to_nothing(tmp_path: Path, small: Path) -> None:
    config = configured(tmp_path, f'base_model = "{small}"', "[worth]\nusd_per_success = 0.01\nattempts = 10\n")
    state = LoopState(cycles=[row("refused", 0.001)] * 40)
    assert choose(config, state, "letters@v1", 1.0, ["smaller"]).arm == "nothing"
    rich = configured(tmp_path, f'base_model = "{small}"', "[worth]\nusd_per_success = 0.01\nattempts = 1e6\n")
    saved = LoopState(cycles=[row("promoted", 0.001)] * 3)
    assert choose(rich, saved, "letters@v1", 1.0, ["smaller"]).arm == "smaller"


# ── A whole run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smaller")
    make_tiny(folder / "large", layers=10, hidden_size=256)
    make_tiny(folder / "small", layers=2, hidden_size=64)
    (folder / "tickets.py").write_text(ENVIRONMENT)
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


@pytest.fixture
def run(written: Path, start: Start) -> Path:
    """The folder of the run that nobody disturbs, filled by the first test that needs it."""
    folder = written.parent / "alone"
    if not folder.exists():
        told = finish(start("run", str(written), "--run-dir", str(folder)))
        (folder / "told.txt").write_text(told)
    return folder


@pytest.mark.slow
def test_what_is_no_worse_and_cheaper_is_promoted_and_trained_on(run: Path) -> None:
    careless, large, smaller, after = json.loads((run / "report.json").read_text())["cycles"]
    assert [(each["arm"], each["aim"], each["verdict"]) for each in (careless, large, smaller, after)] == [
        ("careless", "cost", "refused"),
        (None, "score", "refused"),
        ("smaller", "cost", "promoted"),
        (None, "score", "refused"),
    ]
    assert (careless["score_before"], careless["score_after"]) == (1.0, 0.0)
    assert large["score_after"] == 1.0, "a step of 1e-9 later: training has gone back to the base of what serves"
    assert (smaller["score_before"], smaller["score_after"]) == (1.0, 1.0), "nothing could be gained but dollars"
    assert smaller["evidence"]["saving"]["upper_bound"] < 1.0
    assert smaller["saved_usd_per_attempt"] > 0
    assert (after["incumbent"], after["score_after"]) == ("t-c4-rl", 1.0)
    with Registry(run / "registry.sqlite") as registry:
        bases = {version.version_id: Path(version.base_model).name for version in registry.list()}
        assert bases == {
            "t-c1-sft": "large",
            "t-c2-sft": "small",
            "t-c3-sft": "large",
            "t-c3-rl": "large",
            **dict.fromkeys(("t-c4-sft", "t-c4-rl", "t-c5-sft", "t-c5-rl"), "small"),
        }
        assert registry.get("t-c4-sft").parent_id is None, "it has nothing of the version that serves"
        assert registry.get("t-c5-sft").parent_id == "t-c4-rl"
        assert registry.resolve("production") == "t-c4-rl"
    live = [json.loads(line) for line in (run / "rollouts" / "live-004-000.jsonl").open()]
    assert [each["reward"] for each in live] == [1.0] * 8
    addresses = re.findall(r"what serves answers at (http://[\d.:]+)/v1", (run / "told.txt").read_text())
    assert len(set(addresses)) == len(addresses) == 2, "whoever asks the run learns that another engine answers"


@pytest.mark.slow
def test_its_certificate_says_what_was_compared_and_holds(run: Path) -> None:
    (path,) = (run / "certificates").glob("t-c4-rl-*.json")
    certificate = read_certificate(path)
    content = certificate["content"]
    assert content["plan"]["aim"] == content["effect"]["aim"] == "cost"
    assert {Path(each).name for each in content["base_models"].values()} == {"large", "small"}
    found = {each.check: each for each in audit(run, certificate)}
    assert [each for each in found.values() if each.state is State.FAILS] == []
    assert found["ruling made again"].told == "the same to the last digit"
    page = path.with_suffix(".html").read_text()
    assert "must be no worse, and cheaper, on" in page
    assert "12 turns each" in page
    primary = content["plan"]["primary"]
    timed = turns_on_record(run, "t-c4-rl", "t-c1-sft", primary)
    assert timed is not None
    assert len(timed.blocks) == 12
    saved = saved_per_attempt(run, "t-c4-rl", "t-c1-sft", primary)
    assert saved is not None
    assert saved > 0


@pytest.mark.slow
def test_people_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["loop", "explain", "--run", str(run)]) == 0
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "a success costs" in told
    timeline = [each["event"] for each in json.loads((run / "report.json").read_text())["timeline"]]
    assert any("tries to serve for less: it trains" in each for each in timeline)
    assert "a success costs ×" in (run / "report.html").read_text()
    assert command(["loop", "status", "--run", str(run)]) == 0
    assert "t-c4-rl" in capsys.readouterr().out


def answers(server: Server) -> list[str]:
    with Client(server.url) as client:
        asked = [[Message("user", f"ticket 77 {colour}")] for colour in ("green", "blue")]
        return [client.chat(each, "production", temperature=0.0, max_tokens=4).text for each in asked]


@pytest.mark.slow
def test_it_serves_and_can_be_taken_back_and_so_it_stays(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    server = Server(copy)
    try:
        assert answers(server) == ["g", "b"]
        assert command(["model", "rollback", "--run", str(copy)]) == 0
        server.wait_for(r"(production is now t-c1-sft)")
        assert answers(server) == ["g", "b"]
    finally:
        assert server.end(signal.SIGTERM) == 0
    server = Server(copy)
    try:
        assert "production is t-c1-sft" in server.log.read_text()
        assert answers(server) == ["g", "b"]
    finally:
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_run_goes_on_from_what_was_taken_back(run: Path, written: Path, start: Start) -> None:
    copy = shutil.copytree(run, written.parent / "taken-back")
    assert command(["model", "rollback", "--run", str(copy)]) == 0
    finish(start("run", str(written), "--run-dir", str(copy), "--set", "budget.cycles=6"))
    state = state_of(copy)
    assert state["cycle"] == 6
    told = [each["event"] for each in state["timeline"]]
    assert any("production was moved by hand: t-c4-rl → t-c1-sft" in each for each in told)
    decided = [each["decided"] for each in state["decisions"] if each["cycle"] == 6]
    assert decided[0] == "smaller", "what serves is on the larger base again, so that it is open again"


@pytest.mark.slow
def test_killed_in_every_state_of_its_cycle_it_decides_the_same(run: Path, written: Path, start: Start) -> None:
    killed = written.parent / "killed"
    assert kill_in_every_state(written, killed, start, cycle=4) == {"decide", "warm_start", "learn", "measure", "watch"}

    def moves(folder: Path) -> list[tuple[Any, ...]]:
        return [(each["cycle"], each["stage"], each["decided"], each["following"]) for each in state_of(folder)["decisions"]]

    assert moves(killed) == moves(run)
    assert [(each["label"], each["mean"], each["n"]) for each in state_of(killed)["scores"]] == [
        (each["label"], each["mean"], each["n"]) for each in state_of(run)["scores"]
    ]
    assert_billed_once(killed, run)
    assert half_written(killed) == []
    with Registry(killed / "registry.sqlite") as registry, Registry(run / "registry.sqlite") as other:
        for version, expected in zip(registry.list(), other.list(), strict=True):
            assert (version.version_id, version.policy_version) == (expected.version_id, expected.policy_version)
            assert version.metadata["probe"] == expected.metadata["probe"], "the same weights, to the last bit"
    with Ledger(killed / "ledger.sqlite") as ledger:
        ledger.check_conservation()
