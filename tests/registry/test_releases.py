"""Releases: where a candidate stands on its way is durable, moves with the alias or not at all, and says who moved it."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from evergrad.registry import Registry, RegistryError
from evergrad.types import Release, ReleaseState, SessionOutcome, Side, Verdict
from tests.registry.test_registry import AS_SCHEMA_3, version, yes

PLAN = {"shares": [0.05, 0.25], "outcomes": 20}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.sqlite"


@pytest.fixture
def registry(path: Path) -> Registry:
    registry = Registry(path)
    for name in "abc":
        registry.register(version(name))
    registry.promote("production", "a", bootstrap=True)
    return registry


def begin(registry: Registry, candidate: str = "b", incumbent: str = "a") -> Release:
    return registry.releases.begin(
        "production", yes(candidate, incumbent), PLAN, state=ReleaseState.CANARY, share=0.05, actor="gate"
    )


def stand(release: Release | None) -> tuple[ReleaseState, float]:
    assert release is not None
    return release.state, release.share


def test_a_release_ends_with_the_alias(registry: Registry, path: Path) -> None:
    release = begin(registry)
    assert registry.resolve("production") == "a", "a candidate owns nothing before its release has ended"
    assert (release.candidate_id, release.incumbent_id, release.plan) == ("b", "a", PLAN)
    wider = registry.releases.widen(release, 0.25, reason="no harm", evidence={"e_value": 0.7}, actor="canary")
    assert stand(Registry(path).releases.last("production")) == (ReleaseState.CANARY, 0.25)
    event = registry.releases.promote(wider, reason="no harm at all", evidence={"e_value": 0.4}, actor="canary")
    assert (event.action, event.version_id, event.from_version_id, event.actor) == ("promote", "b", "a", "canary")
    assert event.evidence == {"e_value": 0.4}
    assert event.verdict["reasons"] == ["b wins"], "what the gate said stands behind it"
    reopened = Registry(path)
    assert reopened.resolve("production") == "b"
    assert stand(reopened.releases.last("production")) == (ReleaseState.PROMOTED, 1.0)
    assert [(each.state.value, each.share, each.actor, each.reason) for each in reopened.releases.events(1)] == [
        ("canary", 0.05, "gate", "b wins"),
        ("canary", 0.25, "canary", "no harm"),
        ("promoted", 1.0, "canary", "no harm at all"),
    ]
    assert reopened.verdicts("b") == (yes("b", "a"),), "ruled on once"
    assert reopened.rollback("production", "second thoughts", actor="ann").version_id == "a"


def test_a_release_that_is_rolled_back_never_moved_the_alias(registry: Registry, path: Path) -> None:
    ended = registry.releases.roll_back(begin(registry), reason="harm", evidence={"e_value": 31.0}, actor="canary")
    assert stand(ended) == (ReleaseState.ROLLED_BACK, 0.0)
    assert Registry(path).resolve("production") == "a"
    assert len(registry.history("production")) == 1
    assert registry.releases.events(1)[-1].evidence == {"e_value": 31.0}
    assert begin(registry, "c").release_id == 2, "the way is free for the next one"
    assert [each.release_id for each in registry.releases.of_version("b")] == [1]


def test_beginning_again_is_one_release_wherever_it_stands(registry: Registry) -> None:
    first = begin(registry)
    assert begin(registry) == first
    wider = registry.releases.widen(first, 0.25, reason="no harm")
    assert begin(registry) == wider
    registry.releases.roll_back(wider, reason="harm")
    assert stand(begin(registry)) == (ReleaseState.ROLLED_BACK, 0.0), "a crash does not undo a rollback"
    assert len(registry.verdicts("b")) == 1


def test_what_may_not_begin(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="refuses b"):
        registry.releases.begin(
            "production", Verdict(False, ("tied",), {}, "b", "a"), PLAN, state=ReleaseState.SHADOW, share=0.0
        )
    with pytest.raises(RegistryError, match="compares b with c, but production serves a"):
        begin(registry, "b", "c")
    with pytest.raises(RegistryError, match="staging serves nothing"):
        registry.releases.begin("staging", yes("b", None), PLAN, state=ReleaseState.CANARY, share=0.1)
    begin(registry)
    with pytest.raises(RegistryError, match=r"release of b is under way.*Next: .*rollback"):
        begin(registry, "c")
    with pytest.raises(RegistryError, match="no release 9"):
        registry.releases.get(9)


def test_of_two_who_move_it_one_is_refused(registry: Registry) -> None:
    release = begin(registry)
    wider = registry.releases.widen(release, 0.25, reason="no harm")
    for late in (
        lambda: registry.releases.widen(release, 0.25, reason="again"),
        lambda: registry.releases.roll_back(release, reason="harm"),
        lambda: registry.releases.promote(release, reason="fine"),
    ):
        with pytest.raises(RegistryError, match=r"at canary 0\.25, not at canary 0\.05"):
            late()
    for share in (0.25, 0.1, 1.0, 1.5):
        with pytest.raises(RegistryError, match=r"cannot go from 0\.25"):
            registry.releases.widen(wider, share, reason="no")
    registry.releases.roll_back(wider, reason="harm")
    with pytest.raises(RegistryError, match="at rolled_back 0"):
        registry.releases.promote(wider, reason="fine")
    assert registry.resolve("production") == "a"


@pytest.mark.parametrize(("moved_to", "ends"), [("b", (ReleaseState.PROMOTED, 1.0)), ("c", (ReleaseState.ROLLED_BACK, 0.0))])
def test_who_moves_the_alias_by_hand_ends_the_release(
    registry: Registry, moved_to: str, ends: tuple[ReleaseState, float]
) -> None:
    release = begin(registry)
    registry.promote("production", moved_to, yes(moved_to, "a"), actor="ann")
    assert registry.resolve("production") == moved_to
    assert stand(registry.releases.get(release.release_id)) == ends
    last = registry.releases.events(release.release_id)[-1]
    assert (last.actor, last.reason) == ("ann", f"production was moved to {moved_to} meanwhile")


def test_a_rollback_of_the_alias_ends_the_release_against_what_it_served(registry: Registry) -> None:
    registry.promote("production", "b", yes("b", "a"))
    release = begin(registry, "c", "b")
    assert registry.rollback("production", "both are bad", actor="ann").version_id == "a"
    assert stand(registry.releases.get(release.release_id)) == (ReleaseState.ROLLED_BACK, 0.0)


def test_outcomes_are_kept_once_and_in_order(registry: Registry, path: Path) -> None:
    release = begin(registry)
    first = [
        SessionOutcome("s2", Side.INCUMBENT, 1.0, 0.05),
        SessionOutcome("s1", Side.CANDIDATE, None, 0.05),
        SessionOutcome("s3", Side.CANDIDATE, 0.25, 0.05),
    ]
    registry.releases.observe(release, first)
    again = [SessionOutcome("s1", Side.CANDIDATE, 1.0, 0.25), SessionOutcome("s4", Side.INCUMBENT, 0.0, 0.05)]
    registry.releases.observe(release, again)
    registry.releases.observe(release, [])
    assert Registry(path).releases.outcomes(release) == (*first, again[1])
    customers = [SessionOutcome("customer-1", Side.CANDIDATE, 0.5, 0.05, by_customer=True)]
    registry.releases.observe(release, customers)
    assert Registry(path).releases.outcomes(release) == (*first, again[1], *customers)


def test_outcomes_of_a_registry_from_before_customers_met_candidates_are_the_loops_own(registry: Registry, path: Path) -> None:
    release = begin(registry)
    registry.releases.observe(release, [SessionOutcome("s1", Side.CANDIDATE, 1.0, 0.05)])
    with sqlite3.connect(path) as connection:
        connection.executescript(AS_SCHEMA_3)
    again = Registry(path)
    assert again.releases.outcomes(release) == (SessionOutcome("s1", Side.CANDIDATE, 1.0, 0.05, by_customer=False),)
    again.releases.offer(release, "http://127.0.0.1:1")
    assert again.releases.offered(release) == "http://127.0.0.1:1"


def test_a_gateway_learns_where_the_candidate_answers_and_says_that_it_asks_there(registry: Registry, path: Path) -> None:
    releases, gateway = registry.releases, Registry(path).releases
    release = begin(registry)
    assert gateway.offered(release) == ""
    releases.offer(release, "http://127.0.0.1:1")
    releases.offer(release, "http://127.0.0.1:2")  # another process, after a restart
    assert gateway.offered(release) == "http://127.0.0.1:2"
    for pid in (7, 8, 7):
        gateway.enter(release, pid)
    assert releases.gateways(release) == (7, 8)
    wider = releases.widen(release, 0.25, reason="no harm")
    assert gateway.offered(wider) == "http://127.0.0.1:2", "a wider share has the same engine"
    releases.roll_back(wider, reason="harm")
    assert gateway.offered(wider) == "", "whoever ended the release, and whether or not the run knows by now"
    gateway.leave(release, 7)
    gateway.leave(release, 7)
    assert releases.gateways(release) == (8,)
    second = begin(registry, "c")
    assert gateway.offered(second) == ""
    assert releases.gateways(second) == ()


def test_in_the_shadow_a_candidate_is_offered_to_nobody(registry: Registry) -> None:
    shadow = registry.releases.begin("production", yes("b", "a"), PLAN, state=ReleaseState.SHADOW, share=0.0)
    registry.releases.offer(shadow, "http://127.0.0.1:1")
    assert registry.releases.offered(shadow) == ""
    registry.releases.widen(shadow, 0.05, reason="it answers")
    assert registry.releases.offered(shadow) == "http://127.0.0.1:1"


CRASH = """
import os, signal, sys
import sqlalchemy as sa
from evergrad.registry import Registry
registry = Registry(sys.argv[1])
release = registry.releases.last("production")
statements = 0
@sa.event.listens_for(sa.Engine, "after_cursor_execute")
def die(connection, cursor, statement, *rest):
    global statements
    statements += statement.startswith(("INSERT", "UPDATE"))
    if statements == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
registry.releases.promote(release, reason="no harm", actor="canary")
"""


def test_killed_at_each_write_of_its_end_release_and_alias_agree(registry: Registry, path: Path) -> None:
    begin(registry)
    codes = []
    for write in (1, 2, 3, 4):
        child = subprocess.run([sys.executable, "-c", CRASH, str(path), str(write)], capture_output=True, text=True)
        codes.append(child.returncode)
        moved = child.returncode == 0
        state = registry.releases.get(1).state
        assert (registry.resolve("production"), state) == (
            ("b", ReleaseState.PROMOTED) if moved else ("a", ReleaseState.CANARY)
        ), child.stderr
    assert codes == [-signal.SIGKILL] * 3 + [0]


OLD = """
CREATE TABLE versions (number INTEGER NOT NULL PRIMARY KEY, version_id VARCHAR NOT NULL UNIQUE, parent_id VARCHAR,
    policy_version INTEGER NOT NULL, weights_uri VARCHAR NOT NULL, base_model VARCHAR NOT NULL, recipe_hash VARCHAR NOT NULL,
    created_at VARCHAR NOT NULL, metadata TEXT NOT NULL);
CREATE TABLE verdicts (number INTEGER NOT NULL PRIMARY KEY, candidate_id VARCHAR NOT NULL, promote BOOLEAN NOT NULL,
    verdict TEXT NOT NULL, at VARCHAR NOT NULL);
CREATE TABLE alias_events (event_id INTEGER NOT NULL PRIMARY KEY, alias VARCHAR NOT NULL, action VARCHAR NOT NULL,
    version_id VARCHAR NOT NULL, from_version_id VARCHAR, predecessor INTEGER, verdict_number INTEGER, reason TEXT NOT NULL,
    at VARCHAR NOT NULL);
CREATE TABLE aliases (alias VARCHAR NOT NULL PRIMARY KEY, event_id INTEGER NOT NULL);
CREATE TABLE evergrad_schemas (room VARCHAR NOT NULL PRIMARY KEY, version INTEGER NOT NULL);
INSERT INTO versions VALUES (1, 'a', NULL, 0, 'versions/a', 'tiny', 'r0', '2026-01-01T00:00:00+00:00', '{"cycle":1}');
INSERT INTO versions VALUES (2, 'b', 'a', 3, 'versions/b', 'tiny', 'r0', '2026-01-01T00:00:00+00:00', '{"cycle":1}');
INSERT INTO versions VALUES (3, 'c', 'b', 7, 'versions/c', 'tiny', 'r0', '2026-01-01T00:00:00+00:00', '{"cycle":1}');
INSERT INTO verdicts VALUES (1, 'b', 1, '{"candidate_id":"b","evidence":{"n":96},"incumbent_id":"a","promote":true,\
"reasons":["b wins"]}', '2026-01-02T00:00:00+00:00');
INSERT INTO alias_events VALUES (1, 'production', 'bootstrap', 'a', NULL, NULL, NULL, 'first', '2026-01-01T00:00:00+00:00');
INSERT INTO alias_events VALUES (2, 'production', 'promote', 'b', 'a', 1, 1, 'b wins', '2026-01-02T00:00:00+00:00');
INSERT INTO aliases VALUES ('production', 2);
INSERT INTO evergrad_schemas VALUES ('registry', 1);
"""

OPEN = "import sys; from evergrad.registry import Registry; print(Registry(sys.argv[1]).resolve('production'))"


def test_a_registry_of_an_earlier_version_is_brought_up_by_whoever_opens_it_first(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript(OLD)
    command = [sys.executable, "-c", OPEN, str(path)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate() for child in children] == [("b\n", "")] * 3
    registry = Registry(path)
    assert [(event.version_id, event.actor, event.evidence) for event in registry.history("production")] == [
        ("a", "", {}),
        ("b", "", {}),
    ]
    release = begin(registry, "c", "b")
    registry.releases.promote(release, reason="no harm", actor="canary")
    assert registry.rollback("production").version_id == "b"
    assert registry.rollback("production").version_id == "a"
