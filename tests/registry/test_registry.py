"""The registry: what an alias serves, why, and that no crash, race or rollback ever leaves it saying something else."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evergrad.database import DatabaseError
from evergrad.registry import Registry, RegistryError
from evergrad.types import ModelVersion, Verdict


def version(name: str, parent: str | None = None, policy_version: int = 0) -> ModelVersion:
    return ModelVersion(
        name, parent, policy_version, f"versions/{name}", "tiny", "r0", "2026-01-01T00:00:00+00:00", {"cycle": 1}
    )


def yes(candidate: str, incumbent: str | None) -> Verdict:
    return Verdict(True, (f"{candidate} wins",), {"n": 96, "delta": 0.25}, candidate, incumbent)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "registry.sqlite"


@pytest.fixture
def registry(path: Path) -> Registry:
    registry = Registry(path)
    registry.register(version("a"))
    registry.register(version("b", "a", 3))
    registry.register(version("c", "b", 7))
    return registry


def test_versions_come_back_as_they_went_in(registry: Registry, path: Path) -> None:
    for store in (registry, Registry(path)):
        assert store.get("b") == version("b", "a", 3)
        assert [each.version_id for each in store.list()] == ["a", "b", "c"]
        assert [each.version_id for each in store.lineage("c")] == ["c", "b", "a"]


def test_a_merge_descends_from_both_its_parents(registry: Registry) -> None:
    registry.register(version("other", "a"))
    registry.register(replace(version("merge", "b"), merged_id="other"))
    registry.register(version("trained", "merge"))
    assert registry.get("merge").parents == ("b", "other")
    assert registry.get("a").parents == ()
    assert [each.version_id for each in registry.ancestors("trained")] == ["trained", "merge", "other", "b", "a"]
    assert [each.version_id for each in registry.lineage("trained")] == ["trained", "merge", "b", "a"]
    with pytest.raises(RegistryError, match="did you mean 'merge'"):
        registry.ancestors("merg")


def test_registering_again_changes_nothing_and_an_id_means_one_version(registry: Registry) -> None:
    again = ModelVersion("b", "a", 3, "versions/b", "tiny", "r0", "2027-01-01T00:00:00+00:00", {"cycle": 2})
    assert registry.register(again) == version("b", "a", 3)
    assert len(registry.list()) == 3
    with pytest.raises(RegistryError, match=r"'b' exists already and differs in policy_version"):
        registry.register(version("b", "a", 4))
    with pytest.raises(RegistryError, match=r"no version 'versoin-a'"):
        registry.register(version("d", "versoin-a"))
    with pytest.raises(RegistryError, match="no version 'd'"):
        registry.get("d")


def test_metadata_that_is_not_finite_is_stored_and_shown(registry: Registry, path: Path) -> None:
    registry.register(ModelVersion("n", "a", 1, "w", "tiny", "r", "", {"loss": float("nan"), "kl": float("inf")}))
    assert registry.get("n").metadata == {"loss": "NaN", "kl": "Infinity"}
    assert registry.get("n").created_at, "filled in"

    def refuse(name: str) -> None:
        raise AssertionError(name)

    with sqlite3.connect(path) as connection:
        for (text,) in connection.execute("SELECT metadata FROM versions"):
            json.loads(text, parse_constant=refuse)


def test_promotion_needs_a_promoting_verdict_about_these_versions(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="needs a verdict"):
        registry.promote("production", "a")
    registry.promote("production", "a", bootstrap=True)
    no = Verdict(False, ("tied: 3 wins, 3 losses", "n is 12, preset 96"), {}, "b", "a")
    with pytest.raises(RegistryError, match=r"refuses b: tied: 3 wins, 3 losses; n is 12, preset 96"):
        registry.promote("production", "b", no)
    truthy = Verdict("false", (), {}, "b", "a")  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match="refuses b"):
        registry.promote("production", "b", truthy)
    with pytest.raises(RegistryError, match="about b, not c"):
        registry.promote("production", "c", yes("b", "a"))
    with pytest.raises(RegistryError, match="compares c with b, but production serves a"):
        registry.promote("production", "c", yes("c", "b"))
    with pytest.raises(RegistryError, match="compares c with None, but production serves a"):
        registry.promote("production", "c", yes("c", None))
    with pytest.raises(RegistryError, match="only the first promotion"):
        registry.promote("production", "b", bootstrap=True)
    with pytest.raises(RegistryError, match="serves a already"):
        registry.promote("production", "a", yes("a", "a"))
    with pytest.raises(RegistryError, match="no version 'zzz'"):
        registry.promote("production", "zzz", yes("zzz", "a"))
    assert registry.resolve("production") == "a"
    assert [event.action for event in registry.history("production")] == ["bootstrap"]
    assert registry.promote("production", "b", yes("b", "a")).from_version_id == "a"
    assert registry.resolve("production") == "b"
    assert registry.find("production") == registry.find("b") == registry.get("b")


def test_promoting_again_with_the_same_verdict_is_one_promotion(registry: Registry) -> None:
    registry.promote("production", "a", bootstrap=True)
    first = registry.promote("production", "b", yes("b", "a"))
    assert registry.promote("production", "b", yes("b", "a")) == first
    assert len(registry.history("production")) == 2
    assert registry.rollback("production").version_id == "a"


def test_bootstrapping_again_the_same_version_is_one_bootstrap(registry: Registry) -> None:
    first = registry.promote("production", "a", bootstrap=True)
    assert registry.promote("production", "a", bootstrap=True) == first
    registry.promote("production", "b", yes("b", "a"))
    with pytest.raises(RegistryError, match="serves b already"):
        registry.promote("production", "b", bootstrap=True)
    assert len(registry.history("production")) == 2


def test_verdict_and_audit_are_kept_whole(registry: Registry, path: Path) -> None:
    registry.promote("production", "a", Verdict(True, ("nothing served yet",), {"bootstrap": True}, "a", None))
    registry.promote("production", "b", yes("b", "a"))
    registry.record_verdict(Verdict(False, ("worse",), {"p_value": float("nan")}, "c", "b"))
    reopened = Registry(path)
    event = reopened.history("production")[-1]
    assert (event.action, event.version_id, event.from_version_id, event.reason) == ("promote", "b", "a", "b wins")
    assert event.verdict["evidence"] == {"n": 96, "delta": 0.25}
    assert reopened.verdicts("b") == (yes("b", "a"),)
    assert reopened.verdicts("c") == (Verdict(False, ("worse",), {"p_value": "NaN"}, "c", "b"),)
    assert reopened.aliases() == {"production": "b"}


def test_rollback_walks_back_and_pointer_and_audit_agree_after_a_restart(registry: Registry, path: Path) -> None:
    registry.promote("production", "a", bootstrap=True)
    registry.promote("production", "b", yes("b", "a"))
    registry.promote("production", "c", yes("c", "b"))
    assert registry.rollback("production", "complaints").version_id == "b"
    reopened = Registry(path)
    assert reopened.resolve("production") == "b" == reopened.history("production")[-1].version_id
    assert reopened.history("production")[-1].reason == "complaints"
    assert reopened.rollback("production").version_id == "a", "not c: what was rolled back is no predecessor"
    with pytest.raises(RegistryError, match="no predecessor"):
        reopened.rollback("production")
    assert registry.resolve("production") == "a", "seen by the store that was open all along"
    reopened.promote("production", "c", yes("c", "a"))
    assert reopened.rollback("production").version_id == "a"
    assert [event.action for event in reopened.history("production")] == [
        "bootstrap", "promote", "promote", "rollback", "rollback", "promote", "rollback",
    ]  # fmt: skip


def test_an_alias_rests_on_the_promotion_that_made_it_so_also_after_a_rollback(registry: Registry) -> None:
    assert registry.promotion("production") is None
    first = registry.promote("production", "a", bootstrap=True)
    second = registry.promote("production", "b", yes("b", "a"))
    assert registry.promotion("production") == second
    assert second.verdict["candidate_id"] == "b"
    registry.rollback("production", "complaints")
    assert registry.promotion("production") == first


def test_rollback_without_any_promotion_is_an_error(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="nothing is promoted to 'production'"):
        registry.rollback("production")
    registry.promote("production", "a", bootstrap=True)
    with pytest.raises(RegistryError, match=r"did you mean 'production'\?"):
        registry.rollback("prodcution")
    with pytest.raises(RegistryError, match="no predecessor"):
        registry.rollback("production")
    assert registry.resolve("staging") is None


@pytest.mark.parametrize("alias", ["", "a/b", "two words", "x" * 65, "-x", ".x", "prod\n", "größe", "x\x1b[31m"])
def test_an_alias_is_a_plain_name(registry: Registry, alias: str) -> None:
    with pytest.raises(RegistryError, match=r"is not an alias.*Next: "):
        registry.promote(alias, "a", bootstrap=True)


def test_aliases_and_versions_share_no_name(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="'b' is a version"):
        registry.promote("b", "a", bootstrap=True)
    registry.promote("canary", "a", bootstrap=True)
    with pytest.raises(RegistryError, match="'canary' is an alias"):
        registry.register(replace(registry.get("a"), version_id="canary"))
    assert registry.find("b").version_id == "b"


def test_aliases_are_independent(registry: Registry) -> None:
    registry.promote("production", "a", bootstrap=True)
    registry.promote("canary", "c", bootstrap=True)
    registry.promote("production", "b", yes("b", "a"))
    assert registry.aliases() == {"canary": "c", "production": "b"}
    registry.rollback("production")
    assert registry.aliases() == {"canary": "c", "production": "a"}


PROMOTE = """
import sys
from evergrad.registry import Registry, RegistryError
from evergrad.types import Verdict
path, candidate = sys.argv[1:]
registry = Registry(path)
print("ready", flush=True)
sys.stdin.readline()
try:
    registry.promote("production", candidate, Verdict(True, ("wins",), {}, candidate, "a"))
    print("moved")
except RegistryError as error:
    print("refused", error)
"""


def _race(location: str) -> list[str]:
    """What two processes say that promote b and c in the same moment."""
    command = [sys.executable, "-c", PROMOTE, location]
    children = [subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in "bc"]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    return [child.communicate()[0] for child in children]


def test_of_two_processes_that_promote_against_one_incumbent_one_wins(registry: Registry, path: Path) -> None:
    registry.promote("production", "a", bootstrap=True)
    outputs = _race(str(path))
    assert sorted(output.split()[0] for output in outputs) == ["moved", "refused"], outputs
    assert registry.resolve("production") == ("b" if outputs[0].startswith("moved") else "c")
    assert len(registry.history("production")) == 2


CRASH = """
import os, signal, sys
import sqlalchemy as sa
from evergrad.registry import Registry
from evergrad.types import Verdict
registry = Registry(sys.argv[1])
statements = 0
@sa.event.listens_for(sa.Engine, "after_cursor_execute")
def die(connection, cursor, statement, *rest):
    global statements
    statements += statement.startswith(("INSERT", "UPDATE"))
    if statements == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
registry.promote("production", "b", Verdict(True, ("wins",), {}, "b", "a"))
print("moved")
"""


def test_killed_at_each_write_of_a_promotion_nothing_has_happened(registry: Registry, path: Path) -> None:
    registry.promote("production", "a", bootstrap=True)
    outcomes = []
    for write in (1, 2, 3, 4):
        child = subprocess.run([sys.executable, "-c", CRASH, str(path), str(write)], capture_output=True, text=True)
        outcomes.append(child.returncode)
        moved = child.returncode == 0
        assert registry.resolve("production") == ("b" if moved else "a"), write
        assert len(registry.history("production")) == (2 if moved else 1), write
        assert len(registry.verdicts("b")) == (1 if moved else 0), write
    assert outcomes == [-signal.SIGKILL] * 3 + [0]
    registry.promote("production", "c", yes("c", "b"))


STRESS = """
import itertools, sys
from evergrad.registry import Registry
from evergrad.types import Verdict
registry = Registry(sys.argv[1])
print("ready", flush=True)
for number in itertools.count():
    current = registry.resolve("production")
    if number % 3 == 2:
        registry.rollback("production")
    else:
        other = {"a": "b", "b": "c", "c": "b"}[current]
        registry.promote("production", other, Verdict(True, ("wins",), {}, other, current))
"""


def test_killed_at_any_moment_pointer_and_audit_agree(registry: Registry, path: Path) -> None:
    registry.promote("production", "a", bootstrap=True)
    draws = random.Random(0)
    before = 0
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", STRESS, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        moves = len(registry.history("production")) + draws.randrange(1, 30)
        while len(registry.history("production")) < moves:
            pass
        child.kill()
        child.wait()
        history = Registry(path).history("production")
        assert len(history) > before
        before = len(history)
        assert registry.resolve("production") == history[-1].version_id
        stack: list[str] = []
        for event in history:
            assert event.from_version_id == (stack[-1] if stack else None)
            if event.action == "rollback":
                stack.pop()
            else:
                stack.append(event.version_id)
            assert event.version_id == stack[-1]
        promoted = [event for event in history if event.action == "promote"]
        assert sum(len(registry.verdicts(name)) for name in "abc") == len(promoted), "each verdict with its move"


def test_a_full_disk_is_one_clear_error_and_changes_nothing(registry: Registry, path: Path) -> None:
    registry.promote("production", "a", bootstrap=True)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from evergrad.registry import Registry\n"
        "from evergrad.types import Verdict, EvergradError\n"
        "registry = Registry(sys.argv[1])\n"
        "size = max(path.stat().st_size for path in Path(sys.argv[1]).parent.iterdir())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))\n"
        "try:\n"
        "    registry.promote('production', 'b', Verdict(True, ('x' * 500_000,), {}, 'b', 'a'))\n"
        "except EvergradError as error:\n"
        "    print(error)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "cannot write to the registry database: " in child.stdout
    assert registry.resolve("production") == "a"
    assert registry.verdicts("b") == ()
    registry.promote("production", "b", yes("b", "a"))


def test_readers_go_on_while_a_writer_holds_its_transaction(registry: Registry, path: Path) -> None:
    registry.promote("production", "a", bootstrap=True)
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE aliases SET event_id = event_id")
        assert Registry(path).resolve("production") == "a"
        writer.execute("ROLLBACK")


def test_first_openings_at_once_make_one_schema(path: Path) -> None:
    code = "import sys; from evergrad.registry import Registry; print(Registry(sys.argv[1]).list())"
    children = [subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) for _ in range(4)]
    assert [(child.communicate()[0], child.returncode) for child in children] == [(b"()\n", 0)] * 4


_BEFORE_MERGES = (
    "number, version_id, parent_id, policy_version, weights_uri, base_model, recipe_hash, created_at, metadata, system_prompt"
)
AS_SCHEMA_4 = f"""
PRAGMA legacy_alter_table = ON;
ALTER TABLE versions RENAME TO later;
CREATE TABLE versions (number INTEGER NOT NULL PRIMARY KEY, version_id VARCHAR NOT NULL UNIQUE, parent_id VARCHAR,
    policy_version INTEGER NOT NULL, weights_uri VARCHAR NOT NULL, base_model VARCHAR NOT NULL, recipe_hash VARCHAR NOT NULL,
    created_at VARCHAR NOT NULL, metadata TEXT NOT NULL, system_prompt TEXT NOT NULL DEFAULT '');
INSERT INTO versions SELECT {_BEFORE_MERGES} FROM later;
DROP TABLE later;
UPDATE evergrad_schemas SET version = 4;
"""
AS_SCHEMA_3 = f"""
{AS_SCHEMA_4}
ALTER TABLE release_outcomes DROP COLUMN by_customer;
DROP TABLE release_offers;
DROP TABLE release_gateways;
UPDATE evergrad_schemas SET version = 3;
"""
AS_SCHEMA_2 = f"""
{AS_SCHEMA_3}
ALTER TABLE versions DROP COLUMN system_prompt;
UPDATE evergrad_schemas SET version = 2;
"""


@pytest.mark.parametrize("script", [AS_SCHEMA_2, AS_SCHEMA_3, AS_SCHEMA_4], ids=["2", "3", "4"])
def test_versions_of_an_earlier_schema_are_their_weights_alone(registry: Registry, path: Path, script: str) -> None:
    before = registry.list()
    with sqlite3.connect(path) as connection:
        connection.executescript(script)
    again = Registry(path)
    assert again.list() == before
    assert (again.get("a").system_prompt, again.get("b").merged_id) == ("", None)
    prompted = replace(version("p", "a"), weights_uri=before[0].weights_uri, system_prompt="Be brief.\n☃")
    assert again.register(prompted) == again.get("p") == prompted
    with pytest.raises(RegistryError, match="differs in system_prompt"):
        again.register(replace(prompted, system_prompt="Be long."))
    merged = replace(version("m", "b"), merged_id="p")
    assert again.register(merged) == again.get("m") == merged
    with pytest.raises(RegistryError, match="differs in merged_id"):
        again.register(replace(merged, merged_id="a"))
    with pytest.raises(RegistryError, match="no version 'nobody'"):
        again.register(replace(version("n", "b"), merged_id="nobody"))


def test_what_cannot_be_opened_says_why(tmp_path: Path, registry: Registry, path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE evergrad_schemas SET version = 99")
    with pytest.raises(DatabaseError, match=r"schema version 99, this Evergrad knows 5.*upgrade Evergrad"):
        Registry(path)
    (tmp_path / "text").write_text("no database, but long enough to look at " * 50)
    with pytest.raises(DatabaseError, match="file is not a database"):
        Registry(tmp_path / "text")
    with pytest.raises(DatabaseError, match=r"mysql is not supported \(mysql://nobody:\*\*\*@localhost/none\)"):
        Registry("mysql://nobody:secret@localhost/none")
    with pytest.raises(DatabaseError, match="cannot open the registry database"):
        Registry("://")
    with pytest.raises(DatabaseError, match="cannot open the registry database"):
        Registry("postgresql+nodriver://nobody:secret@localhost/none")


class AliasMachine(RuleBasedStateMachine):
    """Random promotions and rollbacks against a plain stack."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "registry.sqlite"
        self.registry = Registry(self.path)
        for name in "abcd":
            self.registry.register(version(name))
        self.stack: list[str] = []
        self.moves = 0

    @rule(name=st.sampled_from("abcd"))
    def promote(self, name: str) -> None:
        current = self.stack[-1] if self.stack else None
        verdict = Verdict(True, ("wins",), {"number": self.moves}, name, current)
        if name == current:
            with pytest.raises(RegistryError, match="already"):
                self.registry.promote("production", name, verdict)
            return
        self.registry.promote("production", name, verdict)
        self.stack.append(name)
        self.moves += 1

    @precondition(lambda self: len(self.stack) > 1)
    @rule()
    def rollback(self) -> None:
        self.stack.pop()
        assert self.registry.rollback("production").version_id == self.stack[-1]
        self.moves += 1

    @rule()
    def reopen(self) -> None:
        self.registry.close()
        self.registry = Registry(self.path)

    @invariant()
    def pointer_and_audit_agree(self) -> None:
        history = self.registry.history("production")
        assert len(history) == self.moves
        assert self.registry.resolve("production") == (self.stack[-1] if self.stack else None)
        for before, after in itertools.pairwise(history):
            assert after.from_version_id == before.version_id
        if history:
            assert history[-1].version_id == self.stack[-1]

    def teardown(self) -> None:
        self.registry.close()
        self.folder.cleanup()


TestAliasMachine = AliasMachine.TestCase
TestAliasMachine.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)


@pytest.mark.skipif("EVERGRAD_TEST_DATABASE" not in os.environ, reason="needs the URL of a PostgreSQL database to empty")
def test_the_same_on_postgresql() -> None:
    url = os.environ["EVERGRAD_TEST_DATABASE"]
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    code = "import sys; from evergrad.registry import Registry; print(Registry(sys.argv[1]).list())"
    openers = [subprocess.Popen([sys.executable, "-c", code, url]) for _ in range(3)]
    assert [opener.wait() for opener in openers] == [0, 0, 0]
    registry = Registry(url)
    for name in "abc":
        registry.register(version(name))
    registry.promote("production", "a", bootstrap=True)
    outputs = _race(url)
    assert sorted(output.split()[0] for output in outputs) == ["moved", "refused"], outputs
    assert Registry(url).rollback("production").version_id == "a"
    assert [event.action for event in registry.history("production")] == ["bootstrap", "promote", "rollback"]
    with pytest.raises(RegistryError, match="no predecessor"):
        registry.rollback("production")
