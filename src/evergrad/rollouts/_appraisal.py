"""From a critic's values to advantages, token by token or turn by turn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from evergrad.rollouts.advantages import GaeConfig, generalized_advantages, whitened
from evergrad.types import EvergradError, TrainingBatch, TrainingSample

Place = tuple[int, int]
"""A sample's number, and a position in it."""
Step = list[Place]


def appraise(batch: TrainingBatch, values: Sequence[Sequence[float]], gae: GaeConfig) -> TrainingBatch:
    """The batch with each trained token's advantage, ``values`` and ``returns``.

    A rollout is one walk over its trained tokens or turns, in the order of its samples. The returns that the critic is to
    learn are advantage plus value; the advantages that the policy learns from are then whitened over all trained tokens of the
    batch.

    Args:
        batch: Samples with ``rewards``, as estimator ``generalized`` cuts them; those of a rollout in the order of its turns.
        values: The critic's value before each token of each sample; read where the mask is 1.
        gae: Discount and λ.

    Raises:
        EvergradError: a sample without ``rewards``, or values of another shape.
    """
    if [len(each) for each in values] != [len(sample.token_ids) for sample in batch.samples]:
        raise EvergradError("a critic must give one value for each token of each sample", where="appraise")
    walks: dict[str, list[Step]] = {}
    for number, sample in enumerate(batch.samples):
        walks.setdefault(sample.rollout_id or f"sample {number}", []).extend(_steps(number, sample, gae))
    rewards = [_rewards(sample) for sample in batch.samples]
    advantages: dict[Place, float] = {}
    returns: dict[Place, float] = {}
    for walk in walks.values():
        expected = [values[step[0][0]][step[0][1]] for step in walk]
        earned = [math.fsum(rewards[number][place] for number, place in step) for step in walk]
        for step, value, advantage in zip(walk, expected, generalized_advantages(earned, expected, gae), strict=True):
            advantages |= dict.fromkeys(step, advantage)
            returns |= dict.fromkeys(step, advantage + value)
    scaled = dict(zip(advantages, whitened(list(advantages.values())), strict=True))
    samples = []
    for number, sample in enumerate(batch.samples):
        places = [(number, place) for place in range(len(sample.token_ids))]
        samples.append(
            dataclasses.replace(
                sample,
                advantages=tuple(scaled.get(each, 0.0) for each in places),
                values=tuple(float(values[number][place]) if (number, place) in returns else 0.0 for _, place in places),
                returns=tuple(returns.get(each, 0.0) for each in places),
            )
        )
    return dataclasses.replace(batch, samples=tuple(samples))


def _steps(number: int, sample: TrainingSample, gae: GaeConfig) -> list[Step]:
    """The trained tokens, one by one or turn by turn: between two turns of a sample stands what the model was shown."""
    masked = [place for place, mask in enumerate(sample.loss_mask) if mask]
    steps: list[Step] = []
    for place in masked:
        if gae.step == "turn" and steps and steps[-1][-1][1] == place - 1:
            steps[-1].append((number, place))
        else:
            steps.append([(number, place)])
    return steps


def _rewards(sample: TrainingSample) -> tuple[float, ...]:
    if sample.rewards is None:
        raise EvergradError("a sample has no rewards", where=sample.rollout_id or None, hint="use advantage 'generalized'")
    return sample.rewards
