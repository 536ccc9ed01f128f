"""A lower cost as the aim: timed by turns, tested, and ruled on together with not being worse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t

from evergrad.evals import (
    BLOCKS,
    EvalError,
    GateConfig,
    Saving,
    Turns,
    announce,
    evaluate_by_turns,
    gate,
    plan_from_json,
    saving,
)
from evergrad.types import EvalReport, Message, Outcome, Rollout, Task, Usage, Verdict, plain

N = 96
NAMES = [f"t{number}" for number in range(N)]
SUITE, GUARD = "desk@v2", "desk@v1"


def turns(candidate: float | list[float], incumbent: float | list[float], size: int = N // BLOCKS) -> Turns:
    blocks = tuple(tuple(NAMES[begin : begin + size]) for begin in range(0, N, size))
    columns = (tuple(each) if isinstance(each, list) else (each,) * len(blocks) for each in (candidate, incumbent))
    return Turns(blocks, *columns)


def uneven(mean: float, seed: int) -> list[float]:
    return [float(each) for each in mean * np.random.default_rng(seed).lognormal(0, 0.1, BLOCKS)]


def scores(failures: int = 0) -> dict[str, float]:
    return {name: float(number >= failures) for number, name in enumerate(NAMES)}


# ── The statistic ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_with_equal_scores_it_is_a_t_test_on_shares_of_time() -> None:
    ours, theirs = uneven(1.0, 1), uneven(2.0, 2)
    found = saving(turns(ours, theirs), scores(), scores(), least=0.1, alpha=0.05)
    ratio = sum(ours) / sum(theirs)
    shares = np.array(ours) / sum(ours) - np.array(theirs) / sum(theirs)
    error = math.sqrt(BLOCKS / (BLOCKS - 1) * float(np.sum(shares**2)))
    assert found.ratio == pytest.approx(ratio)
    assert found.p_value == pytest.approx(t.cdf((math.log(ratio) - math.log(0.9)) / error, BLOCKS - 1))
    assert found.upper_bound == pytest.approx(ratio * math.exp(t.ppf(0.95, BLOCKS - 1) * error))
    assert found.seconds_per_success == pytest.approx((sum(ours) / N, sum(theirs) / N))


def test_a_success_costs_what_failures_took_too() -> None:
    half = {name: float(number % 2) for number, name in enumerate(NAMES)}
    assert saving(turns(1.0, 2.0), half, scores()).ratio == pytest.approx(1.0)
    assert saving(turns(1.0, 2.0), half, half).ratio == pytest.approx(0.5)
    assert saving(turns(1.0, 2.0), dict.fromkeys(NAMES[:48], 1.0), scores()).ratio == pytest.approx(1.0), "missing ones too"


@pytest.mark.parametrize(("scale", "unit"), [(3.0, 1.0), (1.0, 60.0)])
def test_neither_the_unit_of_time_nor_a_busy_minute_of_both_matters(scale: float, unit: float) -> None:
    ours, theirs = uneven(1.0, 1), uneven(1.2, 2)
    plainly = saving(turns(ours, theirs), scores(), scores())
    stretched = [unit * scale * each for each in ours], [unit * scale * each for each in theirs]
    assert saving(turns(*stretched), scores(), scores()).p_value == pytest.approx(plainly.p_value)


def test_a_version_that_never_succeeds_shows_nothing() -> None:
    nothing = dict.fromkeys(NAMES, 0.0)
    assert saving(turns(1.0, 9.0), nothing, scores()) == Saving(math.inf, math.inf, 1.0, (math.inf, 9 * BLOCKS / N), BLOCKS)
    assert saving(turns(1.0, 9.0), scores(), nothing).p_value == 1.0


def test_two_blocks_are_needed_and_seconds() -> None:
    with pytest.raises(EvalError, match="show no cost"):
        saving(turns(1.0, 2.0, size=N), scores(), scores())
    with pytest.raises(EvalError, match="show no cost"):
        saving(turns(0.0, 2.0), scores(), scores())


def p_values(ratio: float, rng: np.random.Generator, runs: int) -> np.ndarray:
    """Of simulated measurements: uneven blocks, both at 90%, one turn in ten met by something that takes twice as long."""
    found = []
    names = turns(1.0, 1.0).blocks
    for _ in range(runs):
        seconds = rng.lognormal(0, 0.1, (2, BLOCKS)) * np.where(rng.random((2, BLOCKS)) < 0.1, 3.0, 1.0)
        after, before = ({name: float(rng.random() < 0.9) for name in NAMES} for _ in range(2))
        timed = Turns(names, tuple(map(float, ratio * seconds[0])), tuple(map(float, seconds[1])))
        found.append(saving(timed, after, before).p_value)
    return np.array(found)


def test_without_a_saving_one_is_seldom_found_and_a_large_one_mostly() -> None:
    rng = np.random.default_rng(7)
    null = p_values(1.0, rng, 3000)
    # 0.064 and 0.005 in 20,000 of such, beside bursts; 0.048 and 0.005 without.
    assert np.mean(null <= 0.05) < 0.075
    assert np.mean(null <= 0.0055) < 0.011
    assert np.mean(p_values(0.3, rng, 300) <= 0.0055) > 0.8


# ── The ruling ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(version: str, found: Mapping[str, float], suite: str = SUITE) -> EvalReport:
    return EvalReport(version, suite, dict(found), f"hash of {suite}")


CONFIG = GateConfig(guard_margin=0.1)
CHEAP = turns(uneven(1.0, 1), uneven(2.0, 2))


def rule(failures: int = 0, timed: Turns | None = CHEAP, config: GateConfig = CONFIG, before: int = 0) -> Verdict:
    return gate(
        {SUITE: report("new", scores(failures))},
        {SUITE: report("old", scores(before))},
        config,
        aim="cost",
        turns=timed,
    )


def test_what_is_no_worse_and_cheaper_is_promoted_though_it_gains_nothing() -> None:
    verdict = rule()
    assert verdict.promote, verdict.reasons
    evidence = verdict.evidence
    assert evidence["aim"] == "cost"
    assert evidence["delta"] == 0.0
    found = saving(CHEAP, scores(), scores())
    assert evidence["saving"]["p_value"] == found.p_value
    assert evidence["saving"]["cost_per_success_ratio"] == found.ratio
    assert evidence["non_inferiority"] == {"margin": 0.1, "p_value": pytest.approx(0.9**N)}
    assert evidence["series"]["p_value"] == max(found.p_value, 0.9**N), "both must hold: the larger p rules"
    assert "no worse by the margin of 0.1" in verdict.reasons[0]
    assert f"a success costs {found.ratio:.3f} times what it did" in verdict.reasons[0]
    assert rule(failures=1).promote, "a little worse, within the margin"


@pytest.mark.parametrize(
    ("failures", "timed", "config", "says"),
    [
        (12, CHEAP, CONFIG, "not shown to be no worse by 0.1"),
        (0, turns(uneven(1.0, 1), uneven(1.0, 2)), CONFIG, "not shown to be below 1"),
        (0, CHEAP, CONFIG.model_copy(update={"min_saving": 0.6}), "not shown to be below 0.4"),
        (N, CHEAP, CONFIG, "one of the two never succeeds"),
        (0, None, CONFIG, "nobody has timed the two by turns"),
        (0, turns(1.0, 2.0, size=24), CONFIG, "each version had 4 turns, preset are at least 12"),
        (0, replace(CHEAP, blocks=CHEAP.blocks[:-1]), CONFIG, "other tasks were timed than were scored"),
        (0, turns(uneven(1.0, 1), 0.0), CONFIG, "some of the turns have no seconds"),
        (0, CHEAP, CONFIG.model_copy(update={"guard_margin": None}), "no margin says how much worse"),
        (0, CHEAP, CONFIG.model_copy(update={"series": "e_lond"}), "no e-value"),
    ],
)
def test_what_is_not_shown_is_refused_with_the_reason(
    failures: int, timed: Turns | None, config: GateConfig, says: str
) -> None:
    verdict = rule(failures, timed, config)
    assert not verdict.promote
    assert says in "\n".join(verdict.reasons)


def test_evidence_that_cannot_be_relied_on_is_no_try_and_a_failure_is_one() -> None:
    assert "series" not in rule(timed=None).evidence
    refused = rule(failures=N).evidence["series"]
    assert (refused["trial"], refused["p_value"]) == (1, 1.0)


def test_a_guard_still_refuses() -> None:
    verdict = gate(
        {SUITE: report("new", scores()), GUARD: report("new", scores(30), GUARD)},
        {SUITE: report("old", scores()), GUARD: report("old", scores(), GUARD)},
        CONFIG,
        aim="cost",
        turns=CHEAP,
    )
    assert not verdict.promote
    assert f"guard {GUARD} against the incumbent" in verdict.reasons[0]


def test_the_aim_is_announced_and_cannot_be_changed_once_the_scores_are_known() -> None:
    candidate, incumbent = {SUITE: report("new", scores())}, {SUITE: report("old", scores())}
    suites = {SUITE: f"hash of {SUITE}"}
    by_score, by_cost = (announce("new", "old", suites, SUITE, CONFIG, aim=aim) for aim in ("score", "cost"))  # type: ignore[arg-type]
    assert by_score.hash != by_cost.hash
    assert plan_from_json(plain(by_cost)).hash == by_cost.hash
    assert gate(candidate, incumbent, CONFIG, aim="cost", turns=CHEAP, plan=by_cost).promote
    verdict = gate(candidate, incumbent, CONFIG, aim="cost", turns=CHEAP, plan=by_score)
    assert "departs from the plan: aim cost, announced was score" in verdict.reasons[0]


def test_plans_from_before_there_were_aims_keep_their_names() -> None:
    plan = announce("new", "old", {SUITE: "h"}, SUITE, GateConfig())
    assert "min_saving" not in plan.gate
    before = {key: value for key, value in plain(plan).items() if key != "aim"}
    assert plan_from_json(before).hash == plan.hash


# ── Taking turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_two_versions_take_turns_and_each_task_counts_once() -> None:
    tasks = [Task(name, "desk", (Message("user", name),)) for name in NAMES]
    played: list[tuple[str, str]] = []
    begun: list[int] = []

    def run(version: str):  # type: ignore[no-untyped-def]
        async def play(task: Task) -> Rollout:
            played.append((version, task.task_id))
            reward = float(version == "old" or task.task_id != "t5")
            return Rollout(task.task_id, "g", task.task_id, (), Outcome.SCORED, reward, usage=Usage(completion_tokens=1))

        return play

    async def before_turn(side: int) -> None:
        begun.append(side)

    (ours, theirs), timed = await evaluate_by_turns(
        ("new", "old"), SUITE, tasks, (run("new"), run("old")), fingerprint="f", blocks=BLOCKS, before_turn=before_turn
    )
    assert begun == [0, 1, 1, 0] * (BLOCKS // 2), "A B B A"
    order = [name for index, (name, _) in enumerate(played) if index == 0 or played[index - 1][0] != name]
    assert order == ["new", *["old", "new"] * (BLOCKS // 2 - 1), "old", "new"], "never both at once"
    assert sorted(played) == sorted((version, name) for version in ("new", "old") for name in NAMES)
    assert (ours.mean, theirs.mean) == (95 / 96, 1.0)
    assert (ours.version_id, ours.suite_hash) == ("new", theirs.suite_hash)
    assert [name for block in timed.blocks for name in block] == NAMES
    assert {len(block) for block in timed.blocks} == {N // BLOCKS}
    assert min(*timed.candidate, *timed.incumbent) > 0


async def test_a_report_by_turns_is_that_of_an_evaluation() -> None:
    from evergrad.evals import evaluate

    tasks = [Task(name, "desk", (Message("user", name),)) for name in NAMES[:30]]

    async def run(task: Task) -> Rollout:
        if task.task_id == "t3":
            raise ConnectionError("gone")
        return Rollout(task.task_id, "g", task.task_id, (), Outcome.SCORED, 1.0, usage=Usage(completion_tokens=2))

    async def before_turn(side: int) -> None: ...

    (ours, _), timed = await evaluate_by_turns(("v", "w"), SUITE, tasks, (run, run), blocks=BLOCKS, before_turn=before_turn)
    assert ours == await evaluate("v", SUITE, tasks, run)
    assert ours.missing == ("t3",)
    assert sorted(map(len, timed.blocks)) == [2] * 6 + [3] * 6
