"""Demonstrations become training samples, verified on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from evergrad.envs import Taskset
from evergrad.rollouts import Renderer, assign_advantages, demonstrate
from evergrad.types import EvergradError, Outcome

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_environment.py"


@pytest.mark.parametrize("name", ["support_desk", str(EXAMPLE)])
async def test_demonstrations_are_verified_and_train_what_was_said(name: str, renderer: Renderer) -> None:
    taskset = Taskset(name)
    tasks = taskset.tasks("train", 12)
    groups = await demonstrate(tasks, taskset, renderer)
    assert [group.rollouts[0].task_id for group in groups] == [task.task_id for task in tasks]
    for task, group in zip(tasks, groups, strict=True):
        (rollout,) = group.rollouts
        assert (rollout.outcome, rollout.reward, rollout.source) == (Outcome.SCORED, 1.0, "demonstration")
        (sample,) = assign_advantages(group, "constant")
        texts = taskset.open(task).demonstrate()
        assert texts is not None
        said = [token for text in texts for token in renderer.reply(text)]
        assert [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask] == said
        assert set(sample.advantages) == {0.0, 1.0}


async def test_a_wrong_or_missing_demonstration_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    source = EXAMPLE.read_text()
    wrong = tmp_path / "wrong.py"
    wrong.write_text(source.replace("f\"It is on shelf {self.facts['shelf']}.\"]", '"It is lost."]'))
    taskset = Taskset(str(wrong))
    with pytest.raises(EvergradError, match=r"its demonstration fails: reward 0\.0"):
        await demonstrate(taskset.tasks("train", 1), taskset, renderer)
    silent = tmp_path / "silent.py"
    silent.write_text(source.replace("def demonstrate", "def show"))
    taskset = Taskset(str(silent))
    with pytest.raises(EvergradError, match="nobody can demonstrate"):
        await demonstrate(taskset.tasks("train", 1), taskset, renderer)


@pytest.mark.parametrize(
    ("replies", "fault", "hint"),
    [
        ('["word " * 60]', "truncated", "raise limits.max_tokens_per_turn in the environment"),
        ('["find(item=x)"] * 7', "out_of_turns", "raise limits.max_turns in the environment"),
        ('["It is lost."]', "reward 0.0", "'evergrad env test' shows what fails"),
    ],
)
async def test_a_demonstration_that_fails_says_what_to_change(
    tmp_path: Path, renderer: Renderer, replies: str, fault: str, hint: str
) -> None:
    path = tmp_path / "failing.py"
    path.write_text(f"{EXAMPLE.read_text()}\n    def demonstrate(self) -> list[str]:\n        return {replies}\n")
    taskset = Taskset(str(path))
    with pytest.raises(EvergradError, match=fault) as caught:
        await demonstrate(taskset.tasks("train", 1), taskset, renderer)
    assert hint in str(caught.value)
