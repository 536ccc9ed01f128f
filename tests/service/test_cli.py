"""The command line: what it prints for a run folder, and one clear line with a code for everything that goes wrong."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from evergrad.config import load_config
from evergrad.ledger import Ledger, PhaseClock, Price, PriceBook
from evergrad.loop.certificate import key_path, sign, signing_key
from evergrad.loop.config import RunConfig
from evergrad.registry import Registry
from evergrad.service._edge import explain, guarded
from evergrad.service._models import _user
from evergrad.service.cli import ONCE, command
from evergrad.types import EvergradError, InputError, ReleaseState, Verdict
from tests.service.conftest import make_version

Cli = Callable[..., "Result"]


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def error(self) -> str:
        """The one line on standard error; nothing else may stand there."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = command(list(arguments))
        return Result(code, *capsys.readouterr())

    return call


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["model", "pormote"], "did you mean 'promote'?"),
        (["run", "x.toml", "--sett", "a=1"], "did you mean '--set'?"),
        (["serve", "--prot", "1"], "did you mean '--port'?"),
        (["serve", "--port", "eighty"], "--port"),
        (["serve", "--port", "99999"], "--port"),
        (["run"], "'CONFIG'"),
        (["rollouts", "show", "-n"], "-n"),
        (["model", "list", "--run", "runs/dmeo"], "did you mean 'runs/demo'?"),
        (["rollouts", "show", "--outcome", "scord"], "did you mean 'scored'?"),
        (["rollouts", "show", "--source", "trian"], "did you mean 'train'?"),
        (["rollouts", "show", "r-44"], "did you mean 'r-4'?"),
        (["serve", "--alias", "prodcution"], "aliases there: production"),
        (["eval", "--split", "gates"], "did you mean 'gate'?"),
        (["env", "test", "suport_desk"], "did you mean 'support_desk'?"),
        (["env", "test", "nowhere.py"], "nowhere.py"),
    ],
)
def test_bad_input_is_one_line_that_names_what_exists(cli: Cli, run: Path, arguments: list[str], names: str) -> None:
    result = cli(*arguments)
    assert names in result.error()
    assert "Next: " in result.err
    assert result.out == ""
    assert result.code == 2


CHANGE = '[[traffic.changes]]\nsettings = { contract = "v2" }\n'
GOOD = 'name = "x"\nmodel = "tiny"\n\n[environment]\nname = "support_desk"\n'


@pytest.mark.parametrize(
    ("text", "words", "names"),
    [
        (GOOD.replace("model", "modle"), [], "unknown key 'modle': did you mean 'model'?"),
        (GOOD + "[learn.rl]\nstep = 3\n", [], "unknown key 'learn.rl.step': did you mean 'steps'?"),
        (GOOD + "[learn.rl\n", [], "not valid TOML"),
        (GOOD, ["--set", "learn.rl.grup_size=4"], "did you mean 'group_size'?"),
        (GOOD, ["--set", "learn.rl.advantage=group_maen"], "did you mean 'group_mean'?"),
        (GOOD, ["--set", "learn.rl.loss.name=policy_gradeint"], "did you mean 'policy_gradient'?"),
        (GOOD, ["--set", "learn.rl.steps"], "is not key=value"),
        (GOOD, ["--set", "learn.rl.steps=many"], "learn.rl.steps"),
        (GOOD, ["--set", "budget.usd=0"], "budget.usd"),
        (GOOD + "[[arms]]\nname = 'a'\nmerge = 0.5\n", [], "arms.0.merge: 0.5 stands where keys belong: shares"),
        (GOOD + "[[arms]]\nname = 'a'\nmerge = {}\n", [], "arms.0.merge.shares is missing"),
        (GOOD, ["--set", "engine.quantization=int4"], "engine.quantization: Input should be 'int8', not 'int4'"),
        (GOOD, ["--set", "budget.usd=inf"], "budget.usd: inf is not a finite number"),
        (GOOD, ["--set", "gate.guards.x=nan"], "gate.guards.x: nan is not a finite number"),
        (GOOD, ["--set", "environment.settings.x=-inf"], "environment.settings.x: -inf is not a finite number"),
        (GOOD, ["--set", "seed=true"], "seed: true is not a number"),
        (GOOD, ["--set", "learn.rl.steps=true"], "true is not a number"),
        (GOOD + CHANGE, ["--set", "traffic.changes.5.settings=1"], "no entry '5'"),
        (GOOD + CHANGE, ["--set", "traffic.changes.x=1"], "no entry 'x'"),
        (GOOD + CHANGE, ["--set", "traffic.changes.x.y=1"], "no entry 'x'"),
        (GOOD + CHANGE, ["--set", "traffic.changes.-1=1"], "no entry '-1'"),
        (GOOD + CHANGE, ["--set", "traffic.changes.²=1"], "no entry '²'"),
        (GOOD, ["--set", "environment.settings" + ".a" * 40 + "=1"], "nested more than 32 levels"),
        (GOOD, ["--set", "seed=" + "[" * 5000], "nested more than 32 levels"),
        (GOOD + "x = " + "[" * 5000, [], "nested more than 32 levels"),
        (GOOD + "x = " + "9" * 5000, [], "not valid TOML"),
        (GOOD, ["--set", "budget.cycles=0"], "budget.cycles"),
        (GOOD, ["--set", "learn.rl.group_size=1"], "group_size"),
        (GOOD, ["--set", "environment.name=suport_desk"], "did you mean 'support_desk'?"),
        (GOOD, ["--set", "environment.name=broken.py"], "environment raised at import: ZeroDivisionError"),
        (GOOD, ["--set", "environment.settings.dificulty=easy"], "did you mean 'difficulty'?"),
        (GOOD, ["--set", 'traffic.changes=[{after_cycle=1,settings={contract="v9"}}]'], "has no contract 'v9'"),
        (GOOD, ["--set", "learn.warm_start.settings.dificulty=easy"], "did you mean 'difficulty'?"),
        (GOOD, ["--set", "model=tinny"], "did you mean 'tiny'?"),
        (GOOD, ["--set", "model=./empty"], "empty"),
        (None, [], "configuration file not found"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, words: list[str], names: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.py").write_text("1 / 0\n")
    if text is not None:
        (tmp_path / "my.toml").write_text(text)
    result = cli("run", "my.toml", *words)
    assert names in result.error()
    assert result.code == 2
    assert not (tmp_path / "runs").exists()


def test_once_is_the_first_cycle_of_the_same_configuration() -> None:
    config = load_config(RunConfig, Path(__file__).parents[2] / "examples" / "demo.toml", ONCE)
    assert config.budget.cycles == 1
    assert config.watch.requests == 0
    assert config.traffic.changes == []


def test_no_run_yet_says_how_to_start_one(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("cost")
    assert "no run yet" in result.error()
    assert "evergrad run CONFIG.toml" in result.err
    assert result.code == 2


def test_a_folder_that_is_no_run_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    assert cli("model", "list", "--run", str(tmp_path)).code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_version_is_named(cli: Cli, run: Path) -> None:
    result = cli("model", "show", "demo-c1-lr")
    assert "did you mean 'demo-c1-rl'?" in result.error()
    assert result.code != 0


@pytest.mark.parametrize("place", [["--debug", "model", "list"], ["model", "list", "--debug"]])
def test_traceback_only_with_debug(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Traceback" in cli(*place).err
    assert "Traceback" not in cli(*(word for word in place if word != "--debug")).err


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (InputError("a\nb", where="c", hint="d"), "a b (c). Next: d", 2),
        (EvergradError("it broke"), "it broke", 1),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [EvergradError("the engine died")])]), "the engine died", 1),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            "No space left on device (runs/x). Next: free some space",
            1,
        ),
        (KeyboardInterrupt(), "interrupted", 130),
        (KeyError("reward"), "KeyError: 'reward'. Next: run it again with --debug", 1),
        (EvergradError("a model said \x1b[2J"), "a model said \\x1b[2J", 1),
    ],
)
def test_every_failure_is_one_line_and_a_code(error: BaseException, line: str, code: int) -> None:
    told = explain(error)
    assert told[0].startswith(line)
    assert "\n" not in told[0]
    assert told[1] == code


def test_a_reader_that_has_seen_enough_is_no_error(run: Path) -> None:
    shell = f"set -o pipefail; {sys.executable} -m evergrad.service.cli rollouts show -n 6 | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert "r-0" in done.stdout


@pytest.mark.parametrize("arguments", [["run", "x.toml"], ["model", "list"], ["cost"]])
def test_ctrl_c_is_said(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for target in ("evergrad.loop.controller.run_loop", "evergrad.service._runs.find_run"):
        monkeypatch.setattr(target, interrupted)
    result = cli(*arguments)
    assert result.err.splitlines()[-1] == "interrupted"
    assert result.code == 130


# ── Looking at a run ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_versions_with_their_parents_and_aliases(cli: Cli, run: Path) -> None:
    lines = cli("model", "list").out.splitlines()
    assert re.search(r"demo-c1-sft +– +1 ", lines[1])
    assert re.search(r"demo-c1-rl +demo-c1-sft +12 .*production", lines[2])
    data = json.loads(cli("model", "list", "--json").out)
    assert [version["aliases"] for version in data] == [[], ["production"]]


def test_one_version_with_its_lineage_and_the_gates_word(cli: Cli, run: Path) -> None:
    out = cli("model", "show").out
    assert "demo-c1-rl ← demo-c1-sft" in out
    assert "against demo-c1-sft: 46 wins, 1 loss of 96 pairs" in out
    assert json.loads(cli("model", "show", "--json").out)["verdicts"][0]["evidence"] == {"p_value": 1e-12}


def test_rollback_and_promotion_by_hand_are_on_record(cli: Cli, run: Path) -> None:
    done = cli("model", "rollback", "--reason", "it was rude").out.splitlines()
    undo = "evergrad model promote demo-c1-rl --alias production --run runs/demo"
    assert done == ["production: demo-c1-rl → demo-c1-sft", f"Undo: {undo}"]
    again = cli("model", "rollback")
    assert "no predecessor. Next: evergrad model promote VERSION" in again.error()
    assert again.code != 0
    # The verdict of the gate still fits, for it compared with what is served now: it is the one on record.
    assert "by hand" not in cli("model", "promote", "demo-c1-rl").out
    assert cli("model", "promote", "demo-c1-sft", "--reason", "drill").code == 0
    with Registry(run / "registry.sqlite") as registry:
        moves = registry.history("production")
    assert [(move.action, move.version_id) for move in moves] == [
        ("bootstrap", "demo-c1-sft"),
        ("promote", "demo-c1-rl"),
        ("rollback", "demo-c1-sft"),
        ("promote", "demo-c1-rl"),
        ("promote", "demo-c1-sft"),
    ]
    assert moves[2].reason == "it was rude"
    assert moves[4].reason == "by hand, without the gate: drill"


def test_a_release_is_shown_step_by_step_and_ended_by_hand(cli: Cli, run: Path) -> None:
    with Registry(run / "registry.sqlite") as registry:
        for number, name in enumerate(("next", "third"), start=2):
            registry.register(make_version(name, "demo-c1-rl", number))
        plan = {"shares": [0.01, 0.05], "outcomes": 50}
        verdict = Verdict(True, ("next wins",), {}, "next", "demo-c1-rl")
        found = registry.releases.begin("production", verdict, plan, state=ReleaseState.CANARY, share=0.01, actor="gate")
        found = registry.releases.widen(found, 0.05, reason="no harm", evidence={"e_value": 0.5}, actor="canary")
    assert re.search(r"next +demo-c1-rl .* canary 0.05 of production", cli("model", "list").out)
    assert [each["release"] and each["release"]["share"] for each in json.loads(cli("model", "list", "--json").out)] == [
        None, None, 0.05, None,
    ]  # fmt: skip
    assert cli("model", "rollback", "--reason", "complaints").out == (
        "production stays with demo-c1-rl; the release of next has ended\n"
        "Undo: evergrad model promote next --alias production --run runs/demo\n"
    )
    out = cli("model", "show", "next").out
    user = _user()
    assert "release 1 to production, against demo-c1-rl: outcomes 50, shares 0.01/0.05" in out
    steps = ("canary 0.01 of the sessions by gate: next wins", "canary 0.05 of the sessions by canary: no harm")
    assert all(step in out for step in (*steps, f"rolled back by {user}: complaints"))
    shown = json.loads(cli("model", "show", "next", "--json").out)["releases"][0]
    assert (shown["state"], shown["events"][1]["evidence"]) == ("rolled_back", {"e_value": 0.5})
    with Registry(run / "registry.sqlite") as registry:
        verdict = Verdict(True, ("third wins",), {}, "third", "demo-c1-rl")
        registry.releases.begin("production", verdict, plan, state=ReleaseState.SHADOW, share=0.0)
    promoted = cli("model", "promote", "third", "--reason", "it is urgent").out
    assert f"production: demo-c1-rl → third (promote by {user}: third wins; by hand: it is urgent)" in promoted
    assert "The release of third, which was under way, has ended with this." in promoted
    assert "promoted by" in cli("model", "show", "third").out
    left = cli("model", "show", "demo-c1-rl").out
    assert "production: demo-c1-rl → third" in left, "also how an alias left a version"


def test_every_promotion_by_hand_keeps_a_reason_of_its_own(cli: Cli, run: Path) -> None:
    """Not the gate's word: what a person once decided is no evidence for what another decides later."""
    assert cli("model", "promote", "demo-c1-sft", "--reason", "drill").code == 0
    assert cli("model", "rollback").out.startswith("production: demo-c1-sft → demo-c1-rl\n")
    again = cli("model", "promote", "demo-c1-sft", "--reason", "second drill").out
    assert "No verdict of the gate stands behind this." in again
    cli("model", "promote", "demo-c1-rl", "--reason", "over")
    cli("model", "rollback")
    cli("model", "rollback")
    cli("model", "rollback")
    cli("model", "promote", "demo-c1-rl", "--reason", "as ruled")
    with Registry(run / "registry.sqlite") as registry:
        reasons = [move.reason for move in registry.history("production") if move.action == "promote"]
    assert reasons == [
        "46 wins, 1 loss of 96 pairs",
        "by hand, without the gate: drill",
        "by hand, without the gate: second drill",
        "46 wins, 1 loss of 96 pairs; by hand: over",
        "46 wins, 1 loss of 96 pairs; by hand: as ruled",
    ]


def test_what_only_programs_read_is_shown_to_them(cli: Cli, run: Path) -> None:
    with Registry(run / "registry.sqlite") as registry:
        shown = registry.get("demo-c1-rl")
        metadata = {"cycle": 3, "probe": {"token_ids": [1, 2], "logprobs": [-1.5]}}
        registry.register(dataclasses.replace(shown, version_id="probed", metadata=metadata))
    assert "probe:" not in cli("model", "show", "probed").out
    assert "logprobs" not in cli("model", "show", "probed").out
    assert json.loads(cli("model", "show", "probed", "--json").out)["metadata"]["probe"]["logprobs"] == [-1.5]


@pytest.mark.parametrize(
    "text",
    ["", "model =", "[environment]", 'model = "tiny"\nenvironment = "x"', '[environment]\nname = "support_desk"', "\x00"],
)
def test_a_broken_configuration_of_a_run_is_named(cli: Cli, run: Path, text: str) -> None:
    (run / "config.toml").write_text(text)
    for command_line in (["eval"], ["rollouts", "show", "r-1", "--tokens"]):
        told = cli(*command_line).error()
        assert "runs/demo/config.toml" in told
        assert "Next: " in told


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"usd_per_success": "x"}', '{"usd_per_million_tokens": []}', '{"intelligence_per_dollar": 3}',
     '{"intelligence_per_dollar": {"ci95": 3}}', '{"frontier": 3}', '{"frontier": [{"version_id": 3}]}',
     '{"intelligence_per_dollar": {"ci95": [1, "x"]}}', '{"all_in": 3}', '{"all_in": {"attempts": "x"}}', '{"index": [1]}',
     '{"index": {"retired": 3}}', '{"usd_per_success_at_least": "x"}', '{"budget": {"unspent_usd": "x"}}', "[" * 100_000],
)  # fmt: skip
def test_a_broken_report_is_named_by_cost(cli: Cli, run: Path, text: str) -> None:
    with Ledger(run / "ledger.sqlite"):
        pass
    (run / "report.json").write_text(text)
    told = cli("cost").error()
    assert "runs/demo/report.json" in told
    assert "Next: " in told


def test_the_newest_run_is_taken(cli: Cli, run: Path) -> None:
    newer = Path("runs/newer")
    Registry(newer / "registry.sqlite").close()
    assert "No version yet in runs/newer" in cli("model", "list").out
    later = time.time() + 60
    os.utime(run / "registry.sqlite", (later, later))
    assert "demo-c1-rl" in cli("model", "list").out
    assert "No version yet" in cli("model", "list", "--run", str(newer)).out


def test_a_look_at_the_costs_shows_all_and_changes_nothing(cli: Cli, run: Path) -> None:
    version = "demo-" + "x" * 60
    book = PriceBook(prices={"cpu_core_s": Price(usd=Decimal(2))})
    with Ledger(run / "ledger.sqlite", book) as ledger:
        with PhaseClock(ledger, subject=version, cores=3, heartbeat_s=None) as clock, clock.phase("rollout"):
            pass
        with PhaseClock(ledger, subject="cycle-1", cores=3, heartbeat_s=None) as clock, clock.phase("rollout"):
            pass
        killed = PhaseClock(ledger, subject="cycle-2", cores=1, heartbeat_s=None)
        killed.start()
        time.sleep(0.1)
        killed.heartbeat()
        with ledger.database.write() as connection:
            connection.exec_driver_sql("UPDATE reservations SET owner = json_set(owner, '$.started', 'before')")
        before = ledger.entries()
    (run / "report.json").write_text('{"usd_per_million_tokens": 0.124}')
    out = cli("cost").out
    assert re.search(r"outside cycles +\$", out)
    assert re.search(r"cycle-1 +\$", out)
    assert "demo-x" not in out
    assert re.search(r"not yet charged: 0\.\d cpu_core_s", out)
    assert re.search(r"per million tokens +\$0\.124", out)
    data = json.loads(cli("cost", "--json").out)
    assert data["cost"]["by_phase"].keys() == {"idle", "rollout"}
    assert data["uncharged"]["cpu_core_s"] >= 0.1
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        assert ledger.entries() == before


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1", "COLUMNS": "60"}])
def test_a_file_gets_whole_columns(forced: dict[str, str]) -> None:
    code = (
        "from evergrad.service._screen import console, table\n"
        "console().print(table(('version', 'aliases'), [('v' * 90, 'a' * 80)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **forced})
    assert re.search("v{90} +a{80}", done.stdout), done


def test_rollouts_of_files_still_being_written(cli: Cli, run: Path) -> None:
    with (run / "rollouts" / "step-000001.jsonl.partial").open("a") as file:
        file.write('{"rollout_id": "r-half')
    out = cli("rollouts", "show", "-n", "3").out
    assert re.findall(r"r-\d+", out) == ["r-3", "r-4", "r-5"]
    assert "fault: ConnectionError: gone" in out
    assert "policy version 4" in out
    assert "reward 1" in out


def test_rollouts_are_chosen_by_source_outcome_and_id(cli: Cli, run: Path) -> None:
    assert re.findall(r"r-\d+", cli("rollouts", "show", "--source", "live").out) == ["r-4"]
    assert re.findall(r"r-\d+", cli("rollouts", "show", "--outcome", "environment_fault").out) == ["r-5"]
    assert [each["rollout_id"] for each in json.loads(cli("rollouts", "show", "r-2", "--json").out)] == ["r-2"]
    empty = cli("rollouts", "show", "--source", "eval")
    assert "no rollout fits" in empty.error()


def test_nothing_a_model_wrote_reaches_the_terminal_raw(cli: Cli, run: Path) -> None:
    out = cli("rollouts", "show", "r-4").out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)
    assert "[bold]not bold[/bold]" in out
    assert "\\x1b]0;owned" in out


def test_tokens_are_shown_one_by_one_as_sampled(cli: Cli, run: Path) -> None:
    out = cli("rollouts", "show", "r-1", "--tokens").out
    assert out.count("│") == 3
    assert "log-probability" in out


def test_environments_are_listed_with_what_they_ask(cli: Cli, run: Path) -> None:
    out = cli("env", "list").out
    assert "support_desk" in out
    assert "reasoning" in out


UNSOUND = """
from collections.abc import Iterator
from random import Random

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward


class Generous(Environment):
    @classmethod
    def tasks(cls, rng: Random, config: EnvironmentConfig) -> Iterator[TaskRow]:
        while True:
            yield TaskRow(f"Say {rng.randint(0, 10**6)}.", {})

    @reward
    async def anything(self, answer: str) -> float:
        return 1.0

    def demonstrate(self) -> list[str]:
        return ["Something."]
"""


def test_a_sound_environment_passes_and_an_unsound_one_does_not(cli: Cli, run: Path, tmp_path: Path) -> None:
    passed = cli("env", "test", "support_desk")
    assert "checks passed" in passed.out
    assert passed.code == 0
    (tmp_path / "generous.py").write_text(UNSOUND)
    failed = cli("env", "test", str(tmp_path / "generous.py"))
    assert re.search(r"constant answer +FAIL", failed.out)
    assert "do not train on these rewards yet" in failed.out
    assert failed.err == ""
    assert failed.code == 1


def test_a_wrong_setting_of_an_environment_is_named(cli: Cli, run: Path) -> None:
    wrong = cli("env", "test", "support_desk", "--set", "dificulty=easy")
    assert "did you mean 'difficulty'?" in wrong.error()
    assert wrong.code == 2


def test_doctor_finds_this_machine_fit(cli: Cli, run: Path) -> None:
    result = cli("doctor")
    assert {"python", "packages", "memory", "disk", "matrix", "ports"} <= set(re.findall(r"\w+", result.out))
    assert result.code == 0, result.out


def test_doctor_fails_with_a_next_step(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad.service._doctor.MIN_FREE_GB", 1e9)
    result = cli("doctor")
    assert re.search(r"fail +disk .*free some", result.out)
    assert result.code == 1


def test_what_was_not_checked_is_counted_apart(cli: Cli, run: Path, tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "examples" / "my_environment.py").read_text()
    (tmp_path / "silent.py").write_text(source.replace("def demonstrate", "def show"))
    out = cli("env", "test", str(tmp_path / "silent.py")).out
    assert re.search(r"gold passes +skip", out)
    assert re.search(r"^\d+ passed, \d+ not checked\.$", out, re.MULTILINE)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), BaseException("odd"), ValueError("odd")])
def test_whatever_is_raised_is_one_line(error: BaseException) -> None:
    def fail() -> None:
        raise error

    out = io.StringIO()
    assert guarded(fail, stderr=out) == 1
    assert out.getvalue().startswith(f"error: {type(error).__name__}")
    assert out.getvalue().count("\n") == 1


def test_the_bill_goes_out_as_a_focus_table_and_can_be_priced_anew(cli: Cli, run: Path) -> None:
    with Ledger(run / "ledger.sqlite", PriceBook(prices={"cpu_core_s": Price(usd=Decimal(2))})) as ledger:
        for number, phase in enumerate(("rollout", "train", "idle")):
            ledger.record(f"k{number}", subject="cycle-1", phase=phase, resource="cpu_core_s", quantity=10 * (number + 1))
    assert cli("cost", "--focus", "out/bill.csv").code == 0
    with Path("out/bill.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(Decimal(row["BilledCost"]) for row in rows) == 120
    assert {row["BillingAccountId"] for row in rows} == {"demo"}
    Path("mine.toml").write_text("[prices.cpu_core_s]\nusd = 3.0\n")
    repriced = json.loads(cli("cost", "--price-book", "mine.toml", "--json").out)
    assert Decimal(str(repriced["cost"]["usd"])) == 180
    assert repriced["usd_per_success"] is None, "a figure of other prices"
    Path("empty.toml").write_text("prices = {}\n")
    unpriced = json.loads(cli("cost", "--price-book", "empty.toml", "--json").out)
    assert (unpriced["cost"]["usd"], unpriced["cost"]["coverage"], unpriced["cost"]["unpriced"]) == (None, 0, ["cpu_core_s"])
    for no_file in ("out", ".", "/"):
        assert "cannot write the table" in cli("cost", "--focus", no_file).error()
    assert json.loads(cli("cost", "--json").out)["cost"]["usd"] == 120, "the ledger keeps its own"


def test_costs_name_the_versions_that_are_dominated(cli: Cli, run: Path) -> None:
    with Ledger(run / "ledger.sqlite"):
        pass
    place = {"suite": "desk@v1", "score": 0.5, "usd_per_success": 0.25, "on_front": True, "dominated_by": []}
    worse = {**place, "score": 0.4, "on_front": False, "dominated_by": ["demo-c1-rl"]}
    frontier = [{**place, "version_id": "demo-c1-rl"}, {**worse, "version_id": "demo-c1-sft"}]
    (run / "report.json").write_text(json.dumps({"frontier": frontier}))
    out = cli("cost").out
    assert "score against cost per success on desk@v1" in out
    assert re.search(r"demo-c1-sft +40\.0% +\$0\.2500 +dominated by demo-c1-rl", out)


def test_other_models_are_placed_among_the_versions(cli: Cli, run: Path) -> None:
    with Ledger(run / "ledger.sqlite", PriceBook(prices={"api_output_tokens": Price(usd=Decimal("0.001"))})) as ledger:
        ledger.record("k", subject="cycle-1", phase="eval", resource="api_output_tokens", quantity=1)
    place = {"suite": "desk@v1", "score": 0.5, "usd_per_success": 0.25, "on_front": True, "dominated_by": []}
    (run / "report.json").write_text(json.dumps({"frontier": [{**place, "version_id": "demo-c1-rl"}]}))
    other = '[[models]]\nname = "large"\nsuite = "desk@v1"\nscore = 0.8\nused = { api_output_tokens = 80 }\n'
    Path("others.toml").write_text(other)
    out = cli("cost", "--others", "others.toml").out
    assert re.search(r"large +80\.0% +\$0\.1000", out)
    assert re.search(r"demo-c1-rl +50\.0% +\$0\.2500 +dominated by large", out)
    Path("others.toml").write_text(other.replace("desk@v1", "desk@v2"))
    assert "none of the models was measured on desk@v1" in cli("cost", "--others", "others.toml").error()
    (run / "report.json").write_text("{}")
    assert "no version of the run has a score" in cli("cost", "--others", "others.toml").error()


def test_an_invoice_stands_beside_the_ledger_and_views_beside_the_bill(cli: Cli, run: Path) -> None:
    price = Price(usd=Decimal(2), list_usd=Decimal(3), marginal_usd=Decimal(0))
    with Ledger(run / "ledger.sqlite", PriceBook(prices={"cpu_core_s": price})) as ledger:
        for number, phase in enumerate(("train", "idle", "unattributed")):
            ledger.record(f"k{number}", subject="cycle-1", phase=phase, resource="cpu_core_s", quantity=number + 1)
    out = cli("cost", "--invoice", "15").out
    for name, usd in (("allocated", 2), ("idle", 4), ("unattributed", 9), ("invoiced", 15)):
        assert re.search(rf"{name} +\${usd}\.0000", out)
    assert "its prices are too high" in cli("cost", "--invoice", "10.5").out
    assert "not a sum of dollars" in cli("cost", "--invoice", "much").error()
    for view, usd in (("billed", 12), ("list", 18), ("marginal", 0)):
        assert json.loads(cli("cost", "--view", view, "--json").out)["cost"]["usd"] == usd


def test_costs_show_what_learning_adds_and_what_is_left(cli: Cli, run: Path) -> None:
    with Ledger(run / "ledger.sqlite"):
        pass
    worth = {"value": 2.0, "ci95": [1.0, 3.0]}
    all_in = {"usd_per_success": 0.5, "usd_per_million_tokens": 9.0, "intelligence_per_dollar": worth}
    all_in |= {"learning_usd": 40.0, "attempts": 200.0, "basis": "worth"}
    index = {"version": "x", "suites": [], "retired": ["desk@v1"], "values": {}}
    report = {"usd_per_success_at_least": 0.125, "all_in": all_in, "index": index, "budget": {"usd": 9, "unspent_usd": 3.5}}
    (run / "report.json").write_text(json.dumps(report))
    out = cli("cost").out
    assert re.search(r"per success +at least \$0\.1250", out)
    assert "$40.00 of learning over 200 attempts (by the [worth])" in out
    assert re.search(r"per million tokens +\$9\.00", out)
    assert re.search(r"saturated, so retired +desk@v1", out)
    assert re.search(r"unspent of the budget +\$3\.50", out)


@pytest.mark.parametrize("alias", ["production", "staging"])
def test_what_a_move_by_hand_prints_undoes_it(cli: Cli, run: Path, alias: str) -> None:
    cli("model", "promote", "demo-c1-rl", "--alias", "staging")
    cli("model", "promote", "demo-c1-sft", "--alias", "staging")
    cli("model", "promote", "demo-c1-rl", "--alias", "staging")

    def serves() -> str | None:
        with Registry(run / "registry.sqlite") as registry:
            return registry.resolve(alias)

    def undo(out: str) -> None:
        (line,) = re.findall(r"Undo: evergrad (.*)", out)
        assert cli(*shlex.split(line)).code == 0

    assert serves() == "demo-c1-rl"
    undo(cli("model", "rollback", alias).out)
    assert serves() == "demo-c1-rl"
    undo(cli("model", "promote", "demo-c1-sft", "--alias", alias).out)
    assert serves() == "demo-c1-rl"


def test_an_audit_without_certificates_says_so(cli: Cli, run: Path) -> None:
    assert "no certificate yet" in cli("audit").error()
    (run / "certificates").mkdir()
    write = (run / "certificates" / "demo-c1-rl-0.json").write_text
    write("{}")
    assert "not a certificate" in cli("audit").error()
    assert "no public key" in cli("audit", "--key", "absent.pub").error()


def test_an_audit_ends_with_1_when_something_does_not_fit(cli: Cli, run: Path) -> None:
    content = {"certificate": 1, "candidate_id": "demo-c1-rl", "promoted": False, "reasons": ["guard desk@v1: not shown"]}
    certificate = sign(content, signing_key())
    path = run / "certificates" / "demo-c1-rl-0.json"
    path.parent.mkdir()
    path.write_text(json.dumps(certificate))
    result = cli("audit", "production")
    assert result.code == 1
    assert "demo-c1-rl-0: REFUSED: guard desk@v1: not shown" in result.out
    assert re.search(r"signature +holds +by the key it names", result.out)
    assert re.search(r"weights +fails +cannot be checked", result.out)
    pinned = cli("audit", "--key", f"{key_path()}.pub", "--json")
    audited = json.loads(pinned.out)["demo-c1-rl-0"]
    assert audited["ruling"] == "REFUSED: guard desk@v1: not shown"
    assert audited["findings"][0] == {"check": "signature", "state": "holds", "told": "by the key given"}
    assert "no certificate of demo-c1-sft" in cli("audit", "demo-c1-sft").error()
    path.write_text(json.dumps({**certificate, "content": {**certificate["content"], "more": 1}}))
    forged = cli("audit")
    assert (forged.code, "weights" in forged.out) == (1, False), "a forgery is looked at no further"
    assert "demo-c1-rl-0: no ruling to rely on" in forged.out
    assert "REFUSED" not in forged.out


def test_an_audit_tells_who_put_an_alias_where_no_certificate_is(cli: Cli, run: Path) -> None:
    (run / "certificates").mkdir()
    certificate = sign({"certificate": 1, "candidate_id": "demo-c1-rl", "promoted": True, "reasons": []}, signing_key())
    (run / "certificates" / "demo-c1-rl-0.json").write_text(json.dumps(certificate))
    cli("model", "rollback", "production")
    assert re.search(r"demo-c1-sft: no ruling to rely on *\n.*\nalias +holds +production: the first version", cli("audit").out)
    cli("model", "promote", "demo-c1-rl")
    cli("model", "promote", "demo-c1-sft", "--reason", "it was Friday")
    told = r"production: set by hand at \S+, no verdict behind it \(by hand, without the gate: it was Friday\)"
    assert re.search(rf"alias +fails +{told}", cli("audit").out)
    assert re.search(rf"no certificate of demo-c1-sft: {told}", cli("audit", "production").error())
