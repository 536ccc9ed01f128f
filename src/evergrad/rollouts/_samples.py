"""From scored rollouts to token sequences to learn from.

A rollout's turns are joined as long as each prompt extends what came before; where one does not, it begins a sample of its own.
Each sampled token is in exactly one sample, in the context it was sampled in, and carries its own rollout's advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evergrad.rollouts._renderer import extends
from evergrad.rollouts.advantages import ESTIMATORS, OverlongConfig, estimate
from evergrad.types import EvergradError, Rollout, RolloutGroup, TrainingSample, Turn

TRAINABLE_SOURCES = frozenset({"train", "demonstration", "live"})
"""``eval`` rollouts measure; they never enter a gradient."""


def assign_advantages(group: RolloutGroup, estimator: str = "group_mean") -> tuple[TrainingSample, ...]:
    """The group's trainable rollouts as samples; faults that say nothing about the policy are left out of the baseline too.

    An estimator that looks at a whole batch takes the group for one.

    Raises:
        EvergradError: unknown estimator, or rollouts of an evaluation.
    """
    return over_batch(cut_samples(group, estimator, oldest_version=None).samples, estimator)


@dataclass(frozen=True, slots=True)
class CutSamples:
    """The samples of one group, and how many sampled tokens were masked because they were over age."""

    samples: tuple[TrainingSample, ...]
    over_age_tokens: int


def cut_samples(
    group: RolloutGroup, estimator: str, *, oldest_version: int | None, overlong: OverlongConfig | None = None
) -> CutSamples:
    """The group's samples, with what the estimator says within the group; tokens sampled under a version before
    ``oldest_version`` are masked and counted.

    A sample without a token left to learn from is dropped. :func:`over_batch` does the rest, once there is a batch.
    """
    rollouts = trainable(group)
    advantages = estimate(estimator, shaped_rewards(rollouts, overlong))
    samples: list[TrainingSample] = []
    over_age = 0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        made = []
        for chain in chains(rollout.turns):
            sample, masked = _sample(rollout, chain, advantage, oldest_version)
            over_age += masked
            if sample is not None:
                made.append(_with_teachers_prompt(sample, chain[0].prompt_token_ids, group.teacher_prompts))
        samples += _rewarded(made, advantage) if ESTIMATORS[estimator].needs_critic else made
    return CutSamples(tuple(samples), over_age)


def _with_teachers_prompt(
    sample: TrainingSample, prompt: tuple[int, ...], teacher_prompts: Mapping[tuple[int, ...], tuple[int, ...]]
) -> TrainingSample:
    if prompt not in teacher_prompts:
        return sample
    return replace(sample, teacher_token_ids=teacher_prompts[prompt] + sample.token_ids[len(prompt) :])


def _rewarded(samples: Sequence[TrainingSample], reward: float) -> list[TrainingSample]:
    """One rollout's samples with its reward right after its last trained token."""
    rewards = [[0.0] * len(sample.token_ids) for sample in samples]
    if samples:
        rewards[-1][max(place for place, mask in enumerate(samples[-1].loss_mask) if mask)] = reward
    return [replace(sample, rewards=tuple(each)) for sample, each in zip(samples, rewards, strict=True)]


def shaped_rewards(rollouts: Sequence[Rollout], overlong: OverlongConfig | None) -> list[float]:
    """What each rollout learns from: the verifier's reward, less the price of its length."""
    rewards = [float(each.reward or 0.0) for each in rollouts]
    if overlong is None:
        return rewards
    return [reward + overlong.penalty(sampled_tokens(each)) for reward, each in zip(rewards, rollouts, strict=True)]


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens that the model sampled, over all turns."""
    return sum(len(turn.completion.token_ids) for turn in rollout.turns)


def over_batch(samples: Sequence[TrainingSample], estimator: str) -> tuple[TrainingSample, ...]:
    """The samples of a batch with what the estimator makes of all of them together."""
    of_batch = ESTIMATORS[estimator].of_batch
    if of_batch is None:
        return tuple(samples)
    masked = [[i for i, mask in enumerate(sample.loss_mask) if mask] for sample in samples]
    found = iter(of_batch([sample.advantages[i] for sample, places in zip(samples, masked, strict=True) for i in places]))
    made = []
    for sample, places in zip(samples, masked, strict=True):
        advantages = [0.0] * len(sample.token_ids)
        for place in places:
            advantages[place] = next(found)
        made.append(replace(sample, advantages=tuple(advantages)))
    return tuple(made)


def trainable(group: RolloutGroup) -> list[Rollout]:
    """The rollouts of a group that enter a baseline and a gradient.

    Raises:
        EvergradError: one of them was made to measure.
    """
    for rollout in group.rollouts:
        if rollout.source not in TRAINABLE_SOURCES:
            raise EvergradError(f"a rollout of source '{rollout.source}' cannot be trained on", where=rollout.rollout_id)
        if rollout.temperature <= 0.0 and rollout.source != "demonstration":
            raise EvergradError("a greedy rollout cannot be trained on", where=rollout.rollout_id)
    if len({rollout.task_id for rollout in group.rollouts}) > 1:
        raise EvergradError("rollouts of several tasks share a baseline", where=group.group_id)
    return [each for each in group.rollouts if each.outcome.trainable]


def chains(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Runs of turns in which each prompt extends the turn before."""
    chains: list[list[Turn]] = []
    for turn in turns:
        last = chains[-1][-1] if chains else None
        if last is not None and extends(last.prompt_token_ids, last.completion, turn.prompt_token_ids):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    return chains


def _sample(
    rollout: Rollout, chain: Sequence[Turn], advantage: float, oldest_version: int | None
) -> tuple[TrainingSample | None, int]:
    last = chain[-1]
    ids = last.prompt_token_ids + last.completion.token_ids
    mask, logprobs, advantages = [0] * len(ids), [0.0] * len(ids), [0.0] * len(ids)
    versions: list[int] = []
    over_age = 0
    for turn in chain:
        offset = len(turn.prompt_token_ids)
        for span in turn.completion.policy_spans:
            if oldest_version is not None and span.policy_version < oldest_version:
                over_age += span.end - span.start
                continue
            if span.end > span.start:
                versions.append(span.policy_version)
            for position in range(span.start, span.end):
                mask[offset + position] = 1
                logprobs[offset + position] = turn.completion.logprobs[position]
                advantages[offset + position] = advantage
    if not versions:
        return None, over_age
    sample = TrainingSample(
        token_ids=ids,
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantages=tuple(advantages),
        min_policy_version=min(versions),
        max_policy_version=max(versions),
        temperature=rollout.temperature,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
    )
    return sample, over_age
