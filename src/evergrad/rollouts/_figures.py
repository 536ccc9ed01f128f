"""Figures of the data behind one batch."""

from __future__ import annotations

from statistics import fmean, stdev

from evergrad.rollouts._samples import CutSamples, sampled_tokens, trainable
from evergrad.rollouts.advantages import OverlongConfig
from evergrad.types import Outcome, RolloutGroup


def _standard_error(groups: list[RolloutGroup]) -> float:
    """Of the mean reward over groups: rollouts of one task are not independent, tasks are. Infinite for a single group."""
    means = [fmean(float(each.reward or 0.0) for each in members) for group in groups if (members := trainable(group))]
    return stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("inf")


def batch_figures(
    taken: list[tuple[RolloutGroup, CutSamples]],
    passed_over: list[RolloutGroup],
    policy_version: int,
    overlong: OverlongConfig | None,
) -> dict[str, float]:
    """Figures of the data behind one batch; each can be recomputed from the rollouts' records.

    Rewards, lengths and outcomes are of all that was sampled: of the trained groups alone they would show a policy that
    always succeeds, or always fails, as one that does so half the time.
    """
    groups = [group for group, _ in taken] + passed_over
    everything = [rollout for group in groups for rollout in group.rollouts]
    rollouts = [rollout for rollout in everything if rollout.outcome.trainable]
    rewards = [float(rollout.reward or 0.0) for rollout in rollouts]
    samples = [sample for _, cut in taken for sample in cut.samples]
    ages = [policy_version - sample.min_policy_version for sample in samples] or [0]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    logprobs = [logprob for turn in turns for logprob in turn.completion.logprobs]
    sampled = len(logprobs)
    metrics = {
        "groups": len(groups),
        "groups_replaced": len(passed_over),
        "rollouts": len(everything),
        "reward_mean": fmean(rewards) if rewards else 0.0,
        "reward_se": _standard_error(groups),
        "success_mean": fmean(rollout.success for rollout in rollouts) if rollouts else 0.0,
        "turns_mean": len(turns) / len(rollouts) if rollouts else 0.0,
        "sampled_tokens": sampled,
        "sampled_tokens_mean": sampled / len(rollouts) if rollouts else 0.0,
        # Sampled by μ itself, so the mean of −log μ is its entropy without bias, and costs no pass over the vocabulary.
        "sampled_entropy": -fmean(logprobs) if logprobs else 0.0,
        "samples": len(samples),
        "staleness_mean": fmean(ages),
        "staleness_max": max(ages),
        "over_age_tokens": sum(cut.over_age_tokens for _, cut in taken),
    }
    if any(turn.reward is not None for turn in turns):
        metrics["turn_reward_mean"] = sum(turn.reward or 0.0 for turn in turns) / len(rollouts)
    if overlong is not None:
        prices = [overlong.penalty(sampled_tokens(rollout)) for rollout in rollouts]
        metrics["overlong_penalty_mean"] = fmean(prices) if prices else 0.0
    for outcome in Outcome:
        metrics[f"outcome_{outcome.value}"] = sum(rollout.outcome is outcome for rollout in everything)
    for name in sorted({rollout.slice for rollout in rollouts if rollout.slice}):
        metrics[f"reward_mean/{name}"] = fmean(float(each.reward or 0.0) for each in rollouts if each.slice == name)
    return {key: float(value) for key, value in metrics.items()}
