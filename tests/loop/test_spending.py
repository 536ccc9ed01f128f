"""Money ahead: a plan for a budget, and the stop that goes on record when the next dollar no longer pays."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evergrad.ledger import Curve
from evergrad.loop._folder import LoopState, Stage, write_json, write_text
from evergrad.loop._spending import forecast_of, no_longer_pays, phase_dollars, unspent
from evergrad.loop.config import RunConfig
from evergrad.loop.planning import plan_budget
from evergrad.service.cli import command
from evergrad.types import InputError

CURVE = Curve(start=0.2, ceiling=0.9, midpoint_usd=0.5, steepness=1.5)
CONFIG = {"environment": {"name": "reasoning"}, "budget": {"usd": 10.0}, "learn": {"rl": {"steps": 40}}}


def steps_of(
    curve: Curve, count: int, *, usd_per_step: float = 0.1, begin: float = 3.0, noise: float = 0.02
) -> list[dict[str, Any]]:
    draws = np.random.default_rng(0)
    spent = [usd_per_step * (index + 1) for index in range(count)]
    return [
        {"kind": "rl", "cycle": 1, "step": index + 1, "usd": begin + usd, "reward": curve.reward(usd) + draws.normal(0, noise)}
        for index, usd in enumerate(spent)
    ]


def session_of(steps: list[dict[str, Any]], **config: Any) -> Any:
    whole = RunConfig.model_validate({**CONFIG, **config})
    return SimpleNamespace(
        config=whole,
        recipe=whole.learn,
        state=LoopState(stage=Stage.LEARN, step=len(steps), steps=steps),
        clock=SimpleNamespace(phase=lambda name: nullcontext()),
        spent_usd=lambda: steps[-1]["usd"],
    )


def test_dollars_of_a_phase_count_from_its_own_begin() -> None:
    assert phase_dollars(steps_of(CURVE, 4)) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert phase_dollars([{"usd": 1.0}, {"usd": None}]) is None
    assert phase_dollars([{"usd": 1.0}]) is None
    assert forecast_of([{"usd": 1.0, "reward": 0.5}] * 9) is None, "an evaluation of nothing costs nothing"


def worth(usd_per_score: float) -> dict[str, float]:
    return {"usd_per_success": usd_per_score / 1000, "attempts": 1000}


def test_learning_goes_on_while_the_next_dollar_pays_and_stops_on_record_when_it_does_not() -> None:
    steps = steps_of(CURVE, 30)
    assert asyncio.run(no_longer_pays(session_of(steps, worth=worth(1000.0)))) is None
    session = session_of(steps, worth=worth(1.0))
    stop = asyncio.run(no_longer_pays(session))
    assert stop is not None
    assert "the next dollar brings in" in stop.why
    assert "must exceed $1.00" in stop.why
    assert (stop.evidence["steps_left"], stop.evidence["hurdle"]) == (10, 0.0)
    assert stop.evidence["phase_usd"] == pytest.approx(3.0)
    brings = stop.evidence["next_dollar_brings"]
    assert brings["low"] <= CURVE.slope(3.0) <= brings["high"], "the truth is within the interval that decided"
    assert brings["low"] < 1
    json.dumps(stop.evidence, allow_nan=False)


def test_a_hurdle_decides_between_the_two() -> None:
    steps = steps_of(CURVE, 12, noise=0.001)
    value = 8 / CURVE.slope(1.2)
    assert asyncio.run(no_longer_pays(session_of(steps, worth=worth(value)))) is None
    demanding = session_of(steps, worth=worth(value), budget={"usd": 10.0, "hurdle": 9.0})
    assert asyncio.run(no_longer_pays(demanding)) is not None


@pytest.mark.parametrize("count", [2, 7])
def test_the_first_steps_stop_nothing(count: int) -> None:
    assert asyncio.run(no_longer_pays(session_of(steps_of(CURVE, count), worth=worth(1e-9)))) is None


def test_without_a_worth_or_a_price_nothing_is_stopped() -> None:
    steps = steps_of(CURVE, 30)
    assert asyncio.run(no_longer_pays(session_of(steps))) is None
    unpriced = [{**step, "usd": None} for step in steps]
    assert asyncio.run(no_longer_pays(session_of(unpriced, worth=worth(1e-9)))) is None


def test_what_is_left_of_a_budget_is_told() -> None:
    config = RunConfig.model_validate(CONFIG)
    assert unspent(config, 4.0) == "; $6.00 of the budget of $10.00 is unspent"
    assert unspent(config, 11.0) == unspent(config, None) == ""
    assert unspent(config.model_copy(update={"budget": config.budget.model_copy(update={"usd": None})}), 4.0) == ""


# ── Plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose only cycle cost five dollars: three of them on reinforcement learning, in thirty steps."""
    write_text(tmp_path / "config.toml", '[environment]\nname = "reasoning"\n')
    cycles = [{"cycle": 1, "usd": 5.0}]
    state = LoopState(stage=Stage.DONE, steps=steps_of(CURVE, 30, begin=1.0), cycles=cycles)
    write_json(tmp_path / "state.json", dataclasses.asdict(state))
    (tmp_path / "registry.sqlite").touch()
    return tmp_path


def test_a_plan_says_what_a_budget_buys(run: Path) -> None:
    plan = plan_budget(run, 4.0, anew=True)
    assert plan.usd_per_step == pytest.approx(0.1)
    assert plan.overhead_usd == pytest.approx(2.0)
    assert [(option.usd, option.steps) for option in plan.options] == [(1.0, 0), (2.0, 0), (4.0, 20), (8.0, 60)]
    whole = plan.options[2]
    gain = CURVE.reward(2.0) - CURVE.reward(0.0)
    assert whole.gain.low <= gain <= whole.gain.high
    assert whole.gain.value == pytest.approx(gain, abs=0.05)
    assert whole.must_bring_usd.value == pytest.approx(4.0 / whole.gain.value)
    assert whole.must_bring_usd.low == pytest.approx(4.0 / whole.gain.high), "the larger the gain, the less it must bring"
    assert math.isinf(plan.options[0].must_bring_usd.value)
    assert (whole.break_even_attempts, whole.roi, plan.recommended_usd, plan.unspent_usd) == (None, None, None, None)


def test_a_plan_goes_on_from_where_the_last_phase_ended(run: Path) -> None:
    anew, on = (plan_budget(run, 4.0, anew=anew).options[2] for anew in (True, False))
    assert on.gain.value == pytest.approx(CURVE.reward(5.0) - CURVE.reward(3.0), abs=0.03)
    assert on.gain.value < anew.gain.value
    assert on.reward.value > anew.reward.value


def test_with_a_worth_a_plan_advises_and_leaves_the_rest_unspent(run: Path) -> None:
    told = ["worth.usd_per_success=0.02", "worth.attempts=1000"]
    plan = plan_budget(run, 40.0, anew=True, overrides=told)
    whole = plan.options[2]
    assert whole.roi is not None
    assert whole.roi.value == pytest.approx((20 * whole.gain.value - 40.0) / 40.0)
    assert whole.break_even_attempts is not None
    assert whole.break_even_attempts.value == pytest.approx(40.0 / whole.gain.value / 0.02)
    assert plan.recommended_usd is not None
    assert plan.unspent_usd == pytest.approx(40.0 - plan.recommended_usd)
    assert 3.0 < plan.recommended_usd < 8.0, "up to there the curve rises by more than a twentieth a dollar"
    stricter = plan_budget(run, 40.0, anew=True, overrides=[*told, "budget.hurdle=1.0"]).recommended_usd
    assert stricter is not None
    assert stricter < plan.recommended_usd
    nothing = plan_budget(run, 40.0, overrides=["worth.usd_per_success=0.0001", "worth.attempts=10"])
    assert (nothing.recommended_usd, nothing.unspent_usd) == (0.0, 40.0)


def test_nothing_to_forecast_from_is_said(run: Path) -> None:
    state = LoopState(steps=steps_of(CURVE, 3))
    write_json(run / "state.json", dataclasses.asdict(state))
    with pytest.raises(InputError, match="none has 5 steps"):
        plan_budget(run, 1.0)
    state.steps = [{**step, "usd": None} for step in steps_of(CURVE, 30)]
    write_json(run / "state.json", dataclasses.asdict(state))
    with pytest.raises(InputError, match="no price"):
        plan_budget(run, 1.0)


def test_the_command_prints_the_plan_for_people_and_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ["plan", "--run", str(run), "--budget", "40", "--anew"]
    assert command(shown) == 0
    assert "Say what a success is worth" in capsys.readouterr().out
    shown += ["--set", "worth.usd_per_success=0.02", "--set", "worth.attempts=1000"]
    assert command(shown) == 0
    text = capsys.readouterr().out
    assert "a step costs $0.1000; a cycle costs $2.00 besides its steps" in text
    assert "Unspent: $3" in text
    assert command([*shown, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unspent_usd"] + found["recommended_usd"] == pytest.approx(40)
    assert found["options"][0]["must_bring_usd"]["value"] is None or found["options"][0]["steps"] > 0
