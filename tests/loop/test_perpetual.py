"""The run without an end in sight (``make demo-perpetual``): each planted event ends in the right decision.

Slow: twelve cycles, minutes on two cores. What a decision is held against is gold, which the run itself sees a share of.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from evergrad.evals import report_from_json
from evergrad.ledger import Ledger
from evergrad.loop.auditing import State, audit, read_certificate
from evergrad.registry import Registry
from tests.loop.conftest import Start, finish

pytestmark = pytest.mark.slow
CONFIG = Path(__file__).parents[2] / "examples" / "perpetual.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder, filled by the first test that needs it."""
    return tmp_path_factory.mktemp("perpetual") / "run"


@pytest.fixture
def run(folder: Path, start: Start) -> Path:
    if not folder.exists():
        # The budget of minutes is the user's; a busy machine may take longer, and is not what is tested.
        process = start(
            "run", str(CONFIG), "--run-dir", str(folder), "--set", "budget.minutes=600", "--set", "placement.threads=1"
        )
        finish(process)
    return folder


def report_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "report.json").read_text()))


def decided(run: Path, cycle: int, stage: str) -> dict[str, Any]:
    """The decision by which a stage of a cycle ended."""
    found = [each for each in report_of(run)["decisions"] if (each["cycle"], each["stage"]) == (cycle, stage)]
    assert len(found) == 1, found
    return dict(found[0])


def test_each_planted_event_ends_in_the_right_decision(run: Path) -> None:
    assert report_of(run)["decisions"][-1]["why"] == "all cycles are done"
    assert {each["cycle"] for each in report_of(run)["decisions"]} == set(range(1, 13))
    # The first lesson, then nothing is left to learn: the task set is saturated.
    assert decided(run, 1, "measure")["decided"] == "promoted"
    assert decided(run, 2, "decide")["decided"] == "retired"
    # The first change of contract: a recipe without replay learns the new and forgets the old, one with replay does not.
    assert {"contract", "fall"} <= set(decided(run, 2, "watch")["evidence"]["fired"])
    forgets = decided(run, 3, "measure")
    assert forgets["decided"] == "refused"
    assert forgets["evidence"]["score_after"] > forgets["evidence"]["score_before"]
    assert [guard["suite"] for guard in forgets["evidence"]["guards"] if not guard["holds"]] != []
    assert "contract" in decided(run, 3, "watch")["evidence"]["fired"]
    assert decided(run, 4, "measure")["decided"] == "promoted"
    # A candidate that is what serves.
    same = decided(run, 6, "measure")
    assert (same["decided"], same["evidence"]["delta"]) == ("refused", 0.0)
    assert "tied" in same["why"]
    # The second change brings a verifier that can be fooled, and the third one takes it away.
    poisoned = decided(run, 7, "measure")
    assert poisoned["decided"] == "refused"
    assert poisoned["evidence"]["integrity"]["alarm"]
    assert "the verifier overstates the candidate" in poisoned["why"]
    assert decided(run, 8, "measure")["decided"] == "promoted"
    assert decided(run, 8, "measure")["evidence"]["primary"].startswith("queues@v4")
    # Customers ask for other things, and nobody told the run.
    assert "drift" in decided(run, 10, "watch")["evidence"]["fired"]


def test_no_promotion_is_false_by_gold(run: Path) -> None:
    """Each promoted version is better by gold than what it took the place of, on tasks that both were measured on."""
    promoted = [cycle for cycle in report_of(run)["cycles"] if cycle["verdict"] == "promoted"]
    assert [cycle["cycle"] for cycle in promoted] == [1, 4, 8]
    for cycle in promoted:
        reports = [
            report_from_json(json.loads((run / "evals" / f"{version}--{cycle['suite']}.json").read_text()))
            for version in (cycle["incumbent"], cycle["candidate"])
        ]
        before, after = (sum(report.gold.values()) / len(report.gold) for report in reports)
        assert after - before > 0.15, cycle["suite"]


def test_the_anchor_is_never_lost(run: Path) -> None:
    """What serves at the end is no worse on the first contract than the first version that ever served for it."""
    report = report_of(run)
    served = report["serving"]["version_id"]
    scores = {(row["version_id"], row["suite"]): row["mean"] for row in report["scores"] if "cycle" not in row}
    assert scores[(served, "queues@v1")] >= scores[("perpetual-c1-sft", "queues@v1")] - 0.1
    for cycle in report["cycles"]:
        if cycle["verdict"] == "promoted":
            assert all(guard["holds"] for guard in cycle["evidence"]["guards"])
    with Registry(run / "registry.sqlite") as registry:
        assert [each.action for each in registry.history("production")] == ["bootstrap", "promote", "promote", "promote"]


def test_money_is_conserved_to_the_cent_and_beyond(run: Path) -> None:
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        ledger.check_conservation()
        summary = ledger.summary()
        assert summary.usd == sum((entry.usd for entry in ledger.entries() if entry.usd is not None), Decimal(0))
        assert summary.coverage == 1.0
    report = report_of(run)
    assert report["cost"]["total_usd"] == pytest.approx(float(summary.usd or 0), abs=1e-9)
    assert sum(report["cost"]["by_cycle"].values()) == pytest.approx(report["cost"]["total_usd"], abs=1e-9)
    assert sum(report["cost"]["by_phase"].values()) == pytest.approx(report["cost"]["total_usd"], abs=1e-9)


def test_the_timeline_is_a_picture_and_the_certificates_hold(run: Path) -> None:
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    page = (run / "report.html").read_text()
    assert "queues@v3 → queues@v4" in page
    assert "forgets" in page
    paths = list((run / "certificates").glob("*.json"))
    assert len(paths) == len(report_of(run)["cycles"])
    for path in paths:
        found = {each.check: each for each in audit(run, read_certificate(path))}
        assert found["ruling made again"].state is State.HOLDS, found["ruling made again"]
