"""What a teacher reads: the student's tokens, one by one, after a prompt that tells it more."""

from __future__ import annotations

from pathlib import Path

import pytest

from evergrad.envs import EnvError, Taskset
from evergrad.rollouts import Renderer, cut_samples, demonstrate, for_teacher, taught, with_hint
from evergrad.types import (
    Completion,
    EvergradError,
    FinishReason,
    Message,
    Outcome,
    PolicySpan,
    Rollout,
    RolloutGroup,
    TrainingBatch,
    TrainingSample,
    Turn,
)
from tests.rollouts.conftest import TokenizerMaker
from tests.rollouts.test_renderer import THINK_TEMPLATE

HINT = "The window is open, so refund it."


def trained(sample: TrainingSample) -> list[int]:
    return [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]


def numbered(samples: list[TrainingSample]) -> list[list[float]]:
    """A teacher that says of every token it reads where it stands; -1 where nobody asked."""
    return [[float(place) if mask else -1.0 for place, mask in enumerate(sample.loss_mask)] for sample in samples]


async def test_over_turns_and_tools_each_token_gets_what_the_teacher_says_of_it(desk: Taskset, renderer: Renderer) -> None:
    shown = await demonstrate(desk.tasks("train", 8), desk, renderer)
    group = max(shown, key=lambda each: len(each.rollouts[0].turns))
    (rollout,) = group.rollouts
    assert len(rollout.turns) > 2
    hinted = with_hint(group, HINT, renderer)
    (sample,) = cut_samples(hinted, "constant", oldest_version=None).samples
    (read,) = for_teacher([sample])
    assert trained(read) == trained(sample) == [t for turn in rollout.turns for t in turn.completion.token_ids]
    # What the teacher reads is the conversation itself, with the hint in the task and nothing else changed.
    task = rollout.turns[0].messages[-2].content
    assert renderer.decode(read.token_ids) == renderer.decode(sample.token_ids).replace(task, f"{task}\n\n{HINT}", 1)
    told = taught(TrainingBatch((sample,), sum(sample.loss_mask)), numbered([read])).samples[0]
    assert told.reference_logprobs is not None
    assert told.teacher_token_ids is None
    assert told.token_ids == sample.token_ids
    for place, mask in enumerate(told.loss_mask):
        if mask:
            assert read.token_ids[int(told.reference_logprobs[place])] == told.token_ids[place]


def test_where_a_template_rewrites_history_the_hint_is_in_every_sample(make_tokenizer: TokenizerMaker) -> None:
    renderer = Renderer(make_tokenizer(THINK_TEMPLATE))
    conversation, new = [], [Message("user", "Please refund order F50.")]
    turns = []
    for text in ("<think>look it up</think>order(id=F50)", "<think>again</think>order(id=F51)", "It arrives May 15."):
        conversation += new
        prompt = renderer.prompt(conversation)
        ids = renderer.reply(text)
        said = Completion(ids, (-0.1,) * len(ids), FinishReason.STOP, (PolicySpan(0, 0, len(ids)),))
        turns.append(Turn((*new, Message("assistant", text)), prompt, said))
        conversation += [Message("assistant", text)]
        new = [Message("tool", "delivered")]
    group = RolloutGroup("g", (Rollout("r", "g", "t", tuple(turns), Outcome.SCORED, 1.0),))
    samples = cut_samples(with_hint(group, HINT, renderer), "constant", oldest_version=None).samples
    assert len(samples) == 3
    for sample, read in zip(samples, for_teacher(samples), strict=True):
        assert trained(read) == trained(sample)
        assert HINT not in renderer.decode(sample.token_ids)
        assert renderer.decode(read.token_ids) == renderer.decode(sample.token_ids).replace("F50.", f"F50.\n\n{HINT}")


async def test_without_a_hint_the_teacher_reads_what_the_student_read(desk: Taskset, renderer: Renderer) -> None:
    (group,) = await demonstrate(desk.tasks("train", 1), desk, renderer)
    assert with_hint(group, "", renderer) is group
    samples = cut_samples(group, "constant", oldest_version=None).samples
    assert for_teacher(samples) == list(samples)
    batch = taught(TrainingBatch(samples, 1), numbered(list(samples)))
    assert batch.samples[0].reference_logprobs == tuple(numbered(list(samples))[0])


def test_tokens_that_are_not_the_students_are_refused() -> None:
    sample = TrainingSample((1, 2, 3, 4), (0, 0, 1, 1), (0.0,) * 4, (0.0,) * 4, 0, 0, rollout_id="r7")
    for ids in ((9, 9, 9, 9, 5, 4), (3, 4, 4), (4,)):
        odd = TrainingSample((1, 2, 3, 4), (0, 0, 1, 1), (0.0,) * 4, (0.0,) * 4, 0, 0, rollout_id="r7", teacher_token_ids=ids)
        with pytest.raises(EvergradError, match=r"not those that the student sampled.*r7"):
            for_teacher([odd])
    with pytest.raises(EvergradError, match="one number for each token"):
        taught(TrainingBatch((sample,), 2), [[0.0] * 5])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return None", ""),
        ("return f'It is {self.facts[\"n\"]}.\\n'", "It is 7."),
        ("return 7", EnvError("gave 7")),
        ("raise KeyError('n')", EnvError("raised KeyError")),
    ],
)
def test_what_an_environment_tells_a_teacher(tmp_path: Path, body: str, told: str | EnvError) -> None:
    path = tmp_path / "numbers.py"
    path.write_text(
        "from evergrad.envs import Environment, TaskRow, reward\n\n\nclass Numbers(Environment):\n"
        "    @classmethod\n    def tasks(cls, rng, config):\n        yield TaskRow('Which?', {'n': 7})\n\n"
        "    @reward\n    async def right(self, answer):\n        return float(answer == '7')\n\n"
        f"    def hint(self):\n        {body}\n"
    )
    taskset = Taskset(str(path))
    assert taskset.has_hints
    task = taskset.task(next(taskset.environment_class.tasks(None, None)))  # type: ignore[arg-type]
    if isinstance(told, str):
        assert taskset.hint(task) == told
    else:
        with pytest.raises(EnvError, match=rf"hint\(\) {told}.*{path}:\d+"):
            taskset.hint(task)


def test_an_environment_need_not_give_hints(desk: Taskset) -> None:
    assert not desk.has_hints
    assert desk.hint(desk.tasks("train", 1)[0]) == ""
