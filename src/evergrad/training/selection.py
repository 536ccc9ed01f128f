"""Which positions of a batch carry a loss, and whether what they carry can be used; all of it before anything is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad.training.config import TrainerError
from evergrad.training.forest import Together, TrainedTokens
from evergrad.training.losses import Loss, Totals
from evergrad.types import TrainingBatch, TrainingSample

_OPTIONAL = ("reference_logprobs", "proximal_logprobs", "rewards", "values", "returns")
_PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "advantages", *_OPTIONAL)


def trained_tokens(
    batch: TrainingBatch, rule: Loss, *, computes_reference: bool, has_critic: bool = False
) -> list[TrainedTokens]:
    """Which positions of which samples carry a loss; samples without any are left out.

    Args:
        batch: What to train on.
        rule: Says what it needs of a sample.
        computes_reference: Whether the trainer has the frozen reference, so that samples need not bring it.
        has_critic: Whether there is one to learn from ``returns``, if samples have them: it learns from every masked position.

    Raises:
        TrainerError: see ``Trainer.forward_backward``.
    """
    masked = sum(sum(1 for value in sample.loss_mask if value) for sample in batch.samples)
    if masked > batch.num_valid_tokens:
        raise TrainerError(f"{masked} positions carry a loss, but num_valid_tokens is {batch.num_valid_tokens}")
    read = _fields_read(batch, rule, computes_reference, has_critic)
    rollouts = _rollouts(batch.samples, rule)
    speaking = _speaking(batch.samples, rollouts, rule)
    num_valid: Counter[int] = Counter()
    for rollout, sample in zip(rollouts, batch.samples, strict=True):
        num_valid[rollout] += sum(map(bool, sample.loss_mask))
    found = []
    for number, sample in enumerate(batch.samples):
        positions = np.flatnonzero(speaking[number])
        if len(positions):
            _check_values(number, sample, positions, read)
            found.append(TrainedTokens(sample, positions, num_valid[rollouts[number]], rollouts[number]))
    if rule.unit == "pair":
        _check_pairs(batch.samples, found)
    return found


def scored_tokens(samples: Sequence[TrainingSample]) -> list[TrainedTokens]:
    """All masked positions of the samples that have any.

    Raises:
        TrainerError: fields of other lengths than the tokens, a masked first token, or no temperature to score under.
    """
    found = []
    for number, sample in enumerate(samples):
        _check_lengths(number, sample)
        positions = np.flatnonzero(np.asarray(sample.loss_mask, dtype=bool))
        if len(positions):
            _check_values(number, sample, positions, ())
            found.append(TrainedTokens(sample, positions, len(positions)))
    return found


def totals_of(batch: TrainingBatch, rule: Loss) -> Totals:
    """What a loss divides by.

    Raises:
        TrainerError: the batch has more rollouts than it says the whole step has.
    """
    numbers = _rollouts(batch.samples, rule)
    here = len({number for number, sample in zip(numbers, batch.samples, strict=True) if any(sample.loss_mask)})
    rollouts = here if batch.num_rollouts is None else batch.num_rollouts
    if here > rollouts:
        raise TrainerError(f"{here} rollouts carry a loss, but num_rollouts is {rollouts}")
    return Totals(batch.num_valid_tokens, rollouts)


def _rollouts(samples: Sequence[TrainingSample], rule: Loss) -> list[int]:
    """Which samples are parts of one rollout: a number for each, the same for those that are."""
    if rule.unit == "pair":  # both answers of a pair are of one row of data
        return list(range(len(samples)))
    numbers: dict[str, int] = {}
    return [numbers.setdefault(each.rollout_id, number) if each.rollout_id else number for number, each in enumerate(samples)]


def _speaking(samples: Sequence[TrainingSample], rollouts: Sequence[int], rule: Loss) -> list[npt.NDArray[np.bool_]]:
    """Which positions of each sample can have a gradient.

    Raises:
        TrainerError: fields of other lengths than the tokens.
    """
    for number, sample in enumerate(samples):
        _check_lengths(number, sample)
    masks = [np.asarray(sample.loss_mask, dtype=bool) for sample in samples]
    if not rule.silent_at_zero or any(sample.returns is not None for sample in samples):
        return masks
    found = [
        mask & (np.asarray(sample.advantages, dtype=np.float64) != 0.0) for mask, sample in zip(masks, samples, strict=True)
    ]
    if not rule.whole_rollouts:
        return found
    heard = {rollout for rollout, positions in zip(rollouts, found, strict=True) if positions.any()}
    return [mask & (rollout in heard) for rollout, mask in zip(rollouts, masks, strict=True)]


def kept_together(rule: Loss) -> Together | None:
    """What of a batch a micro-batch must hold as a whole."""
    if rule.unit == "pair":
        return "group"
    return "rollout" if rule.whole_rollouts else None


def _fields_read(batch: TrainingBatch, rule: Loss, computes_reference: bool, has_critic: bool) -> tuple[str, ...]:
    read: list[str] = []
    if not any(any(sample.loss_mask) for sample in batch.samples):
        return ()
    if rule.needs_behaviour:
        read.append("logprobs")
    if rule.needs_advantage:
        read.append("advantages")
    if rule.needs_reference and _brought(batch, "reference_logprobs"):
        read.append("reference_logprobs")
    elif rule.needs_reference and rule.teacher:
        raise TrainerError(
            "the loss learns from a teacher, but no sample has its log-probabilities",
            hint="score the sampled tokens with the teacher and give them as reference_logprobs",
        )
    elif rule.needs_reference and not computes_reference:
        raise TrainerError(
            "the loss compares with a frozen reference, which full fine-tuning does not keep",
            hint="give samples the reference_logprobs that Trainer.score returns before the first update, or use method 'lora'",
        )
    if rule.needs_proximal and _brought(batch, "proximal_logprobs"):
        read.append("proximal_logprobs")
    if _brought(batch, "returns"):
        if not has_critic:
            raise TrainerError(
                "the samples have returns, which a critic learns from, but the trainer has none",
                hint="give the trainer a critic, or use advantages that need none",
            )
        _brought(batch, "values", needed=True)
        read += ["returns", "values"]
    return tuple(read)


def _brought(batch: TrainingBatch, field: str, *, needed: bool = False) -> bool:
    """Whether the samples bring a field along: all that are trained, or none."""
    having = [getattr(sample, field) is not None for sample in batch.samples if any(sample.loss_mask)]
    if (any(having) or needed) and not all(having):
        raise TrainerError(f"{having.count(False)} of {len(having)} samples have no {field}", hint="give it to all, or to none")
    return any(having)


def _check_lengths(number: int, sample: TrainingSample) -> None:
    values = [getattr(sample, field) for field in _PER_TOKEN]
    if len({len(each) for each in values if each is not None}) != 1:
        raise TrainerError(
            f"sample {number}: tokens, mask, logprobs and advantages differ in length", where=sample.rollout_id or None
        )


def _check_values(number: int, sample: TrainingSample, positions: npt.NDArray[Any], read: Sequence[str]) -> None:
    where = sample.rollout_id or None
    if positions[0] == 0:
        raise TrainerError(f"sample {number}: the first token has no context to be predicted from", where=where)
    if not sample.temperature > 0.0:
        raise TrainerError(f"sample {number}: temperature {sample.temperature} has no gradient", where=where)
    for field in read:
        values = np.asarray(getattr(sample, field), dtype=np.float64)[positions]
        if not np.isfinite(values).all():
            position = int(positions[np.flatnonzero(~np.isfinite(values))[0]])
            raise TrainerError(f"sample {number}, position {position}: {field} is not finite", where=where)


def _check_pairs(samples: Sequence[TrainingSample], found: Sequence[TrainedTokens]) -> None:
    answers: dict[str, list[float]] = {sample.group_id: [] for sample in samples}
    for item in found:
        signs = np.unique(np.sign(np.asarray(item.sample.advantages, dtype=np.float64)[item.positions]))
        answers[item.sample.group_id].append(float(signs[0]) if len(signs) == 1 else 0.0)
    for group_id, signs_of_group in answers.items():
        if not group_id or sorted(signs_of_group) != [-1.0, 1.0]:
            raise TrainerError(
                "a preference pair is two answers with at least one trained token each, one with advantages 1, one with −1",
                where=f"group_id '{group_id}'" if group_id else "samples without group_id",
            )
