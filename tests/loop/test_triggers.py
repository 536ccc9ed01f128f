"""What sets a cycle off, and whether it trains: each trigger alone, none on chance; saturated and distrusted suites."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from evergrad.envs import Environment, Taskset, tool
from evergrad.evals import content_hash
from evergrad.loop._deciding import decide
from evergrad.loop._folder import LoopState, Stage
from evergrad.loop._session import Session
from evergrad.loop._watching import _apply_change, count_traffic
from evergrad.loop.config import RunConfig
from evergrad.loop.decisions import Decision, take
from evergrad.loop.quarantine import breaking_changes
from evergrad.loop.triggers import Live, WatchConfig, fired
from evergrad.types import ModelVersion, Outcome, Rollout
from tests.loop.conftest import LETTERS

WATCH = WatchConfig(drift_alpha=0.01, failures=5)


def rollouts(successes: int, failures: int, faults: int = 0) -> list[Rollout]:
    ends = (
        [(Outcome.SCORED, 1.0)] * successes + [(Outcome.SCORED, 0.0)] * failures + [(Outcome.ENVIRONMENT_FAULT, None)] * faults
    )
    return [Rollout(str(i), "g", "t", (), outcome, reward) for i, (outcome, reward) in enumerate(ends)]


@pytest.mark.parametrize(
    ("live", "kinds"),
    [
        (Live(23, 24, 0.97, 96), []),
        (Live(24, 24, 1.0, 96), []),
        (Live(0, 0, 0.95, 96), []),
        (Live(3, 24, 0.95, 96), ["fall"]),
        (Live(0, 24, None), []),  # unknown is not zero, nor one
        (Live(24, 24, 0.95, 96, contract_changed=True), ["contract"]),
        (Live(24, 24, 0.95, 96, new_failures=5), ["failures"]),
        (Live(24, 24, 0.95, 96, new_failures=4), []),
        (Live(24, 24, 0.95, 96, drift=0.005), ["drift"]),
        (Live(24, 24, 0.95, 96, drift=0.005, check=2), []),  # the second look has a smaller level
        (Live(0, 24, 0.95, 96, new_failures=24, contract_changed=True), ["contract", "fall", "failures"]),
    ],
)
def test_each_trigger_fires_for_its_own_cause(live: Live, kinds: list[str]) -> None:
    assert list(fired(live, WATCH)) == kinds


def test_nobody_looks_at_what_is_not_configured() -> None:
    assert fired(Live(24, 24, 0.95, 96, new_failures=99, drift=1e-9), WatchConfig()) == {}


def test_traffic_adds_up_over_checks_until_version_or_suite_change() -> None:
    state = LoopState()
    assert count_traffic(state, "a", "s@v1", rollouts(20, 4, faults=40)) == (20, 24)
    count_traffic(state, "a", "s@v1", rollouts(10, 0))
    assert (state.live["successes"], state.live["requests"], state.new_failures) == (30, 34, 4)
    count_traffic(state, "b", "s@v1", rollouts(1, 1))
    assert (state.live["successes"], state.live["requests"], state.new_failures) == (1, 2, 5)
    count_traffic(state, "b", "s@v2", rollouts(0, 3))
    assert (state.live["successes"], state.live["requests"], state.new_failures) == (0, 3, 8)
    take(state, Decision(Stage.DECIDE, "next cycle", "3 failures", {"fired": ["failures"]}), at_s=1.0, usd=0.5)
    assert (state.new_failures, state.trigger_kinds, state.live["requests"]) == (0, ["failures"], 3)


def test_the_contract_hash_covers_schema_description_and_instructions() -> None:
    def environment(doc: str = "of an order", parameter: str = "id", kind: type = int, **names: Any) -> type[Environment]:
        async def look(self: Any, **_: Any) -> str:
            return ""

        namespace: dict[str, Any] = {}
        source = f"async def look(self, {parameter}: {kind.__name__}) -> str:\n    '''{doc}'''\n    return ''"
        exec(source, namespace)
        return type("Shop", (Environment,), {"look": tool(namespace["look"]), **names})

    base = environment().contract_hash()
    assert environment().contract_hash() == base
    changed = [
        environment(doc="of an order, please"),
        environment(parameter="number"),
        environment(kind=str),
        environment(instructions="Answer at once."),
    ]
    assert base not in [each.contract_hash() for each in changed]
    assert len({each.contract_hash() for each in changed}) == len(changed)


def version_of(name: str, weights: str, system_prompt: str = "") -> ModelVersion:
    return ModelVersion(name, None, 1, weights, "tiny", "r", "2026-01-01", system_prompt=system_prompt)


class Loop:
    """As much of a session as DECIDE needs."""

    base, distrust, convict, known = Session.base, Session.distrust, Session.convict, Session.known

    def __init__(self, *, mean: float, kinds: list[str], **config: Any) -> None:
        self.config = RunConfig.model_validate({"environment": {"name": str(LETTERS)}, **config})
        self.state = LoopState(cycle=2, trigger="because", trigger_kinds=kinds)
        self.state.scores.append(
            {"label": "x", "version_id": "t-c1-rl", "suite": "letters@v1#2", "suite_hash": "h", "mean": mean, "n": 96}
        )
        self.versions = {"t-c1-rl": version_of("t-c1-rl", "versions/t-c1-rl")}
        self.registry = SimpleNamespace(
            resolve=lambda alias: "t-c1-rl", get=self.versions.__getitem__, find=lambda alias: self.versions["t-c1-rl"]
        )
        self.folder = SimpleNamespace(path=LETTERS.parent)
        self.told: list[str] = []

    def taskset(self, settings: Any) -> Taskset:
        return Taskset(str(LETTERS), settings)

    def suite(self, settings: Any) -> str:
        return self.taskset(settings).suite

    def event(self, text: str) -> None:
        self.told.append(text)

    def spent_usd(self) -> float:
        return 2.0


@pytest.mark.parametrize(
    ("mean", "kinds", "following", "word"),
    [
        (0.90, ["schedule"], Stage.WARM_START, "train"),
        (0.97, ["schedule"], Stage.WATCH, "retired"),
        (0.97, ["drift", "failures"], Stage.WATCH, "retired"),
        (0.97, ["contract"], Stage.WARM_START, "train"),
        (0.97, ["fall", "schedule"], Stage.WARM_START, "train"),
    ],
)
async def test_a_saturated_suite_is_retired_unless_the_world_says_otherwise(
    mean: float, kinds: list[str], following: Stage, word: str
) -> None:
    session: Any = Loop(mean=mean, kinds=kinds)
    decision = await decide(session)
    assert (decision.following, decision.word) == (following, word)
    assert decision.evidence["score"] == mean
    assert bool(session.told) == (following is Stage.WATCH)


def cycle_of(arm: str | None, gain: float, usd: float | None, verdict: str = "promoted") -> dict[str, Any]:
    scores = {"score_before": 0.4, "score_after": 0.4 + gain}
    return {"cycle": 1, "arm": arm, "suite": "letters@v1#1", "candidate": "t-c1-rl", **scores, "usd": usd, "verdict": verdict}


async def test_a_cycle_takes_the_arm_with_the_best_prospect() -> None:
    session: Any = Loop(mean=0.8, kinds=["schedule"], arms=[{"name": "rl"}, {"name": "sft", "rl": {"steps": 0}}])
    session.state.cycles = [cycle_of(None, 0.3, 1.0), cycle_of("rl", 0.2, 1.0)]
    decision = await decide(session)
    assert (decision.word, session.state.arm) == ("train", "sft"), "what was never tried gets its turn"
    assert session.config.recipe(3, session.state.arm).rl.steps == 0
    session.state.cycles += [cycle_of("sft", 0.3, 1.0, "refused")] * 3
    decision = await decide(session)
    assert session.state.arm == "rl"
    assert {each["arm"]: each["tries"] for each in decision.evidence["arms"]} == {"rl": 1, "sft": 3}
    assert json.loads(json.dumps(decision.evidence, allow_nan=False))["arm"] == "rl"


@pytest.mark.parametrize(
    ("worth", "kinds", "word"), [(0.5, ["schedule"], "nothing"), (500, ["schedule"], "train"), (0.5, ["fall"], "train")]
)
async def test_doing_nothing_wins_when_training_does_not_pay(worth: float, kinds: list[str], word: str) -> None:
    session: Any = Loop(mean=0.8, kinds=kinds, worth={"usd_per_success": worth, "attempts": 1})
    session.state.cycles = [cycle_of("adapt", 0.0, 1.0)] * 4
    decision = await decide(session)
    assert decision.word == word
    if word == "nothing":
        assert decision.following is Stage.WATCH
        assert "doing nothing is worth most" in session.told[0]
    unpriced: Any = Loop(mean=0.8, kinds=kinds, worth={"usd_per_success": worth, "attempts": 1})
    unpriced.state.cycles = [cycle_of("adapt", 0.0, None)] * 4
    assert (await decide(unpriced)).word == "train", "without a price nothing is known"


async def test_each_prompt_is_tried_once_over_the_same_weights() -> None:
    arms = [{"name": "prompts", "prompts": ["Be brief.", "Be careful."]}, {"name": "rl"}]
    session: Any = Loop(mean=0.8, kinds=["schedule"], arms=arms)
    decision = await decide(session)
    assert (decision.following, decision.word, session.state.arm) == (Stage.MEASURE, "prompt", "prompts")
    assert session.state.system_prompt == decision.evidence["system_prompt"] == "Be brief."
    session.versions["t-c2-prompt"] = version_of("t-c2-prompt", "versions/t-c1-rl", "Be brief.")
    refused = {**cycle_of("prompts", 0.0, 0.1, "refused"), "candidate": "t-c2-prompt"}
    session.state.cycles = [refused]
    assert (await decide(session)).following is Stage.WARM_START, "what was never tried gets its turn"
    assert session.state.system_prompt == "", "training goes on from the prompt that serves"
    session.state.cycles = [refused, *[cycle_of("rl", 0.0, 100.0, "refused")] * 3]
    assert (await decide(session)).evidence["system_prompt"] == "Be careful."
    # Both were tried over these weights, and training is the only way left; then weights are promoted, and all is open again.
    session.versions["t-c4-prompt"] = version_of("t-c4-prompt", "versions/t-c1-rl", "Be careful.")
    session.state.cycles += [{**refused, "candidate": "t-c4-prompt"}]
    assert (await decide(session)).following is Stage.WARM_START
    session.versions["t-c1-rl"] = version_of("t-c1-rl", "versions/t-c5-rl", "Be careful.")
    assert (await decide(session)).evidence["system_prompt"] == "Be brief.", "but not what serves already"


async def test_nothing_is_done_where_every_prompt_was_tried_and_there_is_no_other_arm() -> None:
    session: Any = Loop(mean=0.8, kinds=["fall"], arms=[{"name": "prompts", "prompts": ["Be brief."]}])
    session.versions["t-c2-prompt"] = version_of("t-c2-prompt", "versions/t-c1-rl", "Be brief.")
    session.state.cycles = [{**cycle_of("prompts", 0.0, 0.1, "refused"), "candidate": "t-c2-prompt"}]
    decision = await decide(session)
    assert (decision.following, decision.word) == (Stage.WATCH, "nothing")
    assert "left to try" in decision.why


async def test_a_recipe_for_this_very_cycle_is_tried_all_the_same() -> None:
    session: Any = Loop(mean=1.0, kinds=["schedule"], trials=[{"cycle": 2}])
    assert (await decide(session)).word == "train"


async def test_a_convicted_verifier_trains_nothing_until_it_changes() -> None:
    session: Any = Loop(mean=0.2, kinds=["contract"])
    session.convict({}, "reward 1.0, gold 0.2")
    decision = await decide(session)
    assert (decision.following, decision.word) == (Stage.WATCH, "no training")
    session.state.known.append({"contract": "v2"})
    session.convict({"contract": "v2"}, "the same")
    assert session.known == []
    session.state.distrusted["letters@v1"]["fingerprint"] = "of the verifier before its repair"
    assert (await decide(session)).word == "train"


def test_customers_change_without_the_run_being_told() -> None:
    config = RunConfig.model_validate(
        {"environment": {"name": str(LETTERS)}, "traffic": {"changes": [{"customers": {"difficulty": "easy"}}]}}
    )
    session: Any = SimpleNamespace(config=config, state=LoopState(), console=SimpleNamespace(note=lambda text: None))
    assert _apply_change(session)
    assert (session.state.customers, session.state.deployed, session.state.known) == ({"difficulty": "easy"}, {}, [])
    assert not _apply_change(session)


def test_another_contract_of_the_desk_breaks_old_calls() -> None:
    first, second = (Taskset("support_desk", {"contract": each}).contract() for each in ("v1", "v2"))
    assert "order is gone" in breaking_changes(first, second)
    assert breaking_changes(first, first) == []


def test_a_change_of_words_breaks_nothing_and_is_a_trigger_all_the_same() -> None:
    old = {
        "environment": "shop",
        "instructions": "Answer.",
        "tools": [{"name": "a", "description": "x", "parameters": {}, "required": []}],
    }
    new = {
        "environment": "shop",
        "instructions": "Answer!",
        "tools": [{"name": "a", "description": "y", "parameters": {}, "required": []}],
    }
    assert breaking_changes(old, new) == []
    assert content_hash(old) != content_hash(new)
    assert breaking_changes({"queues": ["a"]}, {"queues": ["m"]}) == ["queues has changed"]
