"""The loop's own small parts: configuration on disk, the plan of groups, judging traffic, a worker's death."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.config import load_config
from evergrad.envs import Taskset
from evergrad.evals import GIVEN_UP, GateConfig
from evergrad.inference import EngineConfig, EngineUnavailable
from evergrad.ledger import Ledger, PhaseClock
from evergrad.loop import _evaluating
from evergrad.loop._checking import notice_changed_environments
from evergrad.loop._console import LoopConsole
from evergrad.loop._evaluating import _record_score
from evergrad.loop._folder import LoopState, RunFolder, Stage, read_state, to_toml, write_json
from evergrad.loop._learning import NONFINITE_STEPS, _plan, _require_finite
from evergrad.loop._measuring import _incumbent, _serves_already
from evergrad.loop._probe import require_equal
from evergrad.loop._reporting import _serving
from evergrad.loop._scores import keep_row, live_row, reward_interval, row_of, score_row, speaking_row
from evergrad.loop._serving import Serving
from evergrad.loop._session import Session
from evergrad.loop._watching import serve_traffic
from evergrad.loop.config import BudgetConfig, RunConfig, WorthConfig
from evergrad.loop.controller import _announcement, _finished
from evergrad.loop.offline import TrainConfig
from evergrad.loop.placement import LocalPlacement, WorkerDied, _local
from evergrad.registry import Registry, base_model
from evergrad.training import TrainerConfig
from evergrad.training.sinks import RunInfo, SinkFan
from evergrad.types import EvalReport, EvergradError, ModelVersion, Outcome, Rollout, Task, Usage, Verdict

LETTERS = Path(__file__).parents[2] / "examples" / "letters.py"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
WORDS = st.text(alphabet=st.characters(codec="utf-8"), max_size=8)
PLAIN = st.one_of(st.integers(-9, 9), st.booleans(), st.floats(-1e9, 1e9), WORDS)
VALUES = st.one_of(PLAIN, st.lists(st.one_of(PLAIN, st.dictionaries(WORDS, PLAIN, max_size=2)), max_size=3))
KEYS = st.one_of(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), WORDS)
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS, st.one_of(VALUES, inner, st.lists(inner, min_size=1, max_size=2)), max_size=3),
    max_leaves=12,
)


@given(TABLES)
def test_toml_reads_back_as_written(data: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(data)) == data


@pytest.mark.parametrize("name", ["letters@v1", "a.b", 'say "hi"', "\x7f", "größe", "", "line\nbreak"])
def test_a_run_goes_on_whatever_its_keys_are(tmp_path: Path, name: str) -> None:
    config = load_config(RunConfig, EXAMPLES[0])
    environment = config.environment.model_copy(update={"settings": {name: {name: name}}})
    odd = config.model_copy(update={"gate": config.gate.model_copy(update={"guards": {name: 0.1}}), "environment": environment})
    for _ in range(2):
        RunFolder(tmp_path, odd).close()
    assert load_config(RunConfig, tmp_path / "config.toml") == odd


def test_what_toml_cannot_hold_leaves_no_configuration_behind(tmp_path: Path) -> None:
    config = load_config(RunConfig, EXAMPLES[0]).model_copy(update={"name": "\udcff"})
    with pytest.raises(EvergradError, match="cannot be written as TOML"):
        RunFolder(tmp_path, config)
    assert not (tmp_path / "config.toml").exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"cycle": 1, "stage": "sleep"}', '{"cycle": 1, "stage": "learn", "x": 1}',
     '{"cycle": "one", "stage": "learn"}', '{"cycle": 1, "stage": "learn", "steps": 3}', "[" * 100_000],
)  # fmt: skip
def test_a_broken_state_is_named(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path, load_config(RunConfig, EXAMPLES[0]))
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(EvergradError, match=r"state cannot be read: .*state\.json.*Next: "):
        folder.load_state(LoopState())
    folder.close()


def test_a_state_of_another_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"cycle": 2, "stage": "watch", "of_tomorrow": 1}')
    with pytest.raises(EvergradError, match=r"another version .* knew 'of_tomorrow' .*Next: go on with the version that wrote"):
        read_state(path)


@pytest.mark.parametrize("text", ["name = ", "\x00", "a = " + "[" * 100_000])
def test_a_broken_resolved_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(EvergradError, match=r"not valid TOML.*config\.toml.*Next: "):
        RunFolder(tmp_path, load_config(RunConfig, EXAMPLES[0]))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_resolved_configuration_is_the_configuration(path: Path, tmp_path: Path) -> None:
    config = load_config(RunConfig, path)
    RunFolder(tmp_path / "run", config).close()
    assert load_config(RunConfig, tmp_path / "run" / "config.toml") == config


@pytest.mark.parametrize("path", sorted((EXAMPLES[0].parent / "train").glob("*.toml")), ids=lambda path: path.stem)
def test_resolved_training_is_the_training(path: Path, tmp_path: Path) -> None:
    """With every default written out: a rule against settings that nobody made must not mistake them for such."""
    config, resolved = load_config(TrainConfig, path), tmp_path / "config.toml"
    resolved.write_text(to_toml(config.model_dump(mode="json", exclude_none=True)))
    assert load_config(TrainConfig, resolved) == config


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


def older(config: RunConfig, path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The folder of a run whose resolved configuration another version wrote."""
    data = config.model_dump(mode="json", exclude_none=True)
    change(data)
    path.joinpath("config.toml").write_text(to_toml(data))
    return to_toml(data)


def test_a_key_that_an_earlier_version_did_not_know_is_no_change_at_its_default(tmp_path: Path) -> None:
    config = load_config(RunConfig, EXAMPLES[0])
    text = older(config, tmp_path, lambda data: (data["learn"]["rl"].pop("gae"), data["gate"].pop("series")))
    RunFolder(tmp_path, config).close()
    assert (tmp_path / "config.toml").read_text() == text, "certificates have its hash"
    larger = config.budget.model_copy(update={"cycles": 7})
    RunFolder(tmp_path, config.model_copy(update={"budget": larger})).close()
    assert load_config(RunConfig, tmp_path / "config.toml").budget.cycles == 7


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data["gate"].pop("series"), r"another version of Evergrad \(it does not know gate.series\)"),
        (lambda data: data["learn"]["rl"].update(spin=1), r"another version.*this one does not know learn\.rl\.spin"),
        (
            lambda data: (data["gate"].pop("series"), data.update(spin={"rate": 1})),
            r"it does not know gate\.series; this one does not know spin\).*use that version",
        ),
        (lambda data: (data["gate"].pop("series"), data.update(seed=77)), "another configuration: gate.series, seed changed"),
        (lambda data: data.pop("worth"), "another configuration: worth changed"),
        (lambda data: data["gate"].update(alpha=7), "another configuration: gate.alpha"),
    ],
    ids=["lacks", "unknown", "both", "seed", "unset before", "no value of today"],
)
def test_a_folder_of_another_version_is_told_from_one_of_another_recipe(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    config = load_config(RunConfig, EXAMPLES[0])
    gate = config.gate.model_copy(update={"series": "lord"})
    config = config.model_copy(update={"gate": gate, "worth": WorthConfig(usd_per_success=1.0, attempts=10)})
    before = older(config, tmp_path, change)
    with pytest.raises(EvergradError, match=told):
        RunFolder(tmp_path, config)
    assert (tmp_path / "config.toml").read_text() == before


def test_state_survives_and_json_stays_strict(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, load_config(RunConfig, EXAMPLES[0]))
    state = LoopState(cycle=3, stage=Stage.MEASURE, deployed={"contract": "v2"}, steps=[{"loss": 0.5}])
    folder.save_state(state)
    assert folder.load_state(LoopState()) == state
    folder.close()
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5]}


def test_an_environment_that_was_changed_between_sessions_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "letters.py"
    source = LETTERS.read_text()
    path.write_text(source)
    state, told = LoopState(deployed={"contract": "v1"}), []

    def session() -> Any:
        found: dict[str, Taskset] = {}

        def taskset(settings: dict[str, Any]) -> Taskset:
            return found.setdefault(repr(settings), Taskset(str(path), settings))

        return SimpleNamespace(
            state=state, taskset=taskset, suite=lambda settings: taskset(settings).suite, event=told.append
        )  # fmt: skip

    for _ in range(2):
        notice_changed_environments(session())
    assert told == []
    before = dict(state.environments)
    path.write_text(source + "\n# other rewards from here on\n")
    for _ in range(2):
        notice_changed_environments(session())
    (suite,) = before
    assert told == [
        f"the environment of {suite} has changed since this run began: {before[suite]} then, {state.environments[suite]} now"
    ]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_plan_of_groups_gives_each_contract_its_share_and_no_task_twice(share: float) -> None:
    known = [{"contract": "v1"}, {"contract": "v2"}]
    session: Any = SimpleNamespace(
        state=SimpleNamespace(cycle=3, deployed={"contract": "v3"}),
        known=known,
        recipe=SimpleNamespace(rl=SimpleNamespace(replay_share=share, traffic_share=0.25)),
        task_choice=None,
        training_task=lambda settings, position: (settings["contract"], position),
        live_tasks=list,
    )
    planned = [_plan(session, number) for number in range(80)]
    counts = Counter(plan.settings["contract"] for plan in planned)
    assert counts["v1"] + counts["v2"] == int(80 * share)
    assert abs(counts["v1"] - counts["v2"]) <= 1
    tasks: Any = [plan.task for plan in planned]
    assert len(set(tasks)) == 80
    for contract in counts:
        assert sorted(position for name, position in tasks if name == contract) == list(range(counts[contract]))


@pytest.mark.parametrize("count", [3, 100])
def test_live_tasks_come_once_a_cycle_and_push_no_other_task_aside(count: int) -> None:
    live = [SimpleNamespace(row=f"live {number}") for number in range(count)]
    session: Any = SimpleNamespace(
        state=SimpleNamespace(cycle=3, deployed={"contract": "v2"}),
        known=[{"contract": "v1"}],
        recipe=SimpleNamespace(rl=SimpleNamespace(replay_share=0.25, traffic_share=0.25)),
        task_choice=None,
        training_task=lambda settings, position: (settings["contract"], position),
        taskset=lambda settings: SimpleNamespace(task=lambda row: row),
        live_tasks=lambda: live,
    )
    planned = [_plan(session, number) for number in range(80)]
    drawn = [plan.task for plan in planned if plan.live is not None]
    assert drawn == [f"live {number}" for number in range(min(20, count))]
    others: Any = [plan.task for plan in planned if plan.live is None]
    known = [position for name, position in others if name == "v1"]
    assert len(known) == len(others) // 4
    assert [position for name, position in others if name == "v2"] == list(range(len(others) - len(known)))


def test_beside_live_tasks_a_choice_of_tasks_hears_of_the_groups_that_it_drew() -> None:
    """A group's number in its id is the one that its task was drawn by: what comes back is told under it."""
    session: Any = SimpleNamespace(
        state=SimpleNamespace(cycle=3, deployed={"contract": "v2"}),
        known=[],
        recipe=SimpleNamespace(rl=SimpleNamespace(replay_share=0.0, traffic_share=0.25)),
        task_choice=SimpleNamespace(task=lambda number: number),
        taskset=lambda settings: SimpleNamespace(task=lambda row: row),
        live_tasks=lambda: [SimpleNamespace(row="live")] * 3,
    )
    chosen = [plan for plan in (_plan(session, number) for number in range(20)) if plan.live is None]
    assert len(chosen) == 17
    assert [plan.group_id for plan in chosen] == [f"c3-g{plan.task}" for plan in chosen]


def rollouts(successes: int, failures: int, faults: int = 0) -> list[Rollout]:
    ends = (
        [(Outcome.SCORED, 1.0)] * successes + [(Outcome.SCORED, 0.0)] * failures + [(Outcome.ENVIRONMENT_FAULT, None)] * faults
    )
    return [Rollout(str(i), "g", "t", (), outcome, reward) for i, (outcome, reward) in enumerate(ends)]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_the_interval_of_a_steps_reward_says_something_or_is_absent(means: list[float]) -> None:
    """Of two or three groups it could be wider than the whole range of the rewards, here 0 to 1."""
    half = reward_interval(len(means), stdev(means) / len(means) ** 0.5)
    assert math.isnan(half) if len(means) <= 3 else half <= 1.0


def test_what_production_scores_now_is_of_the_deployed_suite() -> None:
    """An evaluation speaks before traffic, and another contract's or another version's figures say nothing."""
    state = LoopState()

    def add(version_id: str, suite: str, mean: float, **more: Any) -> None:
        state.scores.append({"version_id": version_id, "suite": suite, "mean": mean, "n": 8, **more})

    assert _serving(state, None, "s@v2") is None
    add("a", "s@v1", 0.9, suite_hash="x")
    add("b", "s@v2", 0.8, suite_hash="x")
    assert _serving(state, "a", "s@v2") is None
    add("a", "s@v2", 0.2)
    add("a", "s@v2", 0.1)
    assert _serving(state, "a", "s@v2") == {"version_id": "a", "suite": "s@v2", "score": 0.1, "n": 8, "live": True}
    add("a", "s@v2", 0.0, suite_hash="x")
    assert _serving(state, "a", "s@v2") == {"version_id": "a", "suite": "s@v2", "score": 0.0, "n": 8, "live": False}


async def test_a_dying_worker_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "short_lived.py"
    script.write_text(
        "import json, sys, time\nprint('the ceiling fell', file=sys.stderr)\n"
        "print(json.dumps({'ready': True, 'port': 1}), flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    async with LocalPlacement(tmp_path / "logs") as placement:
        worker = await placement.start("victim", "short_lived", GateConfig())
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"victim died \(signal 9\): the ceiling fell"):
            await placement.watch()
        with pytest.raises(WorkerDied, match="No module named"):
            await placement.start("nobody", "no_such_module", GateConfig())


SLOW_START = """
import json, sys, time
work, rest = float(sys.argv[-2]), float(sys.argv[-1])
while time.process_time() < work:
    pass
time.sleep(rest)
print(json.dumps({"port": 1}), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("work", "rest", "limit", "told"),
    [
        (5, 0, 600, None),
        (0, 600, 600, r"not ready after \d+ s, and computed nothing in the last 3 s of them \(.*victim.log\)"),
        (600, 0, 1, r"not ready after 1 s, of which it computed \d+ s \(.*victim.log\)"),
    ],
    ids=["slow", "idle", "endless"],
)
async def test_a_worker_may_start_slowly_while_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: float, rest: float, limit: float, told: str | None
) -> None:
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(_local, "IDLE_START_S", 3)
    monkeypatch.setattr(_local, "START_LIMIT_S", limit)
    async with LocalPlacement(tmp_path / "logs") as placement:
        start = placement.start("victim", "slow_start", GateConfig(), [str(work), str(rest)])
        if told is None:
            assert (await start).process.returncode is None
            return
        with pytest.raises(EvergradError, match=rf"victim was {told}. Next: the same command goes on from there"):
            await start


ANSWERS = """
import http.server, json, sys
answers = {"failing": {"status": "failing", "reason": "one thing for ever"}, "loading": {"status": "loading", "reason": None}}
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.end_headers()
        self.wfile.write(json.dumps(answers[sys.argv[-1]]).encode())
server = http.server.HTTPServer(("127.0.0.1", 0), Health)
print(json.dumps({"port": server.server_port}), flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(
    ("health", "stopped", "told"),
    [
        ("failing", False, r"stuck for 3 s: one thing for ever"),
        ("loading", True, r"stuck for 3 s: /health does not answer \((Read|Connect)Timeout\)"),
    ],
)
async def test_a_worker_that_lives_but_is_stuck_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: str, stopped: bool, told: str
) -> None:
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    async with LocalPlacement(tmp_path / "logs", stuck_after_s=3) as placement:
        well = await placement.start("well", "answers", GateConfig(), ["loading"])
        worker = await placement.start("victim", "answers", GateConfig(), [health])
        if stopped:
            os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=rf"victim died \({told}\)"):
            await placement.watch()
        assert well.process.returncode is None


@pytest.mark.parametrize("kind", ["inference", "training"])
async def test_a_real_worker_is_well_until_it_stops_answering(tmp_path: Path, kind: str) -> None:
    config = (EngineConfig if kind == "inference" else TrainerConfig)(model=str(base_model("tiny")), threads=1)
    async with LocalPlacement(tmp_path / "logs", stuck_after_s=3) as placement:
        worker = await placement.start(kind, f"evergrad.{kind}", config)
        deaths = asyncio.create_task(placement.watch())
        await asyncio.sleep(6)
        assert not deaths.done()
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=rf"{kind} died \(stuck for 3 s: /health does not answer"):
            await asyncio.wait_for(deaths, 60)


WRITES_AND_WAITS = (
    "import json, os, sys, time\nsys.stderr.write(os.environ['SAYS'])\nsys.stderr.flush()\n"
    "print(json.dumps({'ready': True, 'port': 1}), flush=True)\ntime.sleep(600)\n"
)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("", "it said nothing"),
        ("out of memory\n", "out of memory"),
        ("Loading weights:  50%|###   | 1/2\rLoading weights: 100%|######| 2/2\nout of memory\n", "out of memory"),
        ("one\n\ntwo\nthree\nfour\n", "two | three | four"),
    ],
)
async def test_a_death_is_told_in_the_words_of_that_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, told: str
) -> None:
    (tmp_path / "writes_and_waits.py").write_text(WRITES_AND_WAITS)
    (tmp_path / "victim.log").write_text("what an earlier process said\n" * 5)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SAYS", says)
    async with LocalPlacement(tmp_path) as placement:
        worker = await placement.start("victim", "writes_and_waits", GateConfig())
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"\(signal 9\): {re.escape(told)} \("):
            await placement.watch()


def measured(version_id: str, suite: str, score: float, n: int = 4) -> dict[str, Any]:
    report = EvalReport(version_id, suite, {f"t{i}": score for i in range(n)}, "hash")
    tries = [Rollout(f"r{i}", "g", f"t{i}", (), Outcome.SCORED, score, usage=Usage(completion_tokens=1 + i)) for i in range(n)]
    return score_row(report, tries, 1.0, 2.0)


def version(version_id: str, **metadata: Any) -> ModelVersion:
    return ModelVersion(version_id, None, 1, f"versions/{version_id}", "tiny", "recipe", "2026-01-01T00:00:00Z", metadata)


def test_a_version_is_judged_by_what_it_serves_not_by_its_guards() -> None:
    state = LoopState()
    for row in (measured("new", "desk@v2", 1.0), measured("new", "desk@v1", 0.0), measured("old", "desk@v1", 0.5)):
        keep_row(state, row)
    keep_row(state, live_row(2, 0, "desk@v2", "new", rollouts(1, 3)))
    assert (speaking_row(state, version("new", suite="desk@v2"), "desk@v2") or {})["mean"] == 1.0
    # The world has changed and nothing was measured there yet: what the version was made for still speaks.
    assert (speaking_row(state, version("new", suite="desk@v2"), "desk@v3") or {})["mean"] == 1.0
    assert speaking_row(state, version("never", suite="desk@v2"), "desk@v2") is None


def test_a_row_that_is_made_again_takes_the_place_of_the_first() -> None:
    state = LoopState()
    for row in (measured("a", "desk", 0.25), measured("b", "desk", 0.5), measured("a", "desk", 1.0)):
        keep_row(state, row)
    assert [(row["version_id"], row["mean"]) for row in state.scores] == [("a", 1.0), ("b", 0.5)]


def test_graded_scores_are_no_successes_and_prices_belong_to_tasks() -> None:
    row = measured("a", "desk", 0.5)
    assert (row["mean"], row["success_rate"], row["ci95"], row["usd_per_success"]) == (0.5, 0.0, None, None)
    assert dict(zip(row["task_ids"], row["task_usd"], strict=True)) == pytest.approx(
        {"t0": 0.1, "t1": 0.2, "t2": 0.3, "t3": 0.4}
    )
    low, high = measured("a", "desk", 1.0)["ci95"]
    assert low < 1.0
    assert high == 1.0
    live = live_row(1, 1, "desk", "a", [*rollouts(1, 0), *rollouts(0, 1), *rollouts(0, 0, faults=3)])
    assert (live["label"], live["mean"], live["n"]) == ("live, cycle 1, check 2", 0.5, 2)
    assert row_of(LoopState(scores=[live]), "a", "desk") is None


@pytest.mark.parametrize(
    ("saved", "serves", "beaten"),
    [
        (None, "old", "old"),
        ("old", "old", "old"),
        ("old", "candidate", "old"),  # killed between the promotion and the end of the stage
        ("old", "other", "other"),  # somebody moved the alias meanwhile
    ],
)
def test_the_incumbent_is_what_serves_or_what_the_candidate_replaced(saved: str | None, serves: str, beaten: str) -> None:
    saves: list[str | None] = []
    state = LoopState(incumbent=saved)
    session: Any = SimpleNamespace(
        state=state,
        registry=SimpleNamespace(resolve=lambda alias: serves, get=version),
        save_state=lambda: saves.append(state.incumbent),
    )
    assert _incumbent(session, version("candidate")).version_id == beaten
    assert saves == ([] if saved == beaten else [beaten])


@pytest.mark.parametrize("aliases", [[], ["production"]])
def test_the_summary_has_dollars_and_says_what_to_do_next(aliases: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cycle = {"cycle": 1, "suite": "desk", "score_before": 0.5, "score_after": 1.0, "ci95": None, "n": 4, "verdict": "promoted"}
    report = {
        "name": "t",
        "cycles": [{**cycle, "usd": 0.0123, "other_suites": {}}],
        "cost": {"by_phase": {"eval": 0.0123, "idle": None}, "total_usd": 1.5},
        "usd_per_million_tokens": 0.124,
        "usd_per_success": None,
        "intelligence_per_dollar": {"value": None, "ci95": None},
        "wall_s": 60.0,
        "versions": [{"aliases": aliases}],
    }
    run = f"runs/{'t' * 150}"
    LoopConsole().summary(report, Path(run))
    told = capsys.readouterr().out
    for words in ("$0.0123", "$1.50", "$0.1240 per million tokens", "– per success"):
        assert words in told
    assert (f"evergrad serve --run {run}\n" in told) == bool(aliases), "a command that is broken over lines is none"


@pytest.mark.parametrize(
    ("slices", "told"), [({}, ": 1.000 (n = 4, 2 s)"), ({f"t{i}": "easy" for i in range(4)}, ": 1.000 (easy 1.00, n = 4, 2 s)")]
)
def test_slices_without_a_name_are_left_out(slices: dict[str, str], told: str) -> None:
    events: list[str] = []
    session: Any = SimpleNamespace(state=LoopState(), event=events.append, save_state=lambda: None)
    report = EvalReport("a", "desk", {f"t{i}": 1.0 for i in range(4)}, "hash", slices=slices)
    _record_score(session, score_row(report, [], None, 2.0))
    assert events[0].endswith(told)
    assert "" not in session.state.scores[0]["slices"]


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        (Stage.WARM_START, "warm start: 24 demonstrations in 6 steps"),
        (Stage.LEARN, "RL: up to 3 steps of 4 × 5 rollouts"),
        (Stage.MEASURE, ""),
        (Stage.WATCH, "live traffic: 7 requests a check"),
    ],
)
def test_each_stage_says_what_it_will_do(stage: Stage, told: str) -> None:
    learn = {"warm_start": {"demonstrations": 16, "replay": 8, "batch_size": 8, "epochs": 2}}
    learn |= {"rl": {"steps": 3, "groups_per_step": 4, "group_size": 5}}
    config = RunConfig.model_validate({"environment": {"name": "reasoning"}, "learn": learn, "watch": {"requests": 7}})
    session: Any = SimpleNamespace(config=config, recipe=config.learn, state=LoopState(stage=stage, known=[{}]), known=[{}])
    assert _announcement(session) == told


HAND = {"by_hand": True}


@pytest.mark.parametrize(
    ("known", "moves", "told"),
    [
        (None, [("t-c1-sft", {})], None),
        ("t-c1-sft", [("t-c1-sft", {}), ("t-c1-rl", {})], None),  # killed between the promotion and the end of the stage
        ("t-c1-sft", [("t-c1-sft", {}), ("t-c1-rl", HAND)], "t-c1-sft → t-c1-rl (promote: why)"),
        ("t-c1-sft", [("t-c1-sft", {}), ("other", {})], "t-c1-sft → other (promote: why)"),
        ("t-c1-rl", [("t-c1-sft", {}), ("t-c1-rl", {}), None], "t-c1-rl → t-c1-sft (rollback: rude)"),
    ],
)
async def test_a_move_by_hand_is_told_once(
    tmp_path: Path, known: str | None, moves: list[tuple[str, dict[str, Any]] | None], told: str | None
) -> None:
    events: list[str] = []
    with Registry(tmp_path / "registry.sqlite") as registry:
        for name in ("t-c1-sft", "t-c1-rl", "other"):
            registry.register(version(name))
        for move in moves:
            if move is None:
                registry.rollback("production", "rude")
            else:
                ruling = Verdict(True, ("why",), move[1], move[0], registry.resolve("production"))
                registry.promote("production", move[0], ruling)

        async def follow() -> ModelVersion:
            return registry.find("production")

        session: Any = SimpleNamespace(
            serving=SimpleNamespace(follow=follow),
            state=LoopState(serving=known),
            registry=registry,
            version_id=lambda note: f"t-c1-{note}",
            event=events.append,
        )
        for _ in range(2):
            await Session.follow(session)
    assert events == ([f"production was moved by hand: {told}"] if told else [])


@pytest.mark.parametrize(
    ("candidate", "serves", "incumbent", "nothing_to_measure"),
    [
        ("t-c1-sft", "t-c1-sft", None, True),
        ("t-c1-sft", "other", None, False),
        ("t-c1-sft", "t-c1-sft", "other", False),  # promoted by this very stage, and killed before it ended
        ("t-c1-rl", "t-c1-rl", "t-c1-sft", False),
    ],
)
def test_a_cycle_without_rl_steps_measures_nothing_twice(
    candidate: str, serves: str, incumbent: str | None, nothing_to_measure: bool
) -> None:
    session: Any = SimpleNamespace(
        version_id=lambda note: f"t-c1-{note}",
        registry=SimpleNamespace(resolve=lambda alias: serves),
        state=LoopState(incumbent=incumbent),
    )
    assert _serves_already(session, version(candidate)) is nothing_to_measure


def test_steps_without_a_finite_gradient_are_told_and_then_end_the_run() -> None:
    told: list[str] = []
    state = LoopState(stage=Stage.LEARN)
    session: Any = SimpleNamespace(state=state, event=told.append)
    for skipped in (0.0, 1.0, 1.0, 0.0, 1.0, *[1.0] * (NONFINITE_STEPS - 2)):
        state.steps.append({"skipped_nonfinite": skipped, "updated": 1.0 - skipped})
        _require_finite(session)
    assert len(told) == 2, "one for each time that it begins"
    state.steps.append({"skipped_nonfinite": 2.0, "updated": 0.0})
    with pytest.raises(EvergradError, match="3 steps in a row"):
        _require_finite(session)


@pytest.mark.parametrize(
    ("step", "who"),
    [
        ({"skipped_nonfinite": 1.0, "updated": 7.0}, "an update was"),
        ({"skipped_nonfinite": 0.0, "updated": 1.0, "critic_skipped": 1.0}, "of the critic"),
        ({"skipped_nonfinite": 0.0, "updated": 0.0}, None),  # no sample had an advantage
    ],
)
def test_steps_that_learned_something_do_not_end_the_run(step: dict[str, float], who: str | None) -> None:
    told: list[str] = []
    session: Any = SimpleNamespace(state=LoopState(stage=Stage.LEARN), event=told.append)
    for _ in range(2 * NONFINITE_STEPS):
        session.state.steps.append(step)
        _require_finite(session)
    assert len(told) == (who is not None)
    assert who is None or who in told[0]


def test_a_probe_must_agree_and_be_a_number() -> None:
    require_equal([-1.0, -2.0], [-1.0004, -2.0], "update 3")
    for found in ([-1.0, -2.002], [float("nan"), -2.0]):
        with pytest.raises(EvergradError, match="update 3: the engine's log-probabilities differ"):
            require_equal([-1.0, -2.0], found, "update 3")


class _Engine:
    """Loads whatever it is told to; scores probes as ``logprobs_of`` says."""

    base_url = "http://nowhere"

    def __init__(self, logprobs_of: dict[str, list[float]]) -> None:
        self.logprobs_of, self.serves = logprobs_of, ""

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: list[str], system_prompt: str
    ) -> dict[str, Any]:
        assert served_names[0] == "production"
        self.serves = served_names[1]
        return {}

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        return self.logprobs_of[self.serves]


async def test_a_version_that_is_not_what_was_trained_leaves_the_old_one_serving(tmp_path: Path) -> None:
    probe = {"token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0]}
    with Registry(tmp_path / "registry.sqlite") as registry:
        for name in ("old", "damaged"):
            registry.register(version(name, probe=probe))
        registry.promote("production", "old", bootstrap=True)
        placement: Any = None
        config: Any = None
        serving = Serving(placement, config, registry, tmp_path, lambda told: None)
        engine: Any = _Engine({"old": [-1.0, -2.0], "damaged": [-1.0, -9.0]})
        serving._client = engine
        await serving.follow()
        registry.promote("production", "damaged", Verdict(True, ("better",), {}, "damaged", "old"))
        with pytest.raises(EvergradError, match="serving damaged"):
            await serving.follow()
        assert engine.serves == "old"
        assert serving.version is not None
        assert serving.version.version_id == "old"


class _Measuring:
    """As much of a session as a report needs; ``saved`` is what a crash would leave of the scores."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.config = load_config(RunConfig, next(path for path in EXAMPLES if path.stem == "demo_short"))
        self.folder, self.state, self.engine = SimpleNamespace(path=folder), LoopState(), None
        self.clock = SimpleNamespace(phase=lambda name: nullcontext())
        self.console = SimpleNamespace(stage=lambda *_: nullcontext(), advance=lambda note: None, note=lambda text: None)
        self.tasks = Taskset(self.config.environment.name, settings)
        self.saved: list[dict[str, Any]] = []
        self.measurements = 0

    def suite(self, settings: Any) -> str:
        return "letters@v1"

    def taskset(self, settings: Any) -> Taskset:
        return self.tasks

    def require_holder(self, client: Any, version: ModelVersion) -> None:
        self.measurements += 1

    def renderer_for(self, version: ModelVersion) -> None: ...

    def spent_usd(self) -> float:
        return 1.0

    def event(self, text: str) -> None: ...

    def record_rollouts(self, name: str, rollouts: Any) -> None: ...

    def save_state(self) -> None:
        self.saved = json.loads(json.dumps(self.state.scores))


async def _succeed(task: Task, *_: Any, rollout_id: str, group_id: str, audit: bool) -> Rollout:
    return Rollout(rollout_id, group_id, task.task_id, (), Outcome.SCORED, 1.0, usage=Usage(completion_tokens=1))


async def test_a_crash_around_a_report_loses_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES[0].parents[1])
    monkeypatch.setattr(_evaluating, "greedy_rollout", _succeed)
    session: Any = _Measuring(tmp_path, {})

    def killed(path: Path, data: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as crash:
        crash.setattr(_evaluating, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            await _evaluating.report_for(session, version("a"), {}, session.engine)
    session.state.scores = session.saved
    report = await _evaluating.report_for(session, version("a"), {}, session.engine)
    assert [(row["version_id"], row["mean"], row["n"]) for row in session.saved] == [("a", 1.0, 96)]
    assert (report.mean, session.measurements) == (1.0, 2)
    # The file is there, hence so is the row: whoever is killed after it measures nothing again.
    assert await _evaluating.report_for(session, version("a"), {}, session.engine) == report
    assert session.measurements == 2


@pytest.mark.parametrize("answered", [0, 40])
async def test_what_a_dying_engine_left_unanswered_makes_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """Requests fail a moment before the death is seen; with an engine that lives, the same faults are findings."""
    left = answered

    async def answer_some(task: Task, *_: Any, rollout_id: str, group_id: str, **more: Any) -> Rollout:
        nonlocal left
        left -= 1
        if left >= 0:
            return await _succeed(task, rollout_id=rollout_id, group_id=group_id, audit=False)
        return Rollout(rollout_id, group_id, task.task_id, (), Outcome.ENVIRONMENT_FAULT, None, fault="engine: refused")

    async def refuses() -> dict[str, Any]:
        raise EngineUnavailable("connection refused")

    async def is_well() -> dict[str, Any]:
        return {"status": "ok"}

    async def dies() -> None:
        await asyncio.sleep(0.1)
        raise WorkerDied("engine died (signal 9)")

    monkeypatch.chdir(EXAMPLES[0].parents[1])
    monkeypatch.setattr(_evaluating, "greedy_rollout", answer_some)
    session: Any = _Measuring(tmp_path, {})
    session.serving, session.placement = SimpleNamespace(version=None), SimpleNamespace(watch=dies)
    session.engine = SimpleNamespace(health=refuses)
    with pytest.raises(WorkerDied, match="signal 9"):
        await _evaluating.report_for(session, version("a"), {}, session.engine)
    assert os.listdir(tmp_path) == []
    assert session.saved == []
    left, session.engine = 40, SimpleNamespace(health=is_well)
    report = await _evaluating.report_for(session, version("a"), {}, session.engine)
    assert (len(report.scores), len(report.missing)) == (40, 56)


async def test_a_report_of_another_verifier_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES[0].parents[1])
    monkeypatch.setattr(_evaluating, "greedy_rollout", _succeed)
    session: Any = _Measuring(tmp_path, {})
    before = await _evaluating.report_for(session, version("a"), {}, session.engine)
    monkeypatch.setattr(Taskset, "fingerprint", "the source has changed")
    after = await _evaluating.report_for(session, version("a"), {}, session.engine)
    assert (before.scores, session.measurements) == (after.scores, 2)
    assert before.suite_hash != after.suite_hash
    assert [row["suite_hash"] for row in session.saved] == [after.suite_hash]


async def test_a_report_that_was_given_up_speaks_for_the_candidate_and_for_no_incumbent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(task: Task, *_: Any, rollout_id: str, group_id: str, **more: Any) -> Rollout:
        return Rollout(rollout_id, group_id, task.task_id, (), Outcome.SCORED, 0.0, usage=Usage(completion_tokens=1))

    monkeypatch.chdir(EXAMPLES[0].parents[1])
    monkeypatch.setattr(_evaluating, "greedy_rollout", _succeed)
    session: Any = _Measuring(tmp_path, {})
    rival = await _evaluating.report_for(session, version("a"), {}, session.engine)
    monkeypatch.setattr(_evaluating, "greedy_rollout", fail)
    candidate = await _evaluating.report_for(session, version("b"), {}, session.engine, rival=rival)
    assert candidate.outcomes[GIVEN_UP] == len(candidate.scores) < 20 < len(rival.scores)
    assert await _evaluating.report_for(session, version("b"), {}, session.engine, rival=rival) == candidate
    assert session.measurements == 2
    whole = await _evaluating.report_for(session, version("b"), {}, session.engine)
    assert (len(whole.scores), session.measurements) == (len(rival.scores), 3), "promoted by hand, it is an incumbent like any"


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"cycles": 1}, "all cycles are done"),
        ({"cycles": 5, "minutes": 1.5}, "1.5 minutes is spent"),
        ({"cycles": 5, "usd": 1e-6}, "\\$1e-06 is spent"),
        ({"cycles": 5, "minutes": 2.5, "usd": 1.0}, None),
    ],
)
def test_a_finished_run_opens_again_only_with_budget_left(tmp_path: Path, budget: dict[str, Any], reason: str | None) -> None:
    config = load_config(RunConfig, EXAMPLES[0]).model_copy(update={"budget": BudgetConfig(**budget)})
    folder = RunFolder(tmp_path, config)
    done = LoopState(stage=Stage.DONE, wall_s=120.0, watch_checks=3)
    folder.save_state(done)
    ticks = iter((0, 10**12))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        clock = PhaseClock(ledger, subject="cycle-1", cores=2, heartbeat_s=None, now_ns=lambda: next(ticks))
        clock.start()
        clock.stop()
    finished = _finished(config, folder)
    state = folder.load_state(LoopState())
    folder.close()
    if reason is None:
        assert finished is None
        assert (state.stage, state.cycle) == (Stage.DECIDE, 2)
    else:
        assert re.search(reason, finished or "")
        assert state == done


def test_a_budget_that_nobody_can_count_ends_the_run() -> None:
    assert "no price" in (BudgetConfig(usd=1).spent(None, 0.0) or "")
    assert BudgetConfig(usd=1).spent(0.5, 1e9) is None
    assert BudgetConfig().spent(None, 1e9) is None


async def test_each_check_of_each_cycle_draws_tasks_of_its_own() -> None:
    drawn: list[tuple[str, ...]] = []
    letters = Taskset(str(LETTERS))

    def tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
        drawn.append(tuple(task.task_id for task in letters.tasks(split, count, seed)))
        return ()

    session: Any = SimpleNamespace(
        config=SimpleNamespace(seed=3),
        state=SimpleNamespace(cycle=1),
        engine=object(),
        renderer_for=lambda served: None,
        serving=SimpleNamespace(client=None, version=version("v")),
        clock=SimpleNamespace(phase=lambda name: nullcontext()),
        console=SimpleNamespace(stage=lambda *_: nullcontext()),
        suite=lambda settings: "letters@v1",
        taskset=lambda settings: SimpleNamespace(tasks=tasks),
        record_rollouts=lambda name, rollouts: None,
    )
    for cycle, check in ((1, 0), (1, 1), (2, 0), (2, 0)):
        session.state.cycle = cycle
        await serve_traffic(session, {}, 12, check=check)
    assert len(set(drawn)) == 3
    assert drawn[2] == drawn[3], "a check that is made again after a crash is the same check"
    assert len({task for once in drawn for task in once}) >= 34


def test_figures_of_the_loop_go_to_its_sinks_under_the_kind_of_the_step(tmp_path: Path) -> None:
    from evergrad.loop._session import Session

    config = load_config(RunConfig, EXAMPLES[0], ['sinks=[{name="jsonl",options={file="live.jsonl"}}]'])
    session: Any = SimpleNamespace(
        state=LoopState(step=1),
        folder=SimpleNamespace(append_metrics=lambda record: None),
        wall_s=lambda: 1.0,
        spent_usd=lambda: None,
        _sinks=SinkFan([sink.build() for sink in config.sinks], RunInfo("r", tmp_path, {}), print),
    )
    Session.record_step(session, "sft", {"loss": 0.5})
    session._sinks.close(done=True)
    line = json.loads((tmp_path / "live.jsonl").read_text())
    assert (line["step"], line["sft/loss"]) == (1, 0.5)
    assert "sft/usd" not in line
