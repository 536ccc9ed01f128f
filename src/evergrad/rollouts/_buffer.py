"""Groups on their way from the rollouts to the trainer: how many may be under way, and what of them is still fresh.

::

    acquire ─▶ (a group runs) ─▶ put ─▶ queued ─▶ take_batch ─▶ TrainingBatch ─▶ … ─▶ advance
       ▲                          └─▶ discarded, its slot free again                    │
       └──────────────────────────── more slots ◀───────────────────────────────────────┘

* ``acquire`` waits for a slot: at most ``(max_off_policy_steps + 1 + current_step) × groups_per_batch`` groups have started and
  were not discarded. Unblocked by ``advance``, by a discard, by ``resume``.
* ``take_batch`` waits for ``groups_per_batch`` queued groups. Unblocked by ``put``, ``finish``, ``fail``.
* A queued group without variance takes no slot and fills no batch as long as ``resamples_per_batch`` allows, so that another
  runs in its place; which of them are used after all is decided when the batch is cut, by age, whoever finished first.
* Slots bound the age of what starts; a slow group can still come late, so age is checked again, token by token, when the
  batch is cut.

``generated = trained + queued + discarded`` holds at any time. ``state`` is all that a resumed run needs: what was queued
still is, and what was running begins anew before any other group does, so that no task is left out or comes twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from evergrad.rollouts._buffer_state import BufferState
from evergrad.rollouts._figures import batch_figures
from evergrad.rollouts._samples import CutSamples, cut_samples, over_batch, tell_nothing_apart, trainable, turn_rewards
from evergrad.rollouts.advantages import ESTIMATORS, OverlongConfig, estimate, estimate_turns
from evergrad.types import EvergradError, RolloutGroup, TrainingBatch, Usage


class BufferStopped(EvergradError):
    """No further batch will come, and why."""


class NothingToLearn(BufferStopped):
    """Batch after batch had equal rewards wherever they are compared: the tasks are solved, or out of reach."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to run one group."""

    index: int
    """Counts groups in the order of their first start, over all sessions of a run."""
    policy_version: int
    """The live version when it was given."""


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Groups by where they are; ``generated == trained + queued + sum(discarded.values())``.

    What an earlier session left in the queue counts as generated.
    """

    running: int
    generated: int
    queued: int
    trained: int
    discarded: Mapping[str, int]
    """By reason: ``faulted`` (no rollout says anything of the policy), ``uninformative``, ``over_age``."""
    released: int
    """Started, but never handed in."""


class Buffer:
    """Bounded staleness between rollouts and trainer; one event loop, any number of producers, one consumer."""

    def __init__(
        self,
        *,
        max_off_policy_steps: int,
        groups_per_batch: int,
        policy_version: int = 0,
        estimator: str = "group_mean",
        max_running: int | None = None,
        total_batches: int | None = None,
        fault_limit: float = 0.5,
        fault_window: int = 64,
        resamples_per_batch: int = 0,
        flat_batches_allowed: int = 5,
        overlong: OverlongConfig | None = None,
        turn_discount: float = 1.0,
        start: BufferState | None = None,
    ) -> None:
        """
        Args:
            max_off_policy_steps: how many updates a token may be behind when it is trained; 0 is synchronous.
            groups_per_batch: groups in one batch.
            policy_version: the live version now; a resumed run gives its own, so that slots and ages start from there.
            estimator: name of the advantage estimator.
            max_running: groups that may run at once, besides the slots.
            total_batches: starts no more groups than this many batches need; ``None`` for no end.
            fault_limit: stop when a larger share of the last ``fault_window`` rollouts are environment or verifier faults.
            resamples_per_batch: groups without variance that are replaced per batch before they are kept at zero advantage
                (dynamic sampling, DAPO, arXiv 2503.14476).
            overlong: what is taken from the rewards of long rollouts before advantages are.
            turn_discount: γ of an estimator that compares turn by turn.
            flat_batches_allowed: batches in a row without any advantage after which there is nothing to learn: stop.
            start: the :meth:`state` of a buffer whose place this one takes; of a new run when absent.
        """
        if max_off_policy_steps < 0 or groups_per_batch < 1:
            raise EvergradError("max_off_policy_steps must be at least 0 and groups_per_batch at least 1", where="buffer")
        estimate(estimator, [])
        self.max_off_policy_steps, self.groups_per_batch = max_off_policy_steps, groups_per_batch
        self.policy_version, self.current_step = policy_version, 0
        self.usage = Usage()
        """Everything that was generated, discarded or not."""
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        """Rollouts by the first words of their fault."""
        self._compares_within = ESTIMATORS[estimator].least_group > 1
        self._estimator, self._max_running, self._total_batches = estimator, max_running, total_batches
        start = start or BufferState()
        self._fault_limit, self._recent = fault_limit, deque(start.faults, maxlen=fault_window)
        self._resamples_per_batch, self._overlong, self._turn_discount = resamples_per_batch, overlong, turn_discount
        self._flat_batches_allowed, self._flat_batches = flat_batches_allowed, start.flat_batches
        self._running: set[int] = set()
        self._unfinished, self._next_index = deque(start.unfinished), start.next_index
        self._queued: dict[int, RolloutGroup] = {}
        self._flat: set[int] = set()
        """Those of the queued groups that have no variance, if the estimator compares within groups."""
        for index, group in start.queued.items():
            self._queue(index, group)
        self._generated, self._trained, self._released = len(self._queued), 0, 0
        self._discarded: Counter[str] = Counter()
        self._paused = self._finished = False
        self._stop: EvergradError | None = None
        self._changed = asyncio.Condition()

    @property
    def counts(self) -> BufferCounts:
        """Where all groups are now."""
        return BufferCounts(
            running=len(self._running),
            generated=self._generated,
            queued=len(self._queued),
            trained=self._trained,
            discarded=dict(self._discarded),
            released=self._released,
        )

    @property
    def slots(self) -> int:
        """Groups that may have started by now and not been discarded."""
        batches = self.max_off_policy_steps + 1 + self.current_step
        if self._total_batches is not None:
            batches = min(batches, self._total_batches)
        return batches * self.groups_per_batch

    async def acquire(self) -> Ticket | None:
        """Waits for leave to start a group; hand it in with :meth:`put` or give it back with :meth:`release`.

        Returns:
            ``None`` after :meth:`finish`: nothing more is to be started.

        Raises:
            BufferStopped: the buffer stopped, and why.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._stop or self._finished or self._may_start())
            self._raise_stop()
            if self._finished:
                return None
            if self._unfinished:
                index = self._unfinished.popleft()
            else:
                index, self._next_index = self._next_index, self._next_index + 1
            self._running.add(index)
            return Ticket(index, self.policy_version)

    @property
    def free_slots(self) -> int:
        """Groups that may start now."""
        return max(0, self.slots - len(self._running) - self._useful() - self._trained)

    def _may_start(self) -> bool:
        room = self._max_running is None or len(self._running) < self._max_running
        return not self._paused and room and self.free_slots > 0

    def _useful(self) -> int:
        """Queued groups less those without variance that may still be replaced."""
        replaceable = 0 if self._finished else self._resamples_per_batch
        return len(self._queued) - min(len(self._flat), replaceable)

    async def put(self, ticket: Ticket, group: RolloutGroup) -> None:
        """Hands in a group that has run. One whose rollouts all failed for others' reasons is discarded and its slot freed."""
        async with self._changed:
            if ticket.index not in self._running:
                raise EvergradError(f"ticket {ticket.index} is not running", where="buffer.put")
            self._running.discard(ticket.index)
            self._generated += 1
            self._count(group)
            if trainable(group):
                self._queue(ticket.index, group)
            else:
                self._discarded["faulted"] += 1
            self._changed.notify_all()

    def _queue(self, index: int, group: RolloutGroup) -> None:
        self._queued[index] = group
        if self._compares_within:
            rewards = turn_rewards(trainable(group), self._overlong)
            if not any(map(any, estimate_turns(self._estimator, rewards, self._turn_discount))):
                self._flat.add(index)

    def _count(self, group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            self.usage += rollout.usage
            self.outcomes[rollout.outcome.value] += 1
            self._recent.append(not rollout.outcome.trainable)
            if rollout.fault:
                self.faults[_kind(rollout.fault)] += 1
        share = sum(self._recent) / len(self._recent) if self._recent else 0.0
        if share > self._fault_limit and len(self._recent) * 4 >= (self._recent.maxlen or 0) and self._stop is None:
            causes = ", ".join(f"{count}× {kind}" for kind, count in self.faults.most_common(3))
            self._stop = BufferStopped(
                f"{share:.0%} of the last {len(self._recent)} rollouts failed for reasons that are not the model's: {causes}",
                where="rollouts",
                hint="fix the cause named first, then resume",
            )

    async def release(self, ticket: Ticket) -> None:
        """Gives back a ticket whose group will not be handed in."""
        async with self._changed:
            if ticket.index in self._running:
                self._running.discard(ticket.index)
                self._released += 1
                self._changed.notify_all()

    async def take_batch(self, timeout_s: float = 3_600.0) -> TrainingBatch:
        """Waits for a whole batch and cuts it: oldest groups first, over-age tokens masked and counted.

        After :meth:`finish`, what is left comes as a short batch.

        Raises:
            BufferStopped: no batch will come, and why.
            EvergradError: none came within ``timeout_s``.
        """
        taken: dict[int, tuple[RolloutGroup, CutSamples]] = {}
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    while len(taken) < self.groups_per_batch:
                        missing = self.groups_per_batch - len(taken)
                        await self._changed.wait_for(lambda missing=missing: self._stop or self._ready(missing))  # type: ignore[misc]
                        self._raise_stop()
                        if not self._queued:
                            break
                        taken.update(self._cut(missing))
            except BaseException as error:
                for index, (group, _) in taken.items():
                    self._queue(index, group)
                if not isinstance(error, TimeoutError):
                    raise
                state = f"{len(self._running)} groups running, {len(self._queued)} queued of {self.groups_per_batch}"
                raise EvergradError(f"no batch within {timeout_s:g} s: {state}", where="buffer") from error
            if not taken:
                raise BufferStopped("all groups have been trained", where="buffer")
            self._trained += len(taken)
            batch = self._batch([taken[index] for index in sorted(taken)], self._pass_over())
            self._watch_flatness(batch)
            self._changed.notify_all()
            return batch

    def _ready(self, missing: int) -> bool:
        return self._useful() >= missing or (self._finished and not self._running)

    def _pass_over(self) -> list[RolloutGroup]:
        """Discards the groups that others have replaced."""
        if self._finished:
            return []
        indices = sorted(self._flat)[: self._resamples_per_batch]
        self._flat.difference_update(indices)
        self._discarded.update({"uninformative": len(indices)} if indices else {})
        return [self._queued.pop(index) for index in indices]

    def _cut(self, count: int) -> dict[int, tuple[RolloutGroup, CutSamples]]:
        """Takes ``count`` queued groups, the oldest first, those without variance last; what is over age is discarded."""
        kept = {}
        # Without resampling every group has its turn, variance or not.
        last = self._flat if self._resamples_per_batch else ()
        for index in sorted(self._queued, key=lambda each: (each in last, each))[:count]:
            group = self._queued.pop(index)
            self._flat.discard(index)
            oldest = self.policy_version - self.max_off_policy_steps
            cut = cut_samples(
                group,
                self._estimator,
                oldest_version=oldest,
                overlong=self._overlong,
                turn_discount=self._turn_discount,
            )
            if cut.samples or not cut.over_age_tokens:
                kept[index] = (group, cut)
            else:
                self._discarded["over_age"] += 1
                self._changed.notify_all()
        return kept

    def _batch(self, taken: list[tuple[RolloutGroup, CutSamples]], passed_over: list[RolloutGroup]) -> TrainingBatch:
        samples = over_batch([sample for _, cut in taken for sample in cut.samples], self._estimator)
        valid = sum(sum(sample.loss_mask) for sample in samples)
        metrics = batch_figures(taken, passed_over, self.policy_version, self._overlong)
        metrics["informative_groups"] = float(self._informative(taken))
        return TrainingBatch(samples, valid, metrics)

    def _informative(self, taken: list[tuple[RolloutGroup, CutSamples]]) -> int:
        """Groups that something can be learned from: they differ within, or what they are compared with outside differs, or
        rewards play no part."""
        estimator = ESTIMATORS[self._estimator]
        if not estimator.reads_rewards:
            return len(taken)
        if self._compares_within:
            return sum(any(any(sample.advantages) for sample in cut.samples) for _, cut in taken)
        rollouts = [rollout for group, _ in taken for rollout in trainable(group)]
        return 0 if tell_nothing_apart(rollouts, self._overlong, by_turn=estimator.needs_critic) else len(taken)

    def _watch_flatness(self, batch: TrainingBatch) -> None:
        self._flat_batches = 0 if batch.metrics["informative_groups"] else self._flat_batches + 1
        if self._flat_batches > self._flat_batches_allowed and self._stop is None:
            within = "within every group" if self._compares_within else "throughout"
            self._stop = NothingToLearn(
                f"{self._flat_batches} batches in a row had equal rewards {within}: nothing to learn from",
                where=f"mean reward {batch.metrics['reward_mean']:.3f}",
                hint="near 1 the tasks are solved: take harder ones; near 0 they are out of reach: warm-start first",
            )

    async def advance(self, policy_version: int) -> None:
        """Tells that a step ended and which version is live now; frees the next batch's slots.

        Raises:
            EvergradError: the version went back.
        """
        async with self._changed:
            if policy_version < self.policy_version:
                raise EvergradError(f"policy version went back from {self.policy_version} to {policy_version}", where="buffer")
            self.policy_version = policy_version
            self.current_step += 1
            self._changed.notify_all()

    def state(self) -> BufferState:
        """For a buffer that takes this one's place from here on; between two awaits nothing of it changes."""
        unfinished = tuple(sorted({*self._running, *self._unfinished}))
        return BufferState(self._next_index, unfinished, dict(self._queued), self._flat_batches, tuple(self._recent))

    async def pause(self) -> None:
        """No group starts until :meth:`resume`; returns when none is running any more."""
        async with self._changed:
            self._paused = True
            await self._changed.wait_for(lambda: not self._running or self._stop)

    async def resume(self) -> None:
        """Ends a :meth:`pause`."""
        async with self._changed:
            self._paused = False
            self._changed.notify_all()

    async def finish(self) -> None:
        """No group will start any more; what runs and what is queued still makes batches."""
        async with self._changed:
            self._finished = True
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Makes every waiting and later call raise: a producer died, and the consumer must hear of it."""
        async with self._changed:
            if self._stop is None:
                stop = BufferStopped(f"the rollouts ended with {type(error).__name__}: {error}".rstrip(": "))
                stop.__cause__ = error
                self._stop = error if isinstance(error, EvergradError) else stop
            self._changed.notify_all()

    def _raise_stop(self) -> None:
        if self._stop is not None:
            raise self._stop


def _kind(fault: str) -> str:
    """The stable part of a fault's text, to count by."""
    return fault[:80]
