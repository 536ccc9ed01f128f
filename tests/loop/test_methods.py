"""Methods that take more than a loss and a group's rewards, through a whole run of the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from evergrad.registry import make_tiny
from tests.loop.conftest import LETTERS, Start, finish, workers
from tests.loop.test_resume import wait_for, weights_hash

PPO_WITH_A_CRITIC = """lr = 1e-3
advantage = "generalized"
updates = { epochs = 2, mini_batches = 2 }
overlong = { max_length = 40, cache = 39 }
loss = { name = "ppo", options = { anchor = "proximal", correction = { cap = 2.0 } } }

[critic]
hidden = 16
"""


DISTILLATION = """lr = 1e-3
advantage = "constant"
loss = { name = "reverse_kl" }
distill = { model = "TEACHER" }
"""
HINTS = """
    def hint(self) -> str:
        return f"Say {self.facts['right'][-1]}."
"""


def killed_at_its_second_step(config: Path, run: Path, start: Start) -> None:
    """A run that was killed while it rolled out, and then finished."""
    killed = start("run", str(config), "--run-dir", str(run))
    wait_for("rollouts", run, killed)
    children = workers(killed.pid)
    killed.kill()
    killed.wait()
    psutil.wait_procs(children, timeout=15)
    finish(start("run", str(config), "--run-dir", str(run)))


def learned_steps(run: Path) -> list[dict[str, Any]]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [step for step in steps if step["kind"] == "rl"]


# Two whole runs each, one of them twice: `make test-slow`. What a killed trainer keeps is tested beside the trainer, too.
@pytest.mark.slow
def test_ppo_with_a_critic_ends_in_the_same_bits_when_it_was_killed(tiny_config: Path, tmp_path: Path, start: Start) -> None:
    text = tiny_config.read_text().replace("lr = 1e-3\n", PPO_WITH_A_CRITIC).replace("group_size = 4", "group_size = 1")
    tiny_config.write_text(text.replace("steps = 3", "steps = 2"))
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "one")))
    killed_at_its_second_step(tiny_config, tmp_path / "two", start)
    learned = learned_steps(tmp_path / "one")
    assert [step["updated"] for step in learned] == [4, 4]
    for step in learned:
        assert step["value_loss"] >= 0
        assert step["overlong_penalty_mean"] < 0
        assert step["ratio_max_error"] > 0
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")


KL = """lr = 1e-3
advantage = "group_normalized"
loss = { name = "grpo", options = { kl_coef = 0.04, kl_weighted = false } }
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_kl_is_to_what_the_stage_began_with(tiny_config: Path, tmp_path: Path, start: Start, method: str) -> None:
    """A LoRA keeps that itself; under full fine-tuning a worker of its own holds it."""
    text = tiny_config.read_text().replace("lr = 1e-3\n", KL)
    tiny_config.write_text(text)
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "run")))
    if method == "lora":  # an adapter of random weights would learn nothing: it begins where the other one came to
        text = text.replace('"tiny"', f'"{tmp_path / "run" / "versions" / "t-c1-sft"}"').replace('"full"', '"lora"')
        tiny_config.write_text(text.replace("= 96", "= 8"))
        finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "lora")))
        assert (tmp_path / "lora" / "versions" / "t-c1-rl" / "adapter_config.json").exists()
    learned = learned_steps(tmp_path / ("lora" if method == "lora" else "run"))
    assert learned[0]["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert 1e-5 < learned[1]["reference_kl"] < learned[2]["reference_kl"]


@pytest.mark.slow
def test_a_run_with_a_reference_of_its_own_ends_in_the_same_bits_when_it_was_killed(
    tiny_config: Path, tmp_path: Path, start: Start
) -> None:
    tiny_config.write_text(tiny_config.read_text().replace("lr = 1e-3\n", KL))
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "one")))
    killed_at_its_second_step(tiny_config, tmp_path / "two", start)
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")


@pytest.mark.slow
def test_distillation_from_another_model_ends_in_the_same_bits_when_it_was_killed(
    tiny_config: Path, tmp_path: Path, start: Start
) -> None:
    teacher = make_tiny(tmp_path / "teacher", seed=7, hidden_size=64)
    text = tiny_config.read_text().replace("lr = 1e-3\n", DISTILLATION.replace("TEACHER", str(teacher)))
    tiny_config.write_text(text.replace("group_size = 4", "group_size = 2"))
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "one")))
    killed_at_its_second_step(tiny_config, tmp_path / "two", start)
    learned = learned_steps(tmp_path / "one")
    assert len(learned) == 3
    # A teacher that knows nothing draws the student, who is sure of two letters, back to all of them.
    assert learned[0]["teacher_kl"] > learned[-1]["teacher_kl"] > 0
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["{ hint = true }", '{ version = "t-c1-sft", hint = true }'])
def test_a_student_learns_from_itself_with_the_answer_at_hand(
    tiny_config: Path, tmp_path: Path, start: Start, teacher: str
) -> None:
    (tmp_path / "hinted.py").write_text(LETTERS.read_text() + HINTS)
    text = tiny_config.read_text().replace("lr = 1e-3\n", DISTILLATION.replace('{ model = "TEACHER" }', teacher))
    text = text.replace(str(LETTERS), "hinted.py").replace("steps = 3", "steps = 2").replace("= 96", "= 16")
    tiny_config.write_text(text if "version" in teacher else text.replace('"full"', '"lora"'))
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "run")))
    learned = learned_steps(tmp_path / "run")
    assert [step["updated"] for step in learned] == [1, 1]
    assert all(step["loss"] > 0 for step in learned), "the hint makes no difference, or did not arrive"
