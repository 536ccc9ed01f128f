"""From a critic's values to advantages, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from evergrad.rollouts.advantages import GaeConfig, generalized_advantages, whitened
from evergrad.types import EvergradError, TrainingBatch, TrainingSample


def appraise(batch: TrainingBatch, values: Sequence[Sequence[float]], gae: GaeConfig) -> TrainingBatch:
    """The batch with each trained token's advantage, ``values`` and ``returns``.

    A rollout is one walk over its trained tokens, in the order of its samples. The returns that the critic is to learn are
    advantage plus value; the advantages that the policy learns from are then whitened over all trained tokens of the batch.

    Args:
        batch: Samples with ``rewards``, as estimator ``generalized`` cuts them; those of a rollout in the order of its turns.
        values: The critic's value before each token of each sample; read where the mask is 1.
        gae: Discount and decay.

    Raises:
        EvergradError: a sample without ``rewards``, or values of another shape.
    """
    if [len(each) for each in values] != [len(sample.token_ids) for sample in batch.samples]:
        raise EvergradError("a critic must give one value for each token of each sample", where="appraise")
    walks: dict[str, list[tuple[int, int]]] = {}
    for number, sample in enumerate(batch.samples):
        places = [(number, place) for place, mask in enumerate(sample.loss_mask) if mask]
        walks.setdefault(sample.rollout_id or f"sample {number}", []).extend(places)
    rewards = [_rewards(sample) for sample in batch.samples]
    advantages: dict[tuple[int, int], float] = {}
    for walk in walks.values():
        found = generalized_advantages([rewards[i][j] for i, j in walk], [values[i][j] for i, j in walk], gae)
        advantages |= zip(walk, found, strict=True)
    scaled = dict(zip(advantages, whitened(list(advantages.values())), strict=True))
    samples = []
    for number, sample in enumerate(batch.samples):
        masked = [(number, place) if mask else None for place, mask in enumerate(sample.loss_mask)]
        known = tuple(float(values[each[0]][each[1]]) if each else 0.0 for each in masked)
        returns = tuple(advantages[each] + value if each else 0.0 for each, value in zip(masked, known, strict=True))
        scaled_here = tuple(scaled[each] if each else 0.0 for each in masked)
        samples.append(dataclasses.replace(sample, advantages=scaled_here, values=known, returns=returns))
    return dataclasses.replace(batch, samples=tuple(samples))


def _rewards(sample: TrainingSample) -> tuple[float, ...]:
    if sample.rewards is None:
        raise EvergradError("a sample has no rewards", where=sample.rollout_id or None, hint="use advantage 'generalized'")
    return sample.rewards
