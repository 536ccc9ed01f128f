"""What a teacher reads of a sample, and what it says of it.

A teacher grades the tokens that the student sampled. It may read them after another prompt, which tells it more of the task::

    student   prompt of the task          | completion, tool result, completion, …
    teacher   prompt with the hint in it  | the same ids, one by one

Only the beginning differs, so positions are aligned from the end. That holds for each run of turns that makes one sample: where
a chat template rewrites history, the run begins with a prompt of its own, and the hint is in that one, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from evergrad.rollouts._renderer import Renderer
from evergrad.rollouts._samples import chains
from evergrad.types import EvergradError, Message, Rollout, RolloutGroup, TrainingBatch, TrainingSample

T = TypeVar("T")


def with_hint(group: RolloutGroup, hint: str, renderer: Renderer) -> RolloutGroup:
    """The group with the prompts that its teacher reads: the hint stands at the end of the task's last message, after a blank
    line. Without a hint the teacher reads what the student read."""
    if not hint:
        return group
    prompts = dict(prompt for rollout in group.rollouts for prompt in _prompts(rollout, hint, renderer))
    return replace(group, teacher_prompts=prompts)


def _prompts(rollout: Rollout, hint: str, renderer: Renderer) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The prompt that each run of turns begins with, and what it becomes for the teacher."""
    conversation: list[Message] = []
    for chain in chains(rollout.turns):
        shown = [*conversation, *chain[0].messages[:-1]]  # the last message is what the model said
        last = len(rollout.turns[0].messages) - 2
        shown[last] = replace(shown[last], content=f"{shown[last].content}\n\n{hint}")
        yield chain[0].prompt_token_ids, renderer.prompt(shown)
        conversation += [message for turn in chain for message in turn.messages]


def for_teacher(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples as a teacher reads them: the same trained tokens, in the same order, after its own prompt."""
    return [_in_its_context(sample) for sample in samples]


def _in_its_context(sample: TrainingSample) -> TrainingSample:
    ids = sample.teacher_token_ids
    if ids is None:
        return sample
    mask = _aligned(sample.loss_mask, len(ids), 0)
    if sum(mask) != sum(sample.loss_mask) or any(ids[place] != token for place, token in _trained(sample, len(ids))):
        raise EvergradError(
            "the teacher's tokens are not those that the student sampled",
            where=sample.rollout_id or None,
            hint="teacher_token_ids must end as token_ids do, from before the first trained token on",
        )
    nothing = (0.0,) * len(ids)
    return TrainingSample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=nothing,
        advantages=nothing,
        min_policy_version=sample.min_policy_version,
        max_policy_version=sample.max_policy_version,
        temperature=sample.temperature,
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
    )


def _trained(sample: TrainingSample, length: int) -> Iterator[tuple[int, int]]:
    """Where each trained token stands in a context of ``length`` tokens, and which it is."""
    shift = length - len(sample.token_ids)
    for place, mask in enumerate(sample.loss_mask):
        if mask:
            yield place + shift, sample.token_ids[place]


def taught(batch: TrainingBatch, logprobs: Sequence[Sequence[float]]) -> TrainingBatch:
    """The batch with the teacher's log-probabilities as ``reference_logprobs``.

    Args:
        batch: Samples of the student.
        logprobs: For each sample one number per token of :func:`for_teacher`'s, in nats; read where its mask is 1.

    Raises:
        EvergradError: numbers of another shape.
    """
    read = [len(sample.teacher_token_ids or sample.token_ids) for sample in batch.samples]
    if [len(row) for row in logprobs] != read:
        raise EvergradError("a teacher must give one number for each token that it reads", where="taught")
    samples = tuple(
        replace(sample, reference_logprobs=_aligned(row, len(sample.token_ids), 0.0), teacher_token_ids=None)
        for sample, row in zip(batch.samples, logprobs, strict=True)
    )
    return replace(batch, samples=samples)


def _aligned(row: Sequence[T], length: int, filler: T) -> tuple[T, ...]:
    """The row made as long as ``length`` at its beginning, where a longer one is cut."""
    return (*[filler] * (length - len(row)), *row[max(0, len(row) - length) :])
