"""One clear error each, a non-zero exit code, and nothing half-written."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from evergrad.loop.controller import run_loop
from evergrad.registry import base_model
from evergrad.types import EvergradError
from tests.loop.conftest import Start, half_written


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
        ("[learn.rl]", "[learn.rl]\ntemperature = 0", ["temperature", "greater than 0"]),
        ("threads = 1", 'threads = 1\nmode = "disaggregated"', ["max_off_policy_steps must be >= 1"]),
        ("lr = 1e-3", 'lr = 1e-3\nmax_off_policy_steps = 2\nloss = { name = "cross_entropy" }', ["does not correct"]),
        ("lr = 1e-3", 'lr = 1e-3\nloss = { name = "dpo" }', ["preference pairs", "policy_gradient"]),
        ("lr = 1e-3", 'lr = 1e-3\nloss = { name = "reverse_kl" }', ["teacher"]),
        ("lr = 1e-3", "lr = 1e-3\nloss = { options = { kl_coef = 0.1 } }", ["frozen reference", "method = 'lora'"]),
        ("lr = 1e-3", 'lr = 1e-3\nadvantage = "constant"', ["ignores the reward", "group_mean"]),
        ("group_size = 4", 'group_size = 1\nadvantage = "group_normalized"', ["group_normalized", "group_size >= 2"]),
        ("[eval]\nn = 12", "[eval]\nn = 11", ["eval.n = 11", "gate.min_n"]),
        ("requests = 4", 'requests = 0\n[[traffic.changes]]\nsettings = { contract = "v2" }', ["watch.requests >= 1"]),
        ('method = "full"', 'method = "full"\noptimizer = { lr = 1e-3 }', ["learn.rl.lr", "trainer.optimizer"]),
        ("min_n = 12", 'min_n = 12\nprimary = "letters@v1"', ["gate.primary"]),
        ("[environment]", "[environmet]", ["environmet", "did you mean 'environment'"]),
        ('model = "tiny"', 'model = "tinny"', ["tinny", "tiny"]),
        ('difficulty = "easy"', 'dificulty = "easy"', ["dificulty", "difficulty"]),
        ("seed = 5", "seed = ", ["TOML"]),
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
