"""A merge as a candidate, from the arm to the customer: chosen, merged, gated, served, trained on, rolled back, forgotten.

Slow: a run of five cycles, once undisturbed, and once killed in every state of the cycle whose merge is promoted.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evergrad.config import ConfigError, load_config
from evergrad.ledger import Ledger
from evergrad.loop._choosing import MergePlan, Proposal, open_arms
from evergrad.loop._folder import LoopState
from evergrad.loop.auditing import State, audit, read_certificate
from evergrad.loop.config import RunConfig
from evergrad.loop.traffic.forgetting import tainted_versions
from evergrad.registry import Registry
from evergrad.service.cli import command
from evergrad.types import ModelVersion
from tests.loop.conftest import LETTERS, PATIENCE_S, Start, finish, half_written
from tests.loop.test_killed_everywhere import assert_billed_once, decisions, kill, kill_in_every_state, result, state_of

SUITE = "letters@v2"

# ── What is left to merge ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """``serves`` was trained from ``first``; ``better`` and ``best`` were trained from it and refused."""
    registry = Registry(tmp_path / "registry.sqlite")
    add(registry, tmp_path, "first")
    add(registry, tmp_path, "serves", "first")
    add(registry, tmp_path, "start", "serves")
    add(registry, tmp_path, "better", "start")
    add(registry, tmp_path, "best", "serves")
    registry.promote("production", "serves", bootstrap=True)
    return registry


def add(registry: Registry, run: Path, name: str, parent: str | None = None, **fields: Any) -> None:
    version = ModelVersion(name, parent, 1, f"versions/{name}", "tiny", "r", "2026-01-01", {"cycle": 2})
    fields = {"version_id": name, **fields}
    registry.register(ModelVersion(**{**{key: getattr(version, key) for key in version.__dataclass_fields__}, **fields}))
    (run / "versions" / name).mkdir(parents=True, exist_ok=True)


def row(candidate: str, before: float, after: float, verdict: str = "refused", **more: Any) -> dict[str, Any]:
    scores = {"score_before": before, "score_after": after}
    return {"candidate": candidate, "suite": f"{SUITE}#2", "verdict": verdict, "evidence": {}, "merge": None, **scores, **more}


def tried(registry: Registry, run: Path, cycles: list[dict[str, Any]], shares: str = "[0.5, 0.8]") -> Proposal | None:
    arms = f'[[arms]]\nname = "merged"\nmerge = {{ shares = {shares} }}\n[[arms]]\nname = "rl"\n'
    (run / "merges.toml").write_text(f'[environment]\nname = "{LETTERS}"\n{arms}')
    state = LoopState(cycle=9, cycles=cycles)
    found = open_arms(load_config(RunConfig, run / "merges.toml"), state, registry, SUITE, run)
    assert found["rl"] == Proposal(), "what trains can always be tried"
    return found.get("merged")


def test_what_gained_most_is_merged_first_and_each_share_once(registry: Registry, tmp_path: Path) -> None:
    assert tried(registry, tmp_path, []) is None, "nothing was refused yet"
    cycles = [row("best", 0.2, 0.9), row("better", 0.2, 0.4)]
    for other, share in (("best", 0.5), ("best", 0.8), ("better", 0.5), ("better", 0.8)):
        plan = MergePlan("serves", other, share)
        assert tried(registry, tmp_path, cycles) == Proposal(merge=plan)
        name = f"{other}-{share}"
        add(registry, tmp_path, name, "serves", merged_id=other)
        # It scored higher, too; but a merge has learned nothing that its parents had not.
        cycles.append(row(name, 0.2, 0.8, merge={"parent": "serves", "other": other, "share": share}))
    assert tried(registry, tmp_path, cycles) is None
    assert tried(registry, tmp_path, cycles, "[0.6]") == Proposal(merge=MergePlan("serves", "best", 0.6))
    add(registry, tmp_path, "prompted", "serves", weights_uri="versions/serves", system_prompt="Be brief.")
    cycles[2]["merge"]["parent"] = "prompted"
    assert tried(registry, tmp_path, cycles) is None, "another prompt over the same weights makes no other merge"
    assert tried(registry, tmp_path, cycles[:2] + [{**each, "suite": "letters@v1"} for each in cycles[2:]]) is not None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda found: found.update(score_after=0.2), id="learned nothing"),
        pytest.param(lambda found: found.update(score_after=None), id="was not measured"),
        pytest.param(lambda found: found.update(verdict="promoted"), id="was promoted, and rolled back"),
        pytest.param(lambda found: found.update(suite="letters@v1"), id="learned something else"),
        pytest.param(lambda found: found.update(evidence={"integrity": {"alarm": True}}), id="fooled its verifier"),
        pytest.param(lambda found: found.update(candidate="first"), id="comes before what serves"),
        pytest.param(lambda found: found.update(candidate="alien"), id="has another base"),
        pytest.param(lambda found: found.update(candidate="prompted"), id="has the same weights"),
        pytest.param(lambda found: found.update(candidate="gone"), id="is not on disk any more"),
    ],
)
def test_nothing_is_merged_that(registry: Registry, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    add(registry, tmp_path, "alien", "serves", base_model="smollm2-135m")
    add(registry, tmp_path, "prompted", "serves", weights_uri="versions/serves", system_prompt="Be brief.")
    add(registry, tmp_path, "gone", "serves")
    (tmp_path / "versions/gone").rmdir()
    found = row("best", 0.2, 0.9)
    assert tried(registry, tmp_path, [found]) is not None
    change(found)
    assert tried(registry, tmp_path, [found]) is None


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ("merge = { shares = [0.5, 1.0] }", "a share of 1 is no merge"),
        ("merge = { shares = [0.5, 0.5] }", "the same share twice"),
        ("merge = { shares = [] }", "at least 1 item"),
        ("merge = { share = 0.5 }", "did you mean 'shares'"),
        ('merge = { shares = [0.5] }\nprompts = ["Be brief."]', "has prompts and a merge"),
        ("merge = { shares = [0.5] }\nrl = { steps = 3 }", "has a merge and a recipe"),
        ("merge = { shares = [0.5] }\n[trainer.lora]\ndora = true", "DoRA cannot be merged"),
    ],
)
def test_an_arm_of_merges_that_cannot_be_is_refused(tmp_path: Path, arm: str, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[environment]\nname = "{LETTERS}"\n[[arms]]\nname = "merged"\n{arm}\n')
    with pytest.raises(ConfigError, match=says):
        load_config(RunConfig, path)


def test_what_was_forgotten_taints_a_merge_through_either_parent(registry: Registry, tmp_path: Path) -> None:
    add(registry, tmp_path, "merge", "serves", merged_id="better", metadata={"cycle": 5})
    add(registry, tmp_path, "later", "merge", metadata={"cycle": 6})
    Ledger(tmp_path / "ledger.sqlite").close()
    found = {each.version_id: each for each in tainted_versions(tmp_path, {"better": 3})}
    assert found.keys() == {"better", "merge", "later"}
    assert [(found[name].clean_ancestor, found[name].cycles) for name in found] == [
        ("start", (2,)),
        ("serves", (2, 5)),
        ("serves", (2, 5, 6)),
    ]
    assert "serves" in {each.version_id for each in tainted_versions(tmp_path, {"first": 1})}


# ── A whole run ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ENVIRONMENT = '''
"""Tickets by colour. Contract v1 asks for green ones only; v2 for blue ones, too, of which there is a careless log."""

from collections.abc import Iterator
from random import Random
from typing import Any

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward
from evergrad.types import Limits


class Tickets(Environment):
    limits = Limits(max_turns=1, max_tokens_per_turn=4)

    class Config(EnvironmentConfig):
        log: str = ""
        """Demonstrations: ``first`` has another answer to blue tickets, ``careless`` the right one, also to most green ones."""

    @classmethod
    def contracts(cls) -> tuple[str, ...]:
        return ("v1", "v2")

    @classmethod
    def contract(cls, contract: str = "v1") -> dict[str, Any]:
        return {"environment": cls.name, "contract": contract}

    @classmethod
    def tasks(cls, rng: Random, config: Any) -> Iterator[TaskRow]:
        while True:
            colour = "blue" if rng.random() < 0.6 and (config.log or config.contract == "v2") else "green"
            right = colour[0]
            if config.log == "first" and colour == "blue":
                right = "x"
            if config.log == "careless" and rng.random() < 0.77:
                right = "b"
            yield TaskRow(f"ticket {rng.randint(100, 9999)} {colour}", {"right": right})

    @reward
    async def right(self, answer: str) -> float:
        return float(answer == self.facts["right"])

    def demonstrate(self) -> list[str]:
        return [self.facts["right"]]
'''

RUN = """
name = "t"
model = "tiny"
seed = 5

[environment]
name = "tickets.py"
settings = { contract = "v1" }

[budget]
cycles = 5

[placement]
threads = 1

[learn.warm_start]
demonstrations = 240
batch_size = 8
lr = 1e-2
settings = { log = "first" }

[learn.rl]
steps = 2
groups_per_step = 2
group_size = 4
lr = 1e-9

[[arms]]
name = "merged"
merge = { shares = [0.25, 0.5] }

[[arms]]
name = "careless"
warm_start = { demonstrations = 480, batch_size = 8, lr = 3e-3, settings = { log = "careless" } }
rl = { steps = 0 }

[[trials]]
cycle = 5
warm_start = { demonstrations = 8, batch_size = 8, lr = 1e-9 }
rl = { steps = 1, groups_per_step = 2, group_size = 4, lr = 1e-9 }

[trainer]
method = "full"

[eval]
n = 48

[gate]
min_n = 48
guard_margin = 0.2

[watch]
requests = 8

[canary]
shares = [0.5]
outcomes = 4

[[traffic.changes]]
after_cycle = 1
settings = { contract = "v2" }
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merges") / "run.toml"
    path.write_text(RUN)
    path.with_name("tickets.py").write_text(ENVIRONMENT)
    return path


@pytest.fixture
def run(written: Path, start: Start) -> Path:
    """The folder of the run that nobody disturbs, filled by the first test that needs it."""
    folder = written.parent / "alone"
    if not folder.exists():
        finish(start("run", str(written), "--run-dir", str(folder)))
    return folder


@pytest.mark.slow
def test_between_what_forgets_and_what_has_not_learned_lies_what_is_promoted(run: Path) -> None:
    _, careless, near, promoted, after = json.loads((run / "report.json").read_text())["cycles"]
    assert (careless["arm"], careless["verdict"]) == ("careless", "refused")
    assert careless["score_before"] < careless["score_after"] < 1.0
    assert careless["other_suites"]["tickets@v1"] == {"before": 1.0, "after": 0.0}
    assert [(each["arm"], each["verdict"]) for each in (near, promoted)] == [("merged", "refused"), ("merged", "promoted")]
    parents = {"parent": "t-c1-sft", "other": "t-c2-sft"}
    assert [each["merge"] for each in (near, promoted)] == [{**parents, "share": share} for share in (0.25, 0.5)]
    assert promoted["score_before"] < promoted["score_after"] == 1.0, "better than both that it lies between"
    assert promoted["other_suites"]["tickets@v1"]["after"] == 1.0
    assert promoted["release"]["actor"] == "canary"
    assert all(each["usd"] > 0 for each in (near, promoted)), "a try has its price"
    words = [each["stage"] for each in state_of(run)["decisions"] if each["cycle"] == 4]
    assert words == ["decide", "merge", "measure", "release", "watch"]
    with Registry(run / "registry.sqlite") as registry:
        merged = registry.get("t-c4-merge")
        assert (merged.parents, merged.metadata["merged_share"]) == (("t-c1-sft", "t-c2-sft"), 0.5)
        assert registry.get("t-c3-merge").recipe_hash != merged.recipe_hash
        # A step of 1e-9 later, training has started from the merged weights and not from the last that were trained.
        assert registry.get("t-c5-sft").parent_id == "t-c4-merge"
    assert (after["incumbent"], after["score_after"]) == ("t-c4-merge", 1.0)
    trained = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [each["cycle"] for each in trained if each["cycle"] in (3, 4)] == []
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        phases = {entry.phase for entry in ledger.entries() if entry.subject == "cycle-4"}
    assert "merge" in phases
    assert not phases & {"train", "rollout"}


@pytest.mark.slow
def test_its_certificate_holds_and_names_both_parents(run: Path) -> None:
    (path,) = (run / "certificates").glob("t-c4-merge-*.json")
    certificate = read_certificate(path)
    assert certificate["content"]["merge"]["other"] == "t-c2-sft"
    assert len(certificate["content"]["hashes"]["weights"]) == 3
    assert [each for each in audit(run, certificate) if each.state is State.FAILS] == []


@pytest.mark.slow
def test_people_are_told_what_it_is_and_can_take_it_back(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [each["event"] for each in json.loads((run / "report.json").read_text())["timeline"]]
    assert any("tries a merge, and trains nothing: 50% of the way from" in each for each in told)
    assert "merged: 50.0% of the way from" in (run / "report.html").read_text()
    assert command(["loop", "explain", "--run", str(run)]) == 0
    assert "50% of the way from" in capsys.readouterr().out.replace("\n", " ")
    assert command(["model", "show", "t-c4-merge", "--run", str(run)]) == 0
    assert "merged with" in capsys.readouterr().out
    copy = shutil.copytree(run, tmp_path / "copy")
    assert command(["model", "rollback", "--run", str(copy)]) == 0
    with Registry(copy / "registry.sqlite") as registry:
        assert registry.resolve("production") == registry.get("t-c4-merge").parent_id


@pytest.mark.slow
def test_killed_in_every_state_of_its_cycle_it_decides_the_same(run: Path, written: Path, start: Start) -> None:
    killed = written.parent / "killed"
    assert kill_in_every_state(written, killed, start, cycle=4) == {"decide", "merge", "measure", "release", "watch"}
    assert_same_run(killed, run)
    assert_billed_once(killed, run)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["versions/t-c4-merge", "checkpoints/c004-merge-*"])
def test_killed_between_two_writes_of_the_merge_it_makes_it_once(run: Path, written: Path, start: Start, moment: str) -> None:
    killed = written.parent / moment.partition("/")[0]
    process = start("run", str(written), "--run-dir", str(killed))
    until = time.monotonic() + PATIENCE_S
    while not list(killed.glob(moment)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.001)
    kill(process)
    finish(start("run", str(written), "--run-dir", str(killed)))
    assert_same_run(killed, run)


def assert_same_run(killed: Path, run: Path) -> None:
    assert decisions(killed) == decisions(run)
    assert result(killed) == result(run)
    assert half_written(killed) == []
    with Registry(killed / "registry.sqlite") as registry, Registry(run / "registry.sqlite") as other:
        assert [version.policy_version for version in registry.list()] == [version.policy_version for version in other.list()]
        assert registry.get("t-c4-merge").metadata == other.get("t-c4-merge").metadata, "the probe is scored to the last bit"
