"""What a user writes, how it is checked, and what happens when it is wrong."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.config import ConfigError
from evergrad.envs import (
    SPLITS,
    EnvError,
    EnvironmentFault,
    TaskRow,
    Taskset,
    VerifierFault,
    _author,
    _taskset,
    content_hash,
    environment_names,
    load_environment,
    play,
)
from evergrad.envs import test_environment as admit
from evergrad.envs._taskset import split_of

Write = Callable[[str], str]
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_environment.py"

SMALL = """
class Small(Environment):
    @classmethod
    def tasks(cls, rng, config):
        for number in range(300):
            yield TaskRow(f"What is {number}?", {"number": number})

    @reward
    async def right(self, answer: str) -> float:
        return float(answer == str(self.facts["number"]))
"""


def test_the_example_is_a_whole_environment_in_thirty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    taskset = Taskset(str(EXAMPLE))
    assert taskset.name == "warehouse"
    assert len(taskset.tasks("train", 2_000)) == 2_000
    assert taskset.tasks("gate", 1)[0].prompt[0].content == "Tools:\nfind(item)\nCall one tool or answer."


def test_envs_and_rollouts_load_no_torch() -> None:
    code = "import sys, evergrad.envs, evergrad.rollouts; raise SystemExit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_reward_parts_are_weighted_and_reported(write: Write) -> None:
    path = write("""
class Weighted(Environment):
    @classmethod
    def tasks(cls, rng, config):
        for number in range(300):
            yield TaskRow(f"What is {number}?", {"number": number})

    @reward
    async def right(self, answer: str) -> float:
        return 1.0

    @reward(weight=0.5)
    async def short(self, answer: str) -> float:
        return float(len(answer) < 5)

    @reward(weight=0.0)
    async def length(self, answer: str) -> float:
        return len(answer)
""")
    taskset = Taskset(path)
    score = await play(taskset, taskset.tasks("train", 1)[0], ["yes"])
    assert score.reward == 1.5
    assert score.parts == {"right": 1.0, "short": 1.0, "length": 3.0}


async def test_state_belongs_to_one_rollout(write: Write) -> None:
    path = write("""
class Counting(Environment):
    @classmethod
    def tasks(cls, rng, config):
        for number in range(300):
            yield TaskRow(f"Count {number}.", {"number": number})

    async def setup(self):
        self.count = 0

    @tool
    async def up(self) -> int:
        self.count += 1
        return self.count

    @reward
    async def counted(self, answer: str) -> float:
        return float(self.count == 2 and [call.result for call in self.calls] == ["1", "2"])
""")
    taskset = Taskset(path)
    task = taskset.tasks("train", 1)[0]
    for _ in range(3):
        assert (await play(taskset, task, ["up()", "up()", "done"])).reward == 1.0
    assert (await play(taskset, task, ["up()", "done"])).reward == 0.0


async def test_a_failing_setup_is_a_named_fault(write: Write) -> None:
    taskset = Taskset(write(SMALL + "    async def setup(self):\n        raise OSError('no database')\n"))
    with pytest.raises(EnvironmentFault, match="setup raised OSError: no database"):
        await play(taskset, taskset.tasks("train", 1)[0], ["1"])


async def test_an_environment_without_tools_takes_any_text_as_the_answer(write: Write) -> None:
    taskset = Taskset(write(SMALL.replace("str(self.facts", "'f(x=%s)' % (self.facts")))
    task = taskset.tasks("train", 1)[0]
    assert [message.role for message in task.prompt] == ["user"]
    assert (await play(taskset, task, [f"f(x={task.metadata['number']})"])).reward == 1.0


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise RuntimeError('boom')", r"raised at import: RuntimeError: boom \(.*my_environment\.py:2\)"),
        ("import no_such_package", r"raised at import: ModuleNotFoundError: No module named 'no_such_package'"),
        ("def broken(:", r"raised at import: SyntaxError: .*my_environment\.py:2"),
        ("raise SystemExit(0)", r"raised at import: SystemExit: 0"),
        ("raise GeneratorExit", r"raised at import: GeneratorExit \(.*my_environment\.py:2\)"),
        ("import asyncio\nraise asyncio.CancelledError", r"raised at import: CancelledError \(.*my_environment\.py:3\)"),
        ("raise BaseException('odd')", r"raised at import: BaseException: odd \(.*my_environment\.py:2\)"),
        ("x = 1", "found none"),
        (SMALL + SMALL.replace("Small", "Other"), "found Small, Other"),
        ("class A(Environment):\n    @tool\n    def act(self): ...", r"must be an async method \(A\.act\)"),
        ("class A(Environment):\n    @tool\n    async def act(self, x): ...", r"parameter 'x' needs a type"),
        ("class A(Environment):\n    @tool\n    async def act(self, x: dict): ...", r"parameter 'x' needs a type"),
        ("class A(Environment):\n    @tool\n    async def act(self, x: 'Nope'): ...", r"cannot be resolved.*Nope"),
        ("class A(Environment):\n    @tool\n    async def act(self, *x: int): ...", r"no name the model could write"),
        ("class A(Environment):\n    @reward\n    async def r(self): ...", r"takes self and the answer \(A\.r\)"),
        ("class A(Environment):\n    @reward\n    def r(self, answer): ...", r"must be an async method"),
    ],
)
def test_a_broken_environment_is_one_clear_error(write: Write, body: str, complaint: str) -> None:
    with pytest.raises(EnvError, match=complaint):
        load_environment(write(body))
    with pytest.raises(EnvError, match=complaint):  # and again: nothing half-loaded is left
        load_environment(str(Path(write(body))))


def test_unknown_names_files_keys_contracts_and_splits_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="did you mean 'support_desk'"):
        load_environment("suport_desk")
    with pytest.raises(EnvError, match="file not found"):
        load_environment(str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match="unknown key 'dificulty': did you mean 'difficulty'"):
        Taskset("support_desk", {"dificulty": "easy"})
    with pytest.raises(EnvError, match="no contract 'v3'"):
        Taskset("support_desk", {"contract": "v3"})
    with pytest.raises(EnvError, match="did you mean 'heldout'"):
        Taskset("support_desk").tasks("holdout", 1)
    assert environment_names() == ("reasoning", "support_desk")


def test_an_edited_file_is_loaded_anew_and_has_another_fingerprint(write: Write) -> None:
    before = Taskset(write(SMALL))
    after = Taskset(write(SMALL.replace("What is", "Say")))
    assert before.tasks("train", 1)[0].prompt[0].content.startswith("What is")
    assert after.tasks("train", 1)[0].prompt[0].content.startswith("Say")
    assert before.fingerprint != after.fingerprint
    assert Taskset(write(SMALL)).fingerprint == before.fingerprint


def test_a_small_environment_says_how_many_tasks_it_has(write: Write) -> None:
    taskset = Taskset(write(SMALL))
    with pytest.raises(EnvError, match=r"split 'gate' of 'small' gave only \d+ distinct tasks of 200"):
        taskset.tasks("gate", 200)
    everything = [task for split in SPLITS for task in taskset.stream(split)]
    assert len({task.task_id for task in everything}) == len(everything) == 300


def test_an_endless_environment_of_few_tasks_ends_its_streams(write: Write) -> None:
    taskset = Taskset(write(SMALL.replace("range(300)", "(rng.randint(0, 29) for _ in iter(int, 1))")))
    assert sum(1 for split in SPLITS for _ in taskset.stream(split)) == 30


def test_tasks_repeat_by_seed_and_short_lists_begin_long_ones() -> None:
    taskset = Taskset("support_desk")
    long = taskset.tasks("train", 50, seed=3)
    assert taskset.tasks("train", 20, seed=3) == long[:20]
    assert Taskset("support_desk").tasks("train", 50, seed=3) == long
    assert {task.task_id for task in taskset.tasks("train", 50, seed=4)} != {task.task_id for task in long}


def test_ids_are_the_same_in_another_process() -> None:
    code = "from evergrad.envs import Taskset; print(Taskset('support_desk').tasks('gate', 3, seed=1)[2].task_id)"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "5", "PYTHONPATH": "src"},
    )
    assert shown.stdout.strip() == Taskset("support_desk").tasks("gate", 3, seed=1)[2].task_id


def test_splits_do_not_overlap_over_seeds_and_difficulties() -> None:
    owners: dict[str, str] = {}
    for split in SPLITS:
        for seed in range(3):
            for difficulty in ("all", "easy"):
                for task in Taskset("support_desk", {"difficulty": difficulty}).tasks(split, 100, seed):
                    assert owners.setdefault(task.task_id, split) == split


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


@given(prompt=st.text(max_size=30), facts=st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_equal_content_has_one_hash_and_one_split_whatever_the_order_of_keys(prompt: str, facts: dict[str, object]) -> None:
    shuffled = dict(sorted(facts.items(), key=lambda item: str(item[0])[::-1]))
    assert content_hash(facts) == content_hash(shuffled)
    split = split_of("any", TaskRow(prompt, facts))
    assert split == split_of("any", TaskRow(prompt, shuffled, slice="elsewhere"))
    assert split in SPLITS


def test_splits_have_their_share() -> None:
    rows = [TaskRow(str(Random(seed).random())) for seed in range(4_000)]
    counts = {split: sum(split_of("any", row) == split for row in rows) for split in SPLITS}
    for split, (low, high) in SPLITS.items():
        assert counts[split] / len(rows) == pytest.approx(high - low, abs=0.03)


def test_facts_that_are_no_json_are_refused(write: Write) -> None:
    taskset = Taskset(write(SMALL.replace('{"number": number}', '{"number": {number}}')))
    with pytest.raises(EnvError, match="not plain JSON"):
        taskset.tasks("train", 1)
    taskset = Taskset(write(SMALL.replace('{"number": number}', '{"slice": 1}')))
    with pytest.raises(EnvError, match="cannot hold 'slice'"):
        taskset.tasks("train", 1)


def test_the_contract_hash_follows_schema_and_description_only(write: Write) -> None:
    body = SMALL + '\n    @tool\n    async def act(self, x: int) -> str:\n        """goes far"""\n        return "a"\n'
    base = Taskset(write(body)).contract_hash
    assert Taskset(write(body.replace('return "a"', 'return "b"'))).contract_hash == base
    for change in (
        body.replace("goes far", "goes near"),
        body.replace("x: int", "y: int"),
        body.replace("x: int", "x: str"),
        body.replace("x: int", "x: int = 1"),
        body.replace("async def act", "async def do"),
    ):
        assert Taskset(write(change)).contract_hash != base


def test_public_names_are_listed_and_exist() -> None:
    import evergrad.envs
    import evergrad.rollouts

    for room in (evergrad.envs, evergrad.rollouts):
        assert all(hasattr(room, name) for name in room.__all__)
        source = Path(str(room.__file__)).read_text()
        imported = {
            alias.asname or alias.name
            for node in ast.parse(source).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert imported == set(room.__all__)


RAISED = ["OSError('odd')", "SystemExit(3)", "GeneratorExit", "BaseException('odd')", "asyncio.CancelledError"]


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("stage", ["setup", "lost", "act", "right"])
async def test_whatever_a_rollout_raises_is_a_named_fault(write: Write, error: str, stage: str) -> None:
    methods = {
        "setup": "    async def setup(self):",
        "lost": "    def lost(self):",
        "act": "    @tool\n    async def act(self) -> str:",
        "right": "    @reward\n    async def other(self, answer: str) -> float:",
    }
    other_tool = "" if stage == "act" else "    @tool\n    async def act(self) -> str:\n        return ''\n"
    body = f"import asyncio\n{SMALL}{other_tool}{methods[stage]}\n        raise {error}\n"
    taskset = Taskset(write(body))
    kind = error.split("(")[0].split(".")[-1]
    with pytest.raises((EnvironmentFault, VerifierFault), match=f"raised {kind}"):
        await play(taskset, taskset.tasks("train", 1)[0], ["act()", "1"])


async def test_a_rollout_that_is_cancelled_stays_cancelled(write: Write) -> None:
    taskset = Taskset(write(f"import asyncio\n{SMALL}    async def setup(self):\n        await asyncio.sleep(60)\n"))
    playing = asyncio.create_task(play(taskset, taskset.tasks("train", 1)[0], ["1"]))
    await asyncio.sleep(0.1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize(
    ("what", "method"),
    [
        ("tasks", "    @classmethod\n    def tasks(cls, rng, config):\n        raise {error}\n        yield"),
        ("tasks", "    @classmethod\n    def tasks(cls, rng, config):\n        raise {error}"),
        ("contracts", "    @classmethod\n    def contracts(cls):\n        raise {error}"),
        ("limits_for", "    @classmethod\n    def limits_for(cls, config):\n        raise {error}"),
        ("__init__", "    def __init__(self, task, config):\n        raise {error}"),
        ("demonstrate", "    def demonstrate(self):\n        raise {error}"),
        ("demonstrate", "    def demonstrate(self):\n        raise {error}\n        yield"),
    ],
)
def test_an_authors_mistakes_are_located(write: Write, what: str, method: str, error: str) -> None:
    path = write(f"import asyncio\n{SMALL}{method.format(error=error)}\n")
    line = next(
        number for number, text in enumerate(Path(path).read_text().splitlines(), 1) if text.strip() == f"raise {error}"
    )
    with pytest.raises(EnvError, match=rf"{what}\(\) raised .*my_environment\.py:{line}\)\. Next: "):
        admit(path, n=3)


@pytest.mark.parametrize(
    ("what", "method"),
    [
        ("tasks", "    @classmethod\n    def tasks(cls, rng, config):\n        yield 'What is 1?'"),
        ("tasks", "    @classmethod\n    def tasks(cls, rng, config):\n        yield ('What is 1?', {})"),
        ("tasks", "    @classmethod\n    def tasks(cls, rng, config):\n        yield None or {}"),
        ("contracts", "    @classmethod\n    def contracts(cls):\n        return 'v1'"),
        ("contracts", "    @classmethod\n    def contracts(cls):\n        return [1]"),
        ("demonstrate", "    def demonstrate(self):\n        return 'one text'"),
        ("demonstrate", "    def demonstrate(self):\n        return [1]"),
    ],
)
def test_what_an_author_gives_is_checked(write: Write, what: str, method: str) -> None:
    with pytest.raises(EnvError, match=rf"{what}\(\) (gave|yielded) .*my_environment\.py:\d+\)\. Next: "):
        admit(write(f"{SMALL}{method}\n"), n=3)


@pytest.mark.parametrize(
    "body",
    [
        "        __import__('time').sleep(60)\n        yield",
        "        while True: pass\n        yield",
        "        while True:\n            __import__('time').sleep(0.02)\n            yield TaskRow('the same')",
    ],
)
def test_drawing_tasks_has_a_limit(write: Write, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_author, _taskset):
        monkeypatch.setattr(module, "AUTHOR_S", 0.3)
    monkeypatch.setattr(_author.ask_author, "__kwdefaults__", {"seconds": 0.3})
    with pytest.raises(EnvError, match=r"tasks\(\) .* 0\.3 s.*my_environment\.py:\d+\)"):
        Taskset(write(f"{SMALL}    @classmethod\n    def tasks(cls, rng, config):\n{body}\n")).tasks("train", 2)
