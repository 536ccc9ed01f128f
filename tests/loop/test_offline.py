"""Training on a data file: from the file to an adapter that other tools load, killed and resumed on the way."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evergrad.ledger import Ledger
from evergrad.loop.config import RLConfig
from evergrad.loop.offline import TrainConfig, train
from evergrad.loop.offline.plan import Plan, hold_out
from evergrad.registry import base_model
from evergrad.service.cli import command
from evergrad.training import ScheduleConfig
from evergrad.types import EvergradError, InputError
from tests.loop.conftest import half_written

EXAMPLES = Path(__file__).parents[2] / "examples" / "train"
CONFIG = f"""
name = "t"
model = "tiny"
seed = 3
steps = 6
batch_size = 4

[data]
file = "{EXAMPLES / "chat.jsonl"}"
heldout = 0.2

[schedule]
lr = 1e-2
warmup_steps = 2

[trainer]
threads = 1
lora = {{ rank = 4 }}

[checkpoint]
every = 2
"""
ENDS = ("final", "checkpoints/step-000006/trainer")
"""Folders of what a run of six steps ends with."""
PAIRS = ["method=dpo", f"data.file={EXAMPLES / 'preferences.jsonl'}", "schedule.lr=1e-3"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, left alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.toml").write_text(CONFIG)
    return train(folder / "train.toml", [], folder / "run")


@pytest.fixture(scope="module")
def undisturbed_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed_pairs")
    (folder / "train.toml").write_text(CONFIG)
    return train(folder / "train.toml", PAIRS, folder / "run")


def report_of(run: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run / "report.json").read_text())
    return data


def steps_on_record(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


KILLS = """
import os, signal, sys
import resource, threading
from evergrad.training import checkpoint, sharded_checkpoint, trainer
from evergrad.transfer import files

at, moment, by = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests with it ignored
step, write, write_state, later = trainer.Trainer.step, files.save_file, checkpoint.write_state, threading.Event()

if moment == "small files":  # a limit on their size stands in for the disk, of the other ranks too
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

def kill():
    os.kill(os.getpid(), by)

def killed_step(self, *arguments):
    if self.updates + 1 == at and moment == "before":
        kill()
    found = step(self, *arguments)
    if self.updates == at and moment == "after":
        kill()
    if self.updates == 3:
        later.set()
    return found

def killed_write(tensors, path, **more):
    if moment == "full disk" and f".step-{at:06d}" in str(path):
        raise OSError(28, "No space left on device")
    write(tensors, path, **more)
    if moment == "saving" and "checkpoints" in str(path) and f".step-{at:06d}" in str(path):
        kill()

def last_word(folder, *more):  # of the first rank, when all have written
    if moment == "writing parts" and f".step-{at:06d}" in str(folder):
        kill()
    if moment == "slow parts" and ".step-000002" in str(folder):
        assert later.wait(120), "no step was made while the checkpoint was written"
    write_state(folder, *more)

trainer.Trainer.step, files.save_file, sharded_checkpoint.write_state = killed_step, killed_write, last_word
from evergrad.service.cli import command
sys.exit(command(["train", *sys.argv[4:]]))
"""


def start(config: Path, run: Path, at: int, moment: str, words: Sequence[str], by: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLS, str(at), moment, str(int(by)), str(config), "--run-dir", str(run)]
    command += [word for each in words for word in ("--set", each)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)


def start_and_kill(
    config: Path, run: Path, at: int, moment: str, words: Sequence[str] = (), *, by: int = signal.SIGKILL
) -> str:
    """Runs ``evergrad train`` in a process of its own that sends itself a signal; returns what it said."""
    killed = start(config, run, at, moment, words, by)
    assert killed.returncode == {signal.SIGKILL: -signal.SIGKILL, 0: 1}.get(by, 130), killed.stderr
    assert not (run / "report.json").exists()
    return killed.stdout + killed.stderr


def start_and_finish(config: Path, run: Path, words: Sequence[str] = (), moment: str = "") -> Path:
    """The same to its end; a trainer of several ranks has a process of its own, as it can have no other beside it."""
    done = start(config, run, 0, moment, words, 0)
    assert done.returncode == 0, done.stderr
    return run


def same_end(run: Path, other: Path) -> None:
    """Weights, optimizer, and every figure but those of time and memory agree to the last bit."""
    ours, theirs = (
        {path.relative_to(each).as_posix(): path for folder in ENDS for path in (each / folder).glob("*.safetensors")}
        for each in (run, other)
    )
    assert ours.keys() == theirs.keys()
    assert {Path(name).parent.as_posix() for name in ours} == set(ENDS)
    for name, path in ours.items():
        one, two = load_file(path), load_file(theirs[name])
        assert one.keys() == two.keys()
        for tensor in one:
            assert torch.equal(one[tensor], two[tensor]), f"{name}: {tensor}"
    timed = ("seconds", "wall_s", "tokens_per_s", "memory_gib")
    lines, others = (
        [{key: value for key, value in line.items() if key not in timed} for line in steps_on_record(each)]
        for each in (run, other)
    )
    assert lines == others
    assert report_of(run)["heldout"] == report_of(other)["heldout"]
    assert report_of(run)["tokens"] == report_of(other)["tokens"]
    assert half_written(run) == []


def test_killed_and_resumed_ends_as_if_left_alone(config: Path, tmp_path: Path, undisturbed: Path) -> None:
    start_and_kill(config, tmp_path / "run", 3, "after")
    same_end(train(config, [], tmp_path / "run"), undisturbed)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_the_step_that_is_being_made_is_saved_when_asked_to_stop(
    config: Path, tmp_path: Path, undisturbed: Path, by: signal.Signals
) -> None:
    told = start_and_kill(config, tmp_path / "run", 3, "before", by=by)
    assert "stopped; the same command goes on from step 3" in told
    same_end(train(config, [], tmp_path / "run"), undisturbed)


def test_a_checkpoint_by_time_loses_no_more_and_measures_nothing(config: Path, tmp_path: Path, undisturbed: Path) -> None:
    often = ["checkpoint.every_s=1e-9"]
    start_and_kill(config, tmp_path / "run", 4, "before", often)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))[-1] == "step-000003"
    same_end(train(config, often, tmp_path / "run"), undisturbed)


def test_a_run_killed_before_its_first_checkpoint_says_that_it_starts_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, run = ["checkpoint.every=100"], tmp_path / "run"
    start_and_kill(config, run, 5, "after", words)
    with Ledger(run / "ledger.sqlite") as ledger:
        earlier_s, earlier_usd = ledger.elapsed_s(), ledger.total_usd()
    assert earlier_s > 0
    train(config, words, run)
    assert "no checkpoint to go on from: it starts again" in capsys.readouterr().out
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        both_s = ledger.elapsed_s()
    report = report_of(run)
    assert earlier_s < report["wall_s"] == pytest.approx(both_s, abs=0.5), "time and cost are of the same attempts"
    assert report["cost"]["total_usd"] > float(earlier_usd or 0)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("at", range(1, 7))
def test_killed_at_any_step(config: Path, tmp_path: Path, undisturbed: Path, at: int, moment: str) -> None:
    start_and_kill(config, tmp_path / "run", at, moment)
    same_end(train(config, [], tmp_path / "run"), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 4, 6])
def test_killed_while_a_checkpoint_is_written(config: Path, tmp_path: Path, undisturbed: Path, at: int) -> None:
    start_and_kill(config, tmp_path / "run", at, "saving")
    same_end(train(config, [], tmp_path / "run"), undisturbed)


FULL = ["trainer.method=full", "schedule.lr=1e-3"]
RANKS = ["trainer.ranks=2"]
RECIPES = {
    "dpo": PAIRS,
    "simpo": [*PAIRS, "method=simpo"],
    "sft, full": FULL,
    "dpo, full": [*PAIRS, *FULL],
    "sft, dora": ["trainer.lora.dora=true"],
    "sft, two ranks": RANKS,
    "dpo, full, two ranks": [*PAIRS, *FULL, *RANKS],
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_every_step_one_after_the_other(config: Path, tmp_path: Path, recipe: str) -> None:
    """Each session is killed at the next step, before it or after it, and goes on from what the one before has saved."""
    words, run = RECIPES[recipe], tmp_path / "run"
    alone = start_and_finish(config, tmp_path / "alone", words)
    for at in range(1, 7):
        start_and_kill(config, run, at, "before" if at % 2 else "after", words)
    same_end(start_and_finish(config, run, words), alone)


@pytest.mark.slow
def test_two_ranks_killed_while_they_write_a_checkpoint(config: Path, tmp_path: Path) -> None:
    """They write while training goes on, so the step after is under way; the checkpoint before is whole."""
    run = tmp_path / "run"
    alone = start_and_finish(config, tmp_path / "alone", RANKS)
    start_and_kill(config, run, 4, "writing parts", RANKS)
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000002"]
    same_end(start_and_finish(config, run, RANKS), alone)


def test_training_goes_on_while_two_ranks_write(config: Path, tmp_path: Path) -> None:
    """The first checkpoint is finished only when a later step has been made; were it waited for, that would never be."""
    run = start_and_finish(config, tmp_path / "run", [*RANKS, "steps=4", "checkpoint.pinned=[2]"], "slow parts")
    assert report_of(run)["checkpoints"] == [2, 4]
    # It holds the weights of its own step.
    assert json.loads((run / "checkpoints/step-000002/trainer/state.json").read_text())["updates"] == 2


@pytest.mark.slow
def test_two_ranks_that_find_the_disk_full_say_so_and_leave_nothing_half_written(config: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", [*RANKS, "trainer.lora.rank=16"]  # so that the checkpoint has the largest files
    told = start_and_kill(config, run, 0, "small files", words, by=0)
    assert re.search(r"error: could not write: rank \d: .*step-000002", told), told
    assert "Traceback" not in told
    assert not list((run / "checkpoints").glob("step-*"))
    assert half_written(run) == []
    same_end(start_and_finish(config, run, words), start_and_finish(config, tmp_path / "alone", words))


def test_a_full_disk_is_named_and_leaves_the_last_whole_checkpoint(config: Path, tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    told = start_and_kill(config, run, 4, "full disk", by=0)
    assert re.search(r"error: .*could not write: .*step-000004.*Next: free", told), told
    assert "Traceback" not in told
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000002"]
    assert half_written(run) == []
    same_end(train(config, [], run), undisturbed)


# ── What a run leaves ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_run_folder(undisturbed: Path) -> None:
    names = {path.name for path in undisturbed.iterdir()}
    assert names == {
        ".lock", "checkpoints", "config.toml", "data.json", "final", "ledger.sqlite", "metrics.jsonl", "report.json",
    }  # fmt: skip
    report, lines = report_of(undisturbed), steps_on_record(undisturbed)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [entry["step"] for entry in report["heldout"]["history"]] == [0, 2, 4, 6]
    assert report["heldout"]["rows"] == 8
    assert report["heldout"]["best"]["loss"] < report["heldout"]["history"][0]["loss"]
    assert report["checkpoints"] == [6]
    assert report["cost"]["total_usd"] > 0
    assert report["data"]["training"]["rows"] == 40


def test_what_it_cost_is_shown_and_the_rest_of_a_run_is_not_there(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["cost", "--run", str(undisturbed), "--json"]) == 0
    told, total = json.loads(capsys.readouterr().out), report_of(undisturbed)["cost"]["total_usd"]
    assert told["cost"]["by_phase"].keys() >= {"setup", "train", "eval"}
    assert told["cost"]["usd"] == pytest.approx(total, rel=0.5), "the end of the process comes after the report"
    assert command(["cost", "--run", str(undisturbed)]) == 0
    out = capsys.readouterr().out
    assert "train" in out
    assert "per success" not in out, "nothing of it is served"
    for words in (["model", "list"], ["model", "rollback"], ["rollouts", "show"], ["eval"], ["serve"], ["audit"]):
        assert command([*words, "--run", str(undisturbed)]) == 2, words
        assert "a training on data has no versions" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "t").symlink_to(undisturbed)
    assert command(["cost"]) == 0
    assert "runs/t" in capsys.readouterr().out, "the newest of either kind"


@pytest.mark.parametrize("method", ["dpo", "ipo", "simpo"])
def test_preferences_are_learned(config: Path, tmp_path: Path, undisturbed_pairs: Path, method: str) -> None:
    run = undisturbed_pairs if method == "dpo" else train(config, [*PAIRS, f"method={method}"], tmp_path / "run")
    lines, history = steps_on_record(run), report_of(run)["heldout"]["history"]
    assert lines[-1]["margin"] > lines[0]["margin"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["pair_accuracy"] == 1.0
    if method == "dpo":
        # The reference is what the run started from, so that nothing is preferred at first.
        assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_full_fine_tuning_keeps_its_reference(config: Path, tmp_path: Path) -> None:
    words = [*PAIRS, "trainer.method=full", "steps=2", "checkpoint.every=1", "schedule.lr=1e-4"]
    run = train(config, words, tmp_path / "run")
    history = report_of(run)["heldout"]["history"]
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert history[-1]["loss"] < history[0]["loss"]


def test_the_held_out_loss_is_what_a_step_would_report(config: Path, tmp_path: Path) -> None:
    # All rows are both trained, in one batch, and held out: before the first update the two figures are of the same weights.
    for words in (["data.heldout=0"], [*PAIRS, "data.heldout=0"]):
        file = EXAMPLES / ("chat.jsonl" if len(words) == 1 else "preferences.jsonl")
        more = [f"data.heldout_file={file}", "steps=1", "batch_size=99"]
        run = train(config, [*words, *more], tmp_path / f"run{len(words)}")
        first = report_of(run)["heldout"]["history"][0]["loss"]
        assert steps_on_record(run)[0]["loss"] == pytest.approx(first, rel=1e-5)


def test_the_adapter_is_one_that_peft_loads(undisturbed: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(base_model("tiny"))
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        before = base(token_ids).logits
        after = PeftModel.from_pretrained(base, undisturbed / "final")(token_ids).logits
    assert not torch.allclose(before, after)


def test_a_finished_run_says_so(config: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (undisturbed / "report.json").read_bytes()
    train(config, [], undisturbed)
    assert "is finished" in capsys.readouterr().out
    assert (undisturbed / "report.json").read_bytes() == before


def test_the_whole_model_is_trained_and_exported(config: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = train(config, ["trainer.method=full", "schedule.lr=1e-3", "steps=2", "data.heldout=0"], tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(base_model("tiny"))
    ours = AutoModelForCausalLM.from_pretrained(run / "final")
    assert AutoTokenizer.from_pretrained(run / "final").chat_template
    assert any(not torch.equal(a, b) for a, b in zip(base.parameters(), ours.parameters(), strict=True))


def test_the_last_the_best_and_the_pinned_checkpoints_are_kept(config: Path, tmp_path: Path) -> None:
    # A rate so high that the loss soon rises makes the best one an early one.
    words = ["schedule.lr=0.05", "schedule.warmup_steps=0", "schedule.shape=constant", "checkpoint.every=1"]
    run = train(config, [*words, "checkpoint.pinned=[1, 3]", "checkpoint.keep_best=2"], tmp_path / "run")
    report = report_of(run)
    ranked = sorted((entry["loss"], entry["step"]) for entry in report["heldout"]["history"] if entry["step"])
    assert report["checkpoints"] == sorted({1, 3, 6, *(step for _, step in ranked[:2])})
    assert not list((run / "checkpoints").glob(".*"))


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["method=stf"], "did you mean 'sft'"),
        (["method=grpo"], "give the tables [environment] and [learn]"),
        (["learn.rl.steps=3"], "give the tables [environment] and [learn], and no [data]"),
        (["shedule.lr=1"], "did you mean 'schedule'"),
        (["schedule.shape=cosinus"], "'cosine'"),
        (["trainer.optimizer.lr=1"], "set schedule.lr"),
        (["options.betta=1"], "betta"),
        (["data.fil=1"], "did you mean 'file'"),
        (["data.file=none.jsonl"], "data.file: not found"),
        (["data.heldout=0", "checkpoint.keep_best=2"], "set data.heldout"),
        (["data.max_tokens=20"], "chat.jsonl:1"),
        (["data.heldout=0.99"], "all rows are held out"),
        (["model=tinny"], "did you mean 'tiny'"),
        (['sinks=[{name="wandbb"}]'], "did you mean 'wandb'"),
        (["name=a/b"], "name"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    config: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    with pytest.raises(InputError) as refusal:
        train(config, words, tmp_path / "run")
    assert told in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_changed_recipe_or_file_is_named_when_a_run_goes_on(config: Path, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    shutil.copy(EXAMPLES / "chat.jsonl", data)
    words = [f"data.file={data}", "steps=2"]
    run = train(config, words, tmp_path / "run")
    with pytest.raises(InputError, match=r"another configuration: schedule.lr, steps changed"):
        train(config, [f"data.file={data}", "steps=3", "schedule.lr=1e-4"], run)
    train(config, [*words, "checkpoint.every=1"], run)  # decides no weight
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match=r"training data has changed since this run began: 40 rows .* 39 rows .*mine.jsonl"):
        train(config, words, run)


def test_another_base_model_is_named_when_a_run_goes_on(config: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(base_model("tiny"), model)
    words = [f"model={model}", "steps=1"]
    run = train(config, words, tmp_path / "run")
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="base model is not the one that this run began with"):
        train(config, words, run)


def test_a_finished_run_stays_itself_without_its_checkpoints(config: Path, tmp_path: Path) -> None:
    run = train(config, ["steps=1"], tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match="seed changed"):
        train(config, ["steps=1", "seed=9"], run)


def test_a_run_without_a_checkpoint_may_change(config: Path, tmp_path: Path) -> None:
    with pytest.raises(EvergradError, match="match no linear layer"):
        train(config, ['trainer.lora.targets=["q_prj"]', "steps=1"], tmp_path / "run")
    train(config, ["steps=1"], tmp_path / "run")


def test_a_folder_of_the_loop_is_left_alone(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "registry.sqlite").touch()
    with pytest.raises(InputError, match="a run of 'evergrad run'"):
        train(config, [], run)
    assert [path.name for path in run.iterdir()] == ["registry.sqlite"]


def test_a_damaged_checkpoint_is_named_with_the_one_before(config: Path, tmp_path: Path) -> None:
    run = train(config, ["steps=4", "checkpoint.pinned=[2]"], tmp_path / "run")
    whole = load_file(run / "final" / "adapter_model.safetensors")
    (run / "report.json").unlink()
    weights = run / "checkpoints" / "step-000004" / "trainer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(EvergradError, match=r"cannot be read.*remove it to go on from step 2"):
        train(config, ["steps=4", "checkpoint.pinned=[2]"], run)
    shutil.rmtree(weights.parents[1])
    train(config, ["steps=4", "checkpoint.pinned=[2]"], run)
    again = load_file(run / "final" / "adapter_model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_held_out_rows_that_are_trained_too_are_counted(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (EXAMPLES / "chat.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held.jsonl").write_text(lines[0] + lines[1].replace("cancel", "close"))
    words = ["data.heldout=0", f"data.heldout_file={tmp_path / 'held.jsonl'}", "steps=1"]
    run = train(config, words, tmp_path / "run")
    assert "1 of 2 held-out rows are trained, too" in capsys.readouterr().out
    assert report_of(run)["data"]["held-out"]["rows"] == 2


# ── Parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_epoch_has_each_row_once_in_an_order_of_its_own() -> None:
    plan = Plan(rows=10, batch_size=3, seed=1, epochs=2)
    assert plan.steps == 8
    first, second = ([row for step in steps for row in plan.batch(step)] for steps in (range(4), range(4, 8)))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    # The order depends on the step alone: asked for anew and in any order it is the same.
    again = Plan(rows=10, batch_size=3, seed=1, steps=8)
    assert [again.batch(step) for step in reversed(range(8))] == [plan.batch(step) for step in reversed(range(8))]


def test_equal_rows_are_held_out_together() -> None:
    from array import array

    from evergrad.training.data import EncodedRow

    rows = [(EncodedRow(line, array("i", (line % 5, 9)), ((1, 2, 1.0),)),) for line in range(20)]
    kept, held = hold_out(rows, 0.3, seed=0)
    assert len(held) == 8
    assert len(kept) + len(held) == 20
    assert not {row[0].token_ids[0] for row in kept} & {row[0].token_ids[0] for row in held}
    assert {row[0].line for row in hold_out(rows[::-1], 0.3, seed=0)[1]} == {row[0].line for row in held}


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_schedules_rise_to_the_rate_and_come_down(shape: Any) -> None:
    schedule = ScheduleConfig(lr=1.0, warmup_steps=3, shape=shape, final_share=0.1)
    rates = [schedule.at(step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx({"constant": 1.0}.get(shape, 0.1))
    to_nothing = [ScheduleConfig(lr=1.0, shape=shape).at(step, 20) for step in range(20)]
    assert to_nothing[-1] > 0
    reinforcement = RLConfig(steps=20, lr=1.0, warmup_steps=3, final_lr_share=0.1)
    if shape == "linear":
        assert [reinforcement.lr_at(step) for step in range(20)] == rates


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path: Path) -> None:
    from evergrad.config import load_config

    config = load_config(TrainConfig, path)
    assert (EXAMPLES.parents[1] / config.data.file).is_file()
