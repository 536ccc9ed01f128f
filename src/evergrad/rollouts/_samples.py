"""From scored rollouts to token sequences to learn from.

A rollout's turns are joined as long as each prompt extends what came before; where one does not, it begins a sample of its own.
Each sampled token is in exactly one sample, in the context it was sampled in, and carries the advantage of its own turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from evergrad.rollouts._renderer import extends
from evergrad.rollouts.advantages import ESTIMATORS, OverlongConfig, estimate_turns, uniform
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
    group: RolloutGroup,
    estimator: str,
    *,
    oldest_version: int | None,
    overlong: OverlongConfig | None = None,
    turn_discount: float = 1.0,
) -> CutSamples:
    """The group's samples, with what the estimator says within the group; tokens sampled under a version before
    ``oldest_version`` are masked and counted.

    A sample without a token left to learn from is dropped. :func:`over_batch` does the rest, once there is a batch.
    """
    rollouts = trainable(group)
    rewards = turn_rewards(rollouts, overlong)
    samples: list[TrainingSample] = []
    over_age = 0
    for number, of_turns in enumerate(estimate_turns(estimator, rewards, turn_discount)):
        rollout, advantages = rollouts[number], iter(of_turns)
        parts: list[tuple[TrainingSample, Sequence[Turn]]] = []
        for chain in chains(rollout.turns):
            sample, masked = _sample(rollout, chain, [next(advantages) for _ in chain], oldest_version)
            parts.append((_with_teachers_prompt(sample, chain[0].prompt_token_ids, group.teacher_prompts), chain))
            over_age += masked
        made = _rewarded(parts, rewards[number]) if ESTIMATORS[estimator].needs_critic else [sample for sample, _ in parts]
        samples += [sample for sample in made if any(sample.loss_mask)]
    return CutSamples(tuple(samples), over_age)


def _with_teachers_prompt(
    sample: TrainingSample, prompt: tuple[int, ...], teacher_prompts: Mapping[tuple[int, ...], tuple[int, ...]]
) -> TrainingSample:
    if prompt not in teacher_prompts:
        return sample
    return replace(sample, teacher_token_ids=teacher_prompts[prompt] + sample.token_ids[len(prompt) :])


def _rewarded(parts: Sequence[tuple[TrainingSample, Sequence[Turn]]], rewards: Sequence[float]) -> list[TrainingSample]:
    """One rollout's samples with what each turn earned right after its last trained token; of a turn without any, after the
    last one before it."""
    columns = [[0.0] * len(sample.token_ids) for sample, _ in parts]
    earned = iter(rewards)
    last: tuple[int, int] | None = None
    for number, (sample, chain) in enumerate(parts):
        for turn in chain:
            start = len(turn.prompt_token_ids)
            ends = [place for place in range(start, start + len(turn.completion.token_ids)) if sample.loss_mask[place]]
            last = (number, ends[-1]) if ends else last
            reward = next(earned)
            if last is not None:
                columns[last[0]][last[1]] += reward
    return [replace(sample, rewards=tuple(column)) for (sample, _), column in zip(parts, columns, strict=True)]


def turn_rewards(rollouts: Sequence[Rollout], overlong: OverlongConfig | None) -> list[list[float]]:
    """What each turn of each rollout learns from: its own reward, and for the last one the rollout's, less the price of its
    length. A rollout that ended before its first turn has one entry, as if it had made one."""
    found = []
    for rollout in rollouts:
        earned = [turn.reward or 0.0 for turn in rollout.turns] or [0.0]
        earned[-1] += float(rollout.reward or 0.0)
        if overlong is not None:
            earned[-1] += overlong.penalty(sampled_tokens(rollout))
        found.append(earned)
    return found


def tell_nothing_apart(rollouts: Sequence[Rollout], overlong: OverlongConfig | None, *, by_turn: bool) -> bool:
    """Whether all rollouts earned the same, up to rounding; with ``by_turn`` also all their turns."""
    returns = [fsum(each) for each in turn_rewards(rollouts, overlong)]
    return uniform(returns) and not (by_turn and not uniform([turn.reward or 0.0 for each in rollouts for turn in each.turns]))


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
    rollout: Rollout, chain: Sequence[Turn], of_turns: Sequence[float], oldest_version: int | None
) -> tuple[TrainingSample, int]:
    """One run of turns as a sample, and how many of its tokens are over age. Where all are, its mask is empty."""
    last = chain[-1]
    ids = last.prompt_token_ids + last.completion.token_ids
    mask, logprobs, advantages = [0] * len(ids), [0.0] * len(ids), [0.0] * len(ids)
    versions: list[int] = []
    over_age = 0
    for turn, advantage in zip(chain, of_turns, strict=True):
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
    sample = TrainingSample(
        token_ids=ids,
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantages=tuple(advantages),
        min_policy_version=min(versions, default=0),
        max_policy_version=max(versions, default=0),
        temperature=rollout.temperature,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
    )
    return sample, over_age
