"""Methods that take more than a loss and a group's rewards, through a whole run of the loop."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from tests.loop.conftest import Start, workers
from tests.loop.test_resume import finish, wait_for, weights_hash

PPO_WITH_A_CRITIC = """lr = 1e-3
advantage = "generalized"
updates = { epochs = 2, mini_batches = 2 }
overlong = { max_length = 40, cache = 39 }
loss = { name = "ppo", options = { anchor = "proximal", correction = { cap = 2.0 } } }

[critic]
hidden = 16
"""


def test_ppo_with_a_critic_ends_in_the_same_bits_when_it_was_killed(tiny_config: Path, tmp_path: Path, start: Start) -> None:
    text = tiny_config.read_text().replace("lr = 1e-3\n", PPO_WITH_A_CRITIC).replace("group_size = 4", "group_size = 1")
    tiny_config.write_text(text.replace("steps = 3", "steps = 2"))
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "one")))
    killed = start("run", str(tiny_config), "--run-dir", str(tmp_path / "two"))
    wait_for("rollouts", tmp_path / "two", killed)
    children = workers(killed.pid)
    killed.kill()
    killed.wait()
    psutil.wait_procs(children, timeout=15)
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "two")))
    steps = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    learned = [step for step in steps if step["kind"] == "rl"]
    assert [step["updated"] for step in learned] == [4, 4]
    for step in learned:
        assert step["value_loss"] >= 0
        assert step["overlong_penalty_mean"] < 0
        assert step["ratio_max_error"] > 0
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")
