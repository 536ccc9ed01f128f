"""From rewards of turns to one number a turn: what was still earned from there on, against the group's other rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """``G_t = Σ_k γ^k r_{t+k}``: what each turn and those after it earned.

    >>> returns_to_go([0.0, 0.5, 1.0], 0.5)
    [0.5, 1.0, 1.0]
    """
    found: list[float] = []
    running = 0.0
    for reward in reversed(rewards):
        running = reward + discount * running
        found.append(running)
    return found[::-1]


def compared_by_turn(
    compare: Callable[[Sequence[float]], list[float]], rewards: Sequence[Sequence[float]], discount: float
) -> list[list[float]]:
    """Each turn's return-to-go, compared with those of the same turn in the group's other rollouts (turn-level advantages for
    agents of several turns: Zeng et al. 2025, arXiv 2505.11821).

    A baseline of the same turn knows what is earned before it and what is left to earn; it holds nothing that the turn itself
    decided, whatever the others' lengths. A turn that one rollout alone has reached is compared with nothing and gets 0.

    Args:
        compare: Returns of several rollouts to one number for each, such as :func:`~.group_mean.group_mean`.
        rewards: Of each rollout, what each of its turns earned.
        discount: γ, a turn.

    >>> from evergrad.rollouts.advantages.group_mean import group_mean
    >>> compared_by_turn(group_mean, [[0.0, 1.0], [0.0, 0.0], [0.5]], 1.0)
    [[0.5, 0.5], [-0.5, -0.5], [0.0]]
    """
    returns = [returns_to_go(each, discount) for each in rewards]
    advantages: list[list[float]] = [[] for _ in rewards]
    for turn in range(max(map(len, returns), default=0)):
        reached = [number for number, each in enumerate(returns) if len(each) > turn]
        for number, advantage in zip(reached, compare([returns[number][turn] for number in reached]), strict=True):
            advantages[number].append(advantage)
    return advantages
