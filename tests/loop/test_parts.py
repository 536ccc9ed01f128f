"""The loop's own small parts: configuration on disk, the plan of groups, judging traffic, a worker's death."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.config import load_config
from evergrad.evals import GateConfig
from evergrad.loop._folder import LoopState, RunFolder, Stage, to_toml, write_json
from evergrad.loop._learning import _plan
from evergrad.loop._serving import judge_traffic
from evergrad.loop.config import RunConfig
from evergrad.loop.placement import LocalPlacement, WorkerDied
from evergrad.types import EvergradError, Outcome, Rollout

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
WORDS = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_categories=["Cc"]), max_size=8)
VALUES = st.one_of(st.integers(-9, 9), st.booleans(), st.floats(-1e9, 1e9), WORDS, st.lists(st.integers(0, 9), max_size=3))
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS, st.one_of(VALUES, inner, st.lists(inner, min_size=1, max_size=2)), max_size=3),
    max_leaves=12,
)


@given(TABLES)
def test_toml_reads_back_as_written(data: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(data)) == data


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_resolved_configuration_is_the_configuration(path: Path, tmp_path: Path) -> None:
    config = load_config(RunConfig, path)
    RunFolder(tmp_path / "run", config).close()
    assert load_config(RunConfig, tmp_path / "run" / "config.toml") == config


def test_a_folder_belongs_to_one_process_and_one_recipe(tmp_path: Path) -> None:
    config = load_config(RunConfig, EXAMPLES[0])
    first = RunFolder(tmp_path, config)
    with pytest.raises(EvergradError, match="another process"):
        RunFolder(tmp_path, config)
    first.close()
    with pytest.raises(EvergradError, match="seed changed"):
        RunFolder(tmp_path, config.model_copy(update={"seed": 9}))
    larger = config.budget.model_copy(update={"cycles": 7})
    RunFolder(tmp_path, config.model_copy(update={"budget": larger})).close()
    assert load_config(RunConfig, tmp_path / "config.toml").budget.cycles == 7


def test_state_survives_and_json_stays_strict(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, load_config(RunConfig, EXAMPLES[0]))
    state = LoopState(cycle=3, stage=Stage.MEASURE, deployed={"contract": "v2"}, steps=[{"loss": 0.5}])
    folder.save_state(state)
    assert folder.load_state(LoopState()) == state
    folder.close()
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5]}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_plan_of_groups_gives_each_contract_its_share_and_no_task_twice(share: float) -> None:
    known = [{"contract": "v1"}, {"contract": "v2"}]
    session: Any = SimpleNamespace(
        state=SimpleNamespace(cycle=3, known=known, deployed={"contract": "v3"}),
        recipe=SimpleNamespace(rl=SimpleNamespace(replay_share=share)),
        training_task=lambda settings, position: (settings["contract"], position),
    )
    planned = [_plan(session, number) for number in range(80)]
    counts = Counter(settings["contract"] for _, _, settings in planned)
    assert counts["v1"] + counts["v2"] == int(80 * share)
    assert abs(counts["v1"] - counts["v2"]) <= 1
    tasks = [task for _, task, _ in planned]
    assert len(set(tasks)) == 80
    for contract in counts:
        assert sorted(position for name, position in tasks if name == contract) == list(range(counts[contract]))


def rollouts(successes: int, failures: int, faults: int = 0) -> list[Rollout]:
    ends = (
        [(Outcome.SCORED, 1.0)] * successes + [(Outcome.SCORED, 0.0)] * failures + [(Outcome.ENVIRONMENT_FAULT, None)] * faults
    )
    return [Rollout(str(i), "g", "t", (), outcome, reward) for i, (outcome, reward) in enumerate(ends)]


def test_traffic_alarms_on_a_fall_and_not_on_chance_or_faults() -> None:
    assert judge_traffic(rollouts(23, 1), 0.97, False).trigger(0.01) is None
    assert judge_traffic(rollouts(24, 0, faults=40), 1.0, False).trigger(0.01) is None
    assert "fell to 3/24" in (judge_traffic(rollouts(3, 21), 0.95, False).trigger(0.01) or "")
    assert judge_traffic(rollouts(24, 0), 0.95, True).trigger(0.01) == "the tool contract changed"
    assert judge_traffic([], 0.95, False).trigger(0.01) is None
    report = judge_traffic(rollouts(20, 4), 0.95, False)
    assert report.p_value == pytest.approx(sum(_binomial(24, k, 1 - 3 / 24) for k in range(21)), rel=1e-9)


def _binomial(n: int, k: int, p: float) -> float:
    from math import comb

    return comb(n, k) * p**k * (1 - p) ** (n - k)


async def test_a_dying_worker_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "short_lived.py"
    script.write_text(
        "import json, sys, time\nprint('the ceiling fell', file=sys.stderr)\n"
        "print(json.dumps({'ready': True, 'port': 1}), flush=True)\ntime.sleep(600)\n"
    )
    os.environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    async with LocalPlacement(tmp_path / "logs") as placement:
        worker = await placement.start("victim", "short_lived", GateConfig())
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"victim died \(signal 9\): the ceiling fell"):
            await placement.watch()
        with pytest.raises(WorkerDied, match="No module named"):
            await placement.start("nobody", "no_such_module", GateConfig())
