"""One clear error each, a non-zero exit code, and nothing half-written."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from evergrad.config import load_config
from evergrad.ledger import Ledger
from evergrad.loop._checking import check_folder
from evergrad.loop._folder import LoopState, RunFolder, Stage
from evergrad.loop.config import RunConfig
from evergrad.loop.controller import run_loop
from evergrad.registry import Registry, base_model, make_tiny
from evergrad.types import EvergradError, ModelVersion
from tests.loop.conftest import Start, half_written

DISTILL = 'advantage = "constant"\nloss = { name = "reverse_kl" }\ndistill = '


def refused(process: subprocess.Popen[str], *words: str) -> None:
    output, _ = process.communicate(timeout=240)
    assert process.returncode not in (0, None), output
    assert output.count("error:") == 1, output
    assert "Traceback" not in output
    for word in words:
        assert word in output, output


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("group_size = 4", "grup_size = 4", ["learn.rl.grup_size", "did you mean 'group_size'"]),
        ("[placement]", "[budget]\nusd = 0\n[placement]", ["budget.usd", "greater than 0"]),
        ("group_size = 4", "group_size = 1", ["group_size >= 2"]),
        ("[learn.rl]", "[learn.rl]\ntemperature = 0", ["temperature 0 is greedy", "set 1.0"]),
        ("[learn.rl]", "[learn.rl]\ntop_p = 0.9", ["top_p samples from a part", "leave top_p out"]),
        ("lr = 1e-3", "lr = 1e-3\noverlong = { max_length = 900, cache = 9 }", ["overlong", "no rollout is longer", "at most"]),
        (
            "lr = 1e-3",
            'lr = 1e-3\nmax_off_policy_steps = 1\nloss = { name = "ppo", options = { anchor = "proximal" } }',
            ["does not correct", "behaviour"],
        ),
        ("threads = 1", 'threads = 1\nmode = "disaggregated"', ["max_off_policy_steps must be >= 1"]),
        ("lr = 1e-3", 'lr = 1e-3\nmax_off_policy_steps = 2\nloss = { name = "cross_entropy" }', ["does not correct"]),
        ("lr = 1e-3", 'lr = 1e-3\nloss = { name = "dpo" }', ["preference pairs", "policy_gradient"]),
        ("lr = 1e-3", 'lr = 1e-3\nloss = { name = "reverse_kl" }', ["learns from a teacher", "rl.distill", "policy_gradient"]),
        ("lr = 1e-3", f"lr = 1e-3\n{DISTILL}{{ }}", ["the student itself", "hint = true"]),
        ("lr = 1e-3", f'lr = 1e-3\n{DISTILL}{{ model = "tiny", version = "t-c1-sft" }}', ["one teacher", "not both"]),
        ("lr = 1e-3", f"lr = 1e-3\n{DISTILL}{{ hint = true }}", ["keeps no frozen reference", "t-c1-sft"]),
        ("lr = 1e-3", f'lr = 1e-3\n{DISTILL}{{ version = "t-c1-sfd" }}', ["t-c1-sfd", "did you mean 't-c1-sft'"]),
        ("lr = 1e-3", f'lr = 1e-3\n{DISTILL}{{ version = "t-c1-sft" }}', ["its own teacher", "hint = true"]),
        ("lr = 1e-3", f'lr = 1e-3\n{DISTILL}{{ model = "tiny", hint = true }}', ["letters", "gives no hints", "hint(self)"]),
        ("lr = 1e-3", f'lr = 1e-3\n{DISTILL}{{ model = "tinny" }}', ["tinny", "did you mean 'tiny'"]),
        ("lr = 1e-3", f'lr = 1e-3\noverlong = {{ max_length=4, cache=3 }}\n{DISTILL}{{ model = "tiny" }}', ["overlong out"]),
        ("lr = 1e-3", 'lr = 1e-3\nadvantage = "constant"\ndistill = { model = "tiny" }', ["asks no teacher", "reverse_kl"]),
        (
            "lr = 1e-3",
            'lr = 1e-3\nloss = { name = "reverse_kl" }\ndistill = { model = "tiny" }',
            ["takes the place of rewards", "advantage = 'constant'"],
        ),
        ("lr = 1e-3", 'lr = 1e-3\nupdates = { epochs = 2 }\nloss = { name = "cross_entropy" }', ["takes no ratio", "ppo"]),
        ("lr = 1e-3", "lr = 1e-3\nupdates = { mini_batches = 5 }", ["updates.mini_batches = 5", "groups_per_step"]),
        ("lr = 1e-3", 'lr = 1e-3\nadvantage = "constant"', ["ignores the reward", "group_mean"]),
        ("lr = 1e-3", "lr = 1e-3\noverlong = { max_length = 8, cache = 9 }", ["overlong", "set it to 8 at most"]),
        ("lr = 1e-3", 'lr = 1e-3\nadvantage = "generalized"', ["a critic's values", "[critic] table", "reinforce_pp"]),
        ("[placement]", "[critic]\n[placement]", ["no stage would ask the critic", "generalized"]),
        ("lr = 1e-3", "lr = 1e-3\ngae = { lam = 0.9 }", ["does not read gae", "generalized"]),
        ("lr = 1e-3", "lr = 1e-3\nturn_discount = 0.9", ["does not read turn_discount", "turn_mean"]),
        ("lr = 1e-3", 'lr = 1e-3\nadvantage = "reinforce_pp"\nreplace_groups = 2', ["replace_groups = 0", "group_mean"]),
        (
            "groups_per_step = 4\ngroup_size = 4",
            'groups_per_step = 1\ngroup_size = 1\nadvantage = "reinforce_pp"',
            ["which has one", "groups_per_step"],
        ),
        ("group_size = 4", 'group_size = 1\nadvantage = "group_normalized"', ["group_normalized", "group_size >= 2"]),
        ("[eval]\nn = 12", "[eval]\nn = 11", ["eval.n = 11", "gate.min_n"]),
        ("requests = 4", 'requests = 0\n[[traffic.changes]]\nsettings = { contract = "v2" }', ["watch.requests >= 1"]),
        ('method = "full"', 'method = "full"\noptimizer = { lr = 1e-3 }', ["learn.rl.lr", "trainer.optimizer"]),
        ("min_n = 12", 'min_n = 12\nprimary = "letters@v1"', ["gate.primary"]),
        ("[environment]", "[environmet]", ["environmet", "did you mean 'environment'"]),
        ('model = "tiny"', 'model = "tinny"', ["tinny", "tiny"]),
        ('difficulty = "easy"', 'dificulty = "easy"', ["dificulty", "difficulty"]),
        ("seed = 5", "seed = ", ["TOML"]),
        ("seed = 5", "seed = true", ["seed", "true is not a number"]),
        ('name = "t"', 'name = "../t"', ["name", "pattern"]),
        ('name = "t"', 'name = ""', ["name", "pattern"]),
        ("threads = 1", "threads = 4096", ["placement.threads = 4096", "cores"]),
        ("seed = 5", 'seed = 5\nprice_book = "absent.toml"', ["not found", "absent.toml"]),
        ("min_n = 12", 'min_n = 12\nguards = { "letters@v3" = 0.1 }', ["gate.guards", "letters@v3", "did you mean 'letters@v"]),
        (
            "requests = 4",
            'requests = 4\n[[traffic.changes]]\nsettings = { contract = "v2" }\n[[traffic.changes]]\n'
            'settings = { contract = "v1", difficulty = "easy" }',
            ["traffic.changes.1", "'letters@v1'", "difficulty = 'easy' and 'all'", "contract of its own"],
        ),
        ("[eval]\nn = 12", "[eval]\nn = 900000", ["eval.n = 900000", "letters@v", "gave only"]),
        ("requests = 4", "requests = 900000", ["watch.requests = 900000", "gave only"]),
        ("demonstrations = 96", "demonstrations = 900000", ["warm_start.demonstrations = 900000", "gave only"]),
        ("letters.py", "absent.py", ["environment.name: not found: ", "absent.py", "check the path"]),
    ],
)
def test_bad_configuration(tiny_config: Path, before: str, after: str, words: list[str]) -> None:
    text = tiny_config.read_text()
    assert before in text
    tiny_config.write_text(text.replace(before, after))
    run = tiny_config.parent / "run"
    with pytest.raises(EvergradError) as refusal:
        run_loop(tiny_config, [], run)
    for word in words:
        assert word in str(refusal.value)
    assert not run.exists(), list(run.rglob("*"))


def test_a_teacher_with_another_tokenizer_is_refused_by_name(tiny_config: Path, tmp_path: Path) -> None:
    teacher = make_tiny(tmp_path / "teacher", vocab_size=500)
    tiny_config.write_text(tiny_config.read_text().replace("lr = 1e-3", f'lr = 1e-3\n{DISTILL}{{ model = "{teacher}" }}'))
    run = tmp_path / "run"
    with pytest.raises(EvergradError, match=rf"another tokenizer: token 500 is '.+' for the student, None for it.*{teacher}"):
        run_loop(tiny_config, [], run)
    assert not run.exists()


def begun(run: Path, tiny_config: Path) -> RunConfig:
    """A folder as a finished run leaves it, with one version and no weights."""
    config = load_config(RunConfig, tiny_config)
    folder = RunFolder(run, config)
    with Registry(run / "registry.sqlite") as registry, Ledger(run / "ledger.sqlite"):
        registry.register(ModelVersion("t-c1-sft", None, 1, "versions/t-c1-sft", "tiny", "ab12", "2026-01-01T00:00:00+00:00"))
        registry.promote("production", "t-c1-sft", bootstrap=True)
    folder.save_state(LoopState(stage=Stage.DONE, deployed={}))
    folder.close()
    return config


@pytest.mark.parametrize("name", ["state.json", "registry.sqlite", "ledger.sqlite"])
def test_a_file_that_was_removed_is_named(tiny_config: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    begun(run, tiny_config)
    (run / name).unlink()
    with pytest.raises(EvergradError, match=rf"{name} is missing.*Next: put back a copy"):
        run_loop(tiny_config, [], run)
    assert not (run / name).exists()


def test_a_checkpoint_that_was_removed_is_named(tiny_config: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", begun(tmp_path / "run", tiny_config))
    folder.save_state(LoopState(stage=Stage.LEARN, checkpoint="c001-learn-00002"))
    with pytest.raises(EvergradError, match="checkpoints/c001-learn-00002 is missing"):
        check_folder(folder)
    folder.close()


@pytest.mark.parametrize("broken", [None, "", '{"cost": 3}'])
def test_a_finished_run_writes_its_report_again(tiny_config: Path, tmp_path: Path, broken: str | None) -> None:
    run = tmp_path / "run"
    begun(run, tiny_config)
    if broken is not None:
        (run / "report.json").write_text(broken)
    run_loop(tiny_config, [], run)
    assert json.loads((run / "report.json").read_text())["versions"][0]["aliases"] == ["production"]
    assert (run / "report.html").exists()


def test_a_budget_of_dollars_needs_a_price(tiny_config: Path, tmp_path: Path) -> None:
    book = tmp_path / "prices.toml"
    book.write_text("[prices.gpu_s]\nusd = 1\n")
    run = tmp_path / "run"
    with pytest.raises(EvergradError, match=r"no price for 'cpu_core_s'.*budget.minutes"):
        run_loop(tiny_config, ["budget.usd=1", f"price_book={book}"], run)
    assert not run.exists()


def test_a_misspelt_key_on_the_command_line(tiny_config: Path, start: Start, tmp_path: Path) -> None:
    process = start("run", str(tiny_config), "--set", "learn.rl.stepz=1", "--run-dir", str(tmp_path / "run"))
    refused(process, "learn.rl.stepz", "did you mean 'steps'")
    assert not (tmp_path / "run").exists()


def test_missing_file(tmp_path: Path, start: Start) -> None:
    refused(start("run", str(tmp_path / "absent.toml")), "not found", "absent.toml")


def test_environment_that_raises_at_import(tiny_config: Path, start: Start, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no database')\n")
    text = tiny_config.read_text()
    line = next(line for line in text.splitlines() if line.startswith("name = ") and "letters" in line)
    tiny_config.write_text(text.replace(line, f'name = "{tmp_path / "broken.py"}"'))
    refused(start("run", str(tiny_config), "--run-dir", str(tmp_path / "run")), "no database", "broken.py")
    assert not (tmp_path / "run").exists()


def test_model_without_chat_template(tiny_config: Path, start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base_model("tiny"), folder)
    (folder / "chat_template.jinja").unlink()
    tiny_config.write_text(tiny_config.read_text().replace('model = "tiny"', f'model = "{folder}"'))
    refused(start("run", str(tiny_config), "--run-dir", str(tmp_path / "run")), "chat template")
    assert not (tmp_path / "run" / "versions").exists()


def test_folder_of_another_run(tiny_config: Path, start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('name = "other"\n')
    refused(start("run", str(tiny_config), "--run-dir", str(run)), "another configuration", "learn", "--run-dir")
    assert (run / "config.toml").read_text() == 'name = "other"\n'


def test_full_disk_leaves_the_last_whole_state(tiny_config: Path, start: Start, tmp_path: Path) -> None:
    """A limit on file size stands in for the disk: large files cannot be written, small ones can."""
    run = tmp_path / "run"
    limit = 200_000
    tiny_config.write_text(
        tiny_config.read_text().replace("demonstrations = 96", "demonstrations = 16").replace("steps = 3", "steps = 1")
    )

    def no_large_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    base_model("tiny")  # made before, so that the run itself is what meets the limit
    process = start("run", str(tiny_config), "--run-dir", str(run), before=no_large_files)
    output, _ = process.communicate(timeout=240)
    assert process.returncode not in (0, None), output
    assert "Traceback" not in output
    assert half_written(run) == []
    process = start("run", str(tiny_config), "--run-dir", str(run))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
