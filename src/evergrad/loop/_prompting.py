"""Which tasks the groups of one phase learn from under ``rl.tasks = "informative"``: slices that still differ get more of them.

What was learned of the slices is in the state and changes once a step, and a group's number decides its draw: in synchronous
mode a run that goes on after a kill draws the same tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from evergrad.loop._folder import LoopState
from evergrad.rollouts import SliceRecord, derive_seed, draw_slice, informative_group_probability, neyman_shares
from evergrad.types import RolloutGroup, Task


class TaskChoice:
    """Draws the tasks of one phase.

    Args:
        state: Of the run; ``slices`` and ``slices_taken`` in it are kept up to date, once a step.
        by_slice: Slice to its tasks, in their order. None comes twice before all of its slice have come once.
        seed: Of the run.
    """

    def __init__(self, state: LoopState, by_slice: Mapping[str, Sequence[Task]], seed: int) -> None:
        self._state, self._by_slice, self._seed = state, by_slice, seed
        total = sum(map(len, by_slice.values()))
        self._shares = {name: len(tasks) / total for name, tasks in by_slice.items()}
        self._drawn: dict[int, str] = {}
        self._shown: dict[int, tuple[float, float, float]] = {}

    def task(self, number: int) -> Task:
        """The task of group ``number`` of this cycle; ask in rising order."""
        if number not in self._drawn:
            random = Random(derive_seed(self._seed, "slices", self._state.cycle, number))
            self._drawn[number] = draw_slice(self._shares, self._records(), random)
        name = self._drawn[number]
        taken = Counter(other for earlier, other in self._drawn.items() if earlier < number)
        position = self._state.slices_taken.get(name, 0) + taken[name]
        return self._by_slice[name][position % len(self._by_slice[name])]

    def see(self, number: int, group: RolloutGroup) -> None:
        """Keeps what a group has shown until its step ends."""
        judged = [rollout for rollout in group.rollouts if rollout.outcome.trainable]
        use = [rollout.usage for rollout in judged]
        tokens = sum(each.prompt_tokens - each.cached_tokens + each.completion_tokens for each in use)
        successes = sum(rollout.success for rollout in judged)
        self._shown[number] = (float(successes), float(len(judged) - successes), float(tokens))

    def end_step(self) -> None:
        """Counts the groups that have ended since the last step, and lets what was known fade."""
        records, state = self._records(), self._state
        for record in records.values():
            record.fade()
        for number in sorted(self._shown):
            name, shown = self._drawn.pop(number, None), self._shown.pop(number)
            if name is None:
                continue  # of an earlier contract
            state.slices_taken[name] = state.slices_taken.get(name, 0) + 1
            records.setdefault(name, SliceRecord()).add(*shown)
        state.slices = {name: [record.successes, record.failures, record.tokens] for name, record in records.items()}

    def figures(self, group_size: int) -> dict[str, float]:
        """Success rate of each slice that was seen, and the share of informative groups to be expected of the next step."""
        records = self._records()
        rates = {name: (1 + each.successes) / (2 + each.successes + each.failures) for name, each in records.items()}
        tokens = {name: max(1.0, each.tokens) / max(1.0, each.successes + each.failures) for name, each in records.items()}
        shares = neyman_shares({name: self._shares[name] for name in rates}, rates, tokens)
        expected = sum(share * informative_group_probability(rates[name], group_size) for name, share in shares.items())
        return {**{f"success_{name or 'all'}": rate for name, rate in rates.items()}, "informative_expected": expected}

    def _records(self) -> dict[str, SliceRecord]:
        return {name: SliceRecord(*numbers) for name, numbers in self._state.slices.items()}
