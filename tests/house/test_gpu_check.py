"""The script for a machine with a GPU is rehearsed on every machine, and its comparisons can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_check

from evergrad.registry import make_tiny
from evergrad.training import TrainerConfig
from evergrad.training.trainer import Trainer

ROOT = Path(__file__).parents[2]


def test_the_rehearsal_passes_and_says_that_it_is_one() -> None:
    words = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "rehearsal on the CPU" in done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["rehearsal"] is True
    assert told["passed"] is True
    assert all(each["holds"] for each in told["checks"].values())
    for dtype in ("float32", "bfloat16"):
        assert {f"engine_{dtype}", f"engine_{dtype}_after_flips"} <= told["checks"].keys()
    assert 0 < told["engine"]["tokens_per_s"] < told["engine"]["bound_tokens_per_s"]
    assert told["flip"]["pause_ms"] > 0
    assert told["trainer"]["step_s"] > 0


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> gpu_check.Case:
    folder = make_tiny(tmp_path_factory.mktemp("model") / "tiny")
    trainer = Trainer(TrainerConfig(model=str(folder), method="full", device="cpu"))
    tokens = gpu_check.random_tokens(folder, 48, "scored")
    return gpu_check.Case(folder, torch.device("cpu"), gpu_check.REHEARSAL, trainer, tokens)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-3), ("bfloat16", 2e-2)])
def test_logprobs_that_are_off_are_found(case: gpu_check.Case, dtype: str, error: float) -> None:
    right = gpu_check.transformers_logprobs(case, torch.float32, trained=False)
    assert gpu_check.compare(right.tolist(), case, dtype)["holds"]
    assert not gpu_check.compare((right + error).tolist(), case, dtype)["holds"]
    assert not gpu_check.compare([float("nan")] * len(right), case, dtype)["holds"]


def test_old_weights_are_not_taken_for_new_ones(case: gpu_check.Case) -> None:
    old = gpu_check.transformers_logprobs(case, torch.float32, trained=False)
    batch = gpu_check.make_batch(case)
    case.trainer.step(batch, gpu_check.LossConfig(), lr=1e-3)
    for dtype in ("float32", "bfloat16"):
        assert not gpu_check.compare(old.tolist(), case, dtype, trained=True)["holds"]
    assert gpu_check.compare(case.trainer.logprobs(case.scored), case, "bfloat16", trained=True)["holds"]
