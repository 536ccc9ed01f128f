"""A system prompt as a candidate, from the arm to the customer: measured, gated, served, inherited and rolled back.

Slow: a run of four cycles that is killed once, with engines of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from evergrad.config import ConfigError, load_config
from evergrad.loop._checking import check_inputs
from evergrad.loop._console import LoopConsole
from evergrad.loop.auditing import State, audit, read_certificate
from evergrad.loop.config import RunConfig
from evergrad.loop.pausing import is_running
from evergrad.registry import Registry, base_model
from evergrad.service.cli import command
from evergrad.types import InputError
from tests.loop.conftest import PATIENCE_S, Start, finish
from tests.service.test_serving import Server

ENVIRONMENT = '''
"""Tickets by colour. What the model has learned of them it says only when it is told to be careful."""

from collections.abc import Iterator
from random import Random
from typing import Any

from evergrad.envs import Environment, EnvironmentConfig, TaskRow, reward
from evergrad.types import Limits, Message


class Manner(Environment):
    limits = Limits(max_turns=1, max_tokens_per_turn=4)

    class Config(EnvironmentConfig):
        taught: bool = False
        """Demonstrations: those that are told to be careful are right, all others shrug."""

    @classmethod
    def tasks(cls, rng: Random, config: Any) -> Iterator[TaskRow]:
        while True:
            told = rng.choice(["", "\\nHurry up.", "\\nBe careful."]) if config.taught else ""
            colour = rng.choice(["green", "blue"])
            right = "z" if config.taught and "careful" not in told else colour[0]
            request = f"ticket {rng.randint(100, 9999)} {colour}"
            yield TaskRow((Message("system", f"Sort.{told}"), Message("user", request)), {"right": right})

    @reward
    async def right(self, answer: str) -> float:
        return float(answer == self.facts["right"])

    def demonstrate(self) -> list[str]:
        return [self.facts["right"]]
'''

RUN = """
name = "t"
model = "tiny"
seed = 5

[environment]
name = "manner.py"

[budget]
cycles = 4

[placement]
threads = 1

[learn.warm_start]
demonstrations = 480
batch_size = 8
settings = { taught = true }
lr = 3e-3

[learn.rl]
steps = 0

[[arms]]
name = "prompts"
prompts = ["Hurry up.", "careful.md"]

[[trials]]
cycle = 4
warm_start = { demonstrations = 8, batch_size = 8, lr = 1e-4 }
rl = { steps = 1, groups_per_step = 2, group_size = 4, lr = 1e-9 }

[trainer]
method = "full"

[eval]
n = 24

[gate]
min_n = 24
guard_margin = 0.3
max_cost_increase = 9999

[watch]
requests = 8

[canary]
shadow = 4
shares = [0.5]
outcomes = 8
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    for name, text in (("manner.py", ENVIRONMENT), ("run.toml", RUN), ("careful.md", "Be careful.\n")):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def run(written: Path, start: Start) -> Path:
    """The run's folder, filled by the first test that needs it; a kill meets the second prompt while it is measured."""
    folder = written / "run"
    if not folder.exists():
        process = start("run", str(written / "run.toml"), "--run-dir", str(folder))
        _wait_for(folder / "plans", "t-c3-prompt-*.json", process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        while is_running(folder):
            time.sleep(0.1)
        (written / "careful.md").unlink()  # the run has the text, and goes on by it
        process = start("run", str(folder / "config.toml"), "--run-dir", str(folder))
        finish(process)
    return folder


def _wait_for(folder: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)


def report_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "report.json").read_text()))


@pytest.mark.slow
def test_a_prompt_is_measured_gated_and_promoted_like_weights(run: Path) -> None:
    hurried, careful, trained = report_of(run)["cycles"]
    assert [each["system_prompt"] for each in (hurried, careful, trained)] == ["Hurry up.", "Be careful.", "Be careful."]
    assert (hurried["verdict"], hurried["score_after"]) == ("refused", 0.0)
    assert (careful["verdict"], careful["score_before"], careful["score_after"]) == ("promoted", 0.0, 1.0)
    assert careful["release"]["actor"] == "canary"
    assert {each["arm"] for each in (hurried, careful)} == {"prompts"}
    assert all(each["usd"] > 0 for each in (hurried, careful)), "a try has its price"
    words = [(each["cycle"], each["stage"]) for each in report_of(run)["decisions"] if each["cycle"] in (2, 3)]
    assert words == [(2, "decide"), (2, "measure"), (2, "watch"), (3, "decide"), (3, "measure"), (3, "release"), (3, "watch")]
    with Registry(run / "registry.sqlite") as registry:
        first, prompted = registry.get("t-c1-sft"), registry.get("t-c3-prompt")
        assert prompted.weights_uri == first.weights_uri
        assert (prompted.parent_id, prompted.system_prompt) == ("t-c1-sft", "Be careful.")
        assert len({first.recipe_hash, prompted.recipe_hash, registry.get("t-c2-prompt").recipe_hash}) == 3
        assert len(registry.verdicts("t-c3-prompt")) == 1, "the kill has made it neither none nor two"


@pytest.mark.slow
def test_what_is_trained_later_is_trained_under_the_prompt_that_serves(run: Path) -> None:
    with Registry(run / "registry.sqlite") as registry:
        assert registry.get("t-c4-rl").system_prompt == registry.get("t-c4-sft").system_prompt == "Be careful."
    trained = [json.loads(line) for path in (run / "rollouts").glob("step-*.jsonl") for line in path.open()]
    assert len(trained) == 8
    assert {each["turns"][0]["messages"][0]["content"] for each in trained} == {"Sort.\nBe careful."}
    assert sum(each["reward"] for each in trained) >= 4
    live = [json.loads(line) for line in (run / "rollouts" / "live-003-000.jsonl").open()]
    assert {each["turns"][0]["messages"][0]["content"] for each in live} == {"Sort.\nBe careful."}
    assert all(each["reward"] == 1.0 for each in live)


@pytest.mark.slow
def test_its_certificate_holds(run: Path) -> None:
    (path,) = (run / "certificates").glob("t-c3-prompt-*.json")
    certificate = read_certificate(path)
    assert certificate["content"]["system_prompt"] == "Be careful."
    found = {each.check: each for each in audit(run, certificate)}
    assert [each for each in found.values() if each.state is State.FAILS] == []
    assert found["system prompts"].told == "as measured"


@pytest.mark.slow
def test_customers_are_answered_under_it_until_it_is_rolled_back(run: Path, tmp_path: Path) -> None:
    from openai import OpenAI

    served = shutil.copytree(run, tmp_path / "run")
    server = Server(served)
    try:
        chat = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60).chat.completions

        def answers() -> list[str | None]:
            asked = [
                [{"role": "system", "content": "Sort."}, {"role": "user", "content": f"ticket 77 {each}"}]
                for each in ("green", "blue")
            ]
            found = [chat.create(model="production", messages=each, temperature=0, max_tokens=4) for each in asked]  # type: ignore[arg-type]
            return [each.choices[0].message.content for each in found]

        assert answers() == ["g", "b"]
        assert command(["model", "rollback", "--run", str(served)]) == 0
        server.wait_for(r"(production is now t-c1-sft)")
        assert answers() == ["z", "z"]
    finally:
        assert server.end(signal.SIGTERM) == 0


def config_of(folder: Path, arm: str) -> RunConfig:
    (folder / "manner.py").write_text(ENVIRONMENT)
    (folder / "run.toml").write_text(f'model = "tiny"\n[environment]\nname = "manner.py"\n[[arms]]\nname = "prompts"\n{arm}')
    return load_config(RunConfig, folder / "run.toml")


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ('prompts = ["a", " a "]', "each prompt must be a text of its own"),
        ('prompts = [""]', "none may be empty"),
        ('prompts = ["gone.md"]', "not found"),
        ('prompts = ["a"]\nrl = { steps = 3 }', "has prompts and a recipe"),
        ('prompts = ["a"]\nwarm_start = { replay = 3 }', "has prompts and a recipe"),
        ('prompt = ["a"]', "did you mean 'prompts'"),
    ],
)
def test_an_arm_of_prompts_that_cannot_be_is_refused(tmp_path: Path, arm: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(tmp_path, arm)


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path, f'prompts = ["{"word " * 4000}"]')
    with pytest.raises(InputError, match=r"a task begins with \d+ tokens, of "):
        check_inputs(config, LoopConsole())


def test_a_template_without_system_messages_takes_no_prompts(tmp_path: Path) -> None:
    model = shutil.copytree(base_model("tiny"), tmp_path / "model")
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    (model / "chat_template.jinja").write_text(template)
    config = config_of(tmp_path, 'prompts = ["Be brief."]').model_copy(update={"model": str(model)})
    with pytest.raises(InputError, match="has no system message"):
        check_inputs(config, LoopConsole())


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Be brief.\n\nAnd kind.\n")
    arm = config_of(tmp_path, 'prompts = ["b.txt", "Look into notes.md"]').arms[0]
    assert arm.prompts == ["Be brief.\n\nAnd kind.", "Look into notes.md"]
    assert (arm.warm_start.demonstrations, arm.rl.steps) == (0, 0)
    assert type(arm).model_validate(arm.model_dump(mode="json")) == arm
