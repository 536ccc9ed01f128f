"""What an advantage estimator is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimator:
    """First something for each rollout of a group; then, for some, something over the batch that the groups make.

    The two are apart because groups are accepted, replaced and aged one by one before there is a batch.
    """

    of_group: Callable[[Sequence[float]], list[float]]
    """Rewards of a group's trainable rollouts to one finite number for each."""
    by_turn: bool = False
    """``of_group`` gets what was earned from one turn on, turn after turn, of the rollouts that have reached it."""
    of_batch: Callable[[Sequence[float]], list[float]] | None = None
    """Numbers of all trained tokens of a batch to their advantages; None leaves them as they are."""
    least_group: int = 2
    """Rollouts of one task that it takes to compare. With 1 a reward is compared outside its group, so that a group of equal
    rewards says something, too."""
    needs_critic: bool = False
    """Samples get their ``rewards`` token by token, for ``rollouts.appraise`` to compare with a critic's values."""
    reads_rewards: bool = True
    """Whether equal rewards leave nothing to learn from."""
