"""Several engines as one: requests go where their prompts are cached and room is, and survive the engine they were at.

The walk of one request::

    __call__ ─▶ _place: PrefixIndex.match ─▶ RoutingRule.choose ─▶ charge ─▶ room? ─ no ─▶ the replica's queue ─┐
                  ▲                                                          │ yes                              │ a slot is free
                  │ replica lost: other replica, tokens kept                 ▼                                  ▼
                  └───────────────────────────────────────────────────── _attempt: pieces come in ◀─────────────┘
                                                                             └─▶ finished: Completion, index corrected

Beside it, a watch over each replica asks for its health: a replica that answers is ready, one that does not is passed over, and
one that stays silent is lost, whereupon its requests go on elsewhere from the token that they had reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from evergrad.inference._dispatch import BLOCK_TOKENS, Dispatcher
from evergrad.inference._replica import Replica, ReplicaClient, State
from evergrad.inference._routing import CostRule, RoutingRule, assign_groups, group_of
from evergrad.inference.config import EngineError, EngineUnavailable
from evergrad.types import Completion, Sampling

LOOK_EVERY_S = 1.0
SILENT_LOOKS = 3
"""So many looks in a row without an answer, each of up to five seconds, and a replica's requests are taken elsewhere."""
LOGPROB_TOLERANCE = 1e-3
"""Nats by which replicas of one version may differ."""

T = TypeVar("T")
Bring = Callable[[ReplicaClient], Awaitable[dict[str, Any]]]


class Router:
    """N replicas behind the interface of one :class:`~evergrad.inference.client.EngineClient`.

    >>> async with Router() as router:  # doctest: +SKIP
    ...     await router.add("a", EngineClient("http://127.0.0.1:8000", token="secret"))
    ...     await router.add("b", EngineClient("http://127.0.0.1:8001", token="secret"))
    ...     completion = await router([1, 2, 3], Sampling(max_tokens=8), session_id="g1/0")

    Args:
        rule: Chooses among the replicas that are ready.
        patience_s: How long a request waits while no replica is ready.
    """

    def __init__(self, rule: RoutingRule | None = None, *, patience_s: float = 120.0) -> None:
        self._dispatcher = Dispatcher(rule or CostRule(), patience_s)
        self._replicas, self._pins, self._index = self._dispatcher.replicas, self._dispatcher.pins, self._dispatcher.index
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._descriptor: Mapping[str, Any] | None = None
        self._bring: Bring | None = None
        """Gives a replica the weights that are served."""
        self._policy_version = 0
        self._weights = asyncio.Lock()
        """Held while weights change or a replica joins, so that none misses a version."""
        self._moved_sessions = 0

    # ---- generation

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """One completion.

        Raises:
            EngineUnavailable: no replica was ready for ``patience_s``, or ``MAX_TRIES`` of them went away under it.
            EngineError: a replica refused the request.
        """
        return await self._dispatcher.complete(tuple(prompt_token_ids), sampling, session_id)

    # ---- replicas

    async def add(self, name: str, client: ReplicaClient) -> None:
        """A replica joins, and gets requests once it is healthy and has the weights that are served.

        Raises:
            EngineError: the name is taken, or the replica does not answer or refuses the weights; it is not added then.
        """
        if name in self._replicas:
            raise EngineError(f"there is a replica '{name}' already", hint="remove it first, or choose another name")
        replica = Replica(name, client)
        async with self._weights:
            if self._descriptor is not None:
                await client.attach(self._descriptor)
            self._note(replica, await self._brought_up(replica))
            self._replicas[name] = replica
        self._dispatcher.rise(replica)
        self._watches[name] = asyncio.create_task(self._watch(replica), name=f"watch-{name}")

    async def remove(self, name: str) -> None:
        """A replica leaves at once; its requests go on elsewhere from the token that they had reached.

        Raises:
            EngineError: there is no such replica.
        """
        replica, watch = self._find(name), self._watches.pop(name, None)
        if watch is None:
            return  # another removal is at it
        watch.cancel()
        await self._lose(replica, "removed")
        del self._replicas[name]
        self._index.remove(name)
        if replica.leaving is not None:
            replica.leaving.set()
        await replica.client.close()

    async def drain(self, name: str) -> None:
        """A replica leaves when it has finished what it is at; new requests, later turns included, go elsewhere meanwhile.

        Raises:
            EngineError: there is no such replica.
        """
        replica = self._find(name)
        replica.leaving = replica.leaving or asyncio.Event()
        if replica.state is State.READY:
            replica.state = State.DRAINING
        self._dispatcher.requeue(replica)
        replica.note_idle()
        await replica.leaving.wait()
        if self._replicas.get(name) is replica:
            await self.remove(name)

    def _find(self, name: str) -> Replica:
        if name not in self._replicas:
            raise EngineError(f"there is no replica '{name}'", hint=f"there are: {', '.join(self._replicas) or 'none'}")
        return self._replicas[name]

    async def _watch(self, replica: Replica) -> None:
        """Asks for the replica's health again and again. Never ends by itself."""
        silent = 0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look(replica)
            except EngineError as error:
                silent = silent + 1 if isinstance(error, EngineUnavailable) else 0
                self._dispatcher.fall(replica, str(error))
                if silent == SILENT_LOOKS:
                    await self._lose(replica, replica.reason)
            else:
                silent = 0
                self._dispatcher.rise(replica)

    async def _look(self, replica: Replica) -> None:
        """
        Raises:
            EngineError: the replica is not well, or refuses the version that is served.
        """
        health = await replica.client.health()
        if self._lacks_weights(health):
            # Asked again with the weights held still: it may just be taking them.
            async with self._weights:
                health = await self._brought_up(replica)
        self._note(replica, health)

    async def _brought_up(self, replica: Replica) -> dict[str, Any]:
        """The health of a replica that has the version that is served by then."""
        health = await replica.client.health()
        if self._bring is not None and self._lacks_weights(health):
            answer = await self._bring(replica.client)
            health["policy_version"] = answer["policy_version"]
            self._index.clear(replica.name)
        return health

    def _lacks_weights(self, health: Mapping[str, Any]) -> bool:
        return self._bring is not None and health["policy_version"] != self._policy_version

    def _note(self, replica: Replica, health: Mapping[str, Any]) -> None:
        replica.policy_version = int(health["policy_version"])
        replica.limit.observe(health["load"])
        self._index.add(replica.name, int(health["load"]["kv_cache_tokens"]) // BLOCK_TOKENS)

    async def _lose(self, replica: Replica, reason: str) -> None:
        """Takes everything from a replica that is gone; nothing is known about its cache any more."""
        self._dispatcher.fall(replica, reason)
        replica.lost = True
        await self._reopen(replica)
        for attempt in replica.attempts:
            attempt.cancel()
        self._index.clear(replica.name)

    # ---- questions to all

    async def _ask(self, replica: Replica, call: Callable[[Replica], Awaitable[T]]) -> T:
        """One call, which is waited for no longer than the replica lasts.

        Raises:
            EngineUnavailable: the replica is lost, or is by the time that it should answer.
        """
        if replica.lost:
            raise EngineUnavailable(replica.reason)
        asked = asyncio.ensure_future(call(replica))
        replica.attempts.add(asked)
        try:
            await asyncio.wait({asked})
        finally:
            replica.attempts.discard(asked)
            asked.cancel()
        if asked.cancelled():
            raise EngineUnavailable(f"{replica.name} was lost meanwhile: {replica.reason}")
        return asked.result()

    async def _ask_all(self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[T]]) -> dict[Replica, T]:
        """The answers of those that can be reached; the others get no requests until they have said that they are well.

        Raises:
            EngineError: one of them refuses.
        """
        answers = await asyncio.gather(*(self._ask(each, call) for each in replicas), return_exceptions=True)
        found: dict[Replica, T] = {}
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, EngineUnavailable):
                self._dispatcher.suspect(replica, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[replica] = answer
        return found

    # ---- lockstep sessions

    async def open_sessions(self, session_ids: Iterable[str]) -> None:
        """Deals the sessions out by group, evenly; each stays with its replica, which steps in lockstep with those it got."""
        await self._deal([each for each in session_ids if each not in self._pins])

    async def _deal(self, session_ids: Sequence[str]) -> None:
        # Also those that are down for a moment: who gets which session must not depend on when somebody was slow to answer.
        ready = {name: len(each.pinned) for name, each in self._replicas.items() if not each.lost and each.leaving is None}
        if not ready:
            raise EngineUnavailable("no replica is left to open sessions at")
        groups = {each: group_of(each) or each for each in session_ids}
        known = {group_of(session) or session: name for session, name in self._pins.items() if name in ready}
        dealt = assign_groups([group for group in groups.values() if group not in known], ready) | known
        per_replica: dict[str, list[str]] = {}
        for session, group in groups.items():
            per_replica.setdefault(dealt[group], []).append(session)
        asked = [self._replicas[name] for name in per_replica]
        opened = await self._ask_all(asked, lambda each: each.client.open_sessions(per_replica[each.name]))
        if per_replica and not opened:
            raise EngineUnavailable("no replica could be reached to open sessions at")
        for name, own in per_replica.items():
            # Also where nobody answered: when that replica is lost, its sessions move like all that were open there.
            self._replicas[name].pinned.update(own)
            self._pins.update(dict.fromkeys(own, name))

    async def close_sessions(self, session_ids: Iterable[str]) -> int:
        """Stops waiting for them; returns how often replicas went on without an open session so far."""
        per_replica: dict[str, list[str]] = {}
        for session in session_ids:
            name = self._pins.pop(session, None)
            if name is not None and name in self._replicas:
                self._replicas[name].pinned.discard(session)
                self._replicas[name].leave(session)
                self._replicas[name].note_idle()
                per_replica.setdefault(name, []).append(session)
        asked = [self._replicas[name] for name in per_replica]
        misses = await self._ask_all(asked, lambda each: each.client.close_sessions(per_replica[each.name]))
        return sum(misses.values())

    def take_lockstep_misses(self) -> int:
        """As of one engine, over all replicas; a session that had to move counts as one."""
        moved, self._moved_sessions = self._moved_sessions, 0
        return moved + sum(each.client.take_lockstep_misses() for each in self._replicas.values())

    async def _reopen(self, lost: Replica) -> None:
        """Opens a lost replica's lockstep sessions elsewhere, so that their requests do not wait for it."""
        sessions, lost.pinned = sorted(lost.pinned), set()
        self._moved_sessions += len(sessions)
        if sessions:
            try:
                await self._deal(sessions)
            except EngineError:
                # Without a replica that takes them they are ordinary sessions: sampled all the same, and counted as moved.
                for session in sessions:
                    self._pins.pop(session, None)
        self._dispatcher.place_stranded()

    # ---- weights

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Has every replica attach to a publisher, and each that joins later."""
        async with self._weights:
            self._descriptor = dict(descriptor)
            answers = await asyncio.gather(*(each.client.attach(descriptor) for each in self._replicas.values()))
        return answers[0] if answers else {}

    async def update_weights(self, manifest: Mapping[str, Any], *, full_precision: bool = False) -> dict[str, Any]:
        """Has every replica take a published version; one that does not gets no requests until it has.

        Returns:
            What the slowest replica says (see ``EngineClient.update_weights``), the longest pause, and ``left_behind``: the
            names of replicas without the version, each with its reason.

        Raises:
            EngineError: no replica took it; the old version is served on.
        """
        return await self._change(
            int(manifest["policy_version"]), lambda client: client.update_weights(manifest, full_precision=full_precision)
        )

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Has every replica read a folder; else as :meth:`update_weights`."""
        return await self._change(policy_version, lambda client: client.load_weights(weights_uri, policy_version, served_names))

    async def _change(self, policy_version: int, bring: Bring) -> dict[str, Any]:
        async with self._weights:
            replicas = list(self._replicas.values())
            results = await asyncio.gather(
                *(self._ask(each, lambda replica: bring(replica.client)) for each in replicas), return_exceptions=True
            )
            took: list[dict[str, Any]] = []
            failed: dict[Replica, EngineError] = {}
            for replica, result in zip(replicas, results, strict=True):
                if isinstance(result, EngineError):
                    failed[replica] = result
                elif isinstance(result, BaseException):
                    raise result
                else:
                    took.append(result)
                    replica.policy_version = policy_version
                    self._index.clear(replica.name)
            if not took:
                raise next(iter(failed.values()), EngineUnavailable(f"no replica to take version {policy_version}"))
            self._bring, self._policy_version = bring, policy_version
            for replica, error in failed.items():
                self._dispatcher.fall(replica, f"does not have version {policy_version}: {error}")
        return {
            **max(took, key=lambda each: float(each["seconds"])),
            "policy_version": policy_version,
            "pause_s": max(float(each["pause_s"]) for each in took),
            "left_behind": {replica.name: str(error) for replica, error in failed.items()},
        }

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1: computed by every replica that is ready, so that what
        is compared with it is compared with all of them. One that dies meanwhile is passed over.

        Raises:
            EngineError: no replica is ready, or two of them differ by more than a thousandth of a nat.
        """
        ready = [each for each in self._replicas.values() if each.state is State.READY]
        answers = await self._ask_all(ready, lambda each: each.client.logprobs(token_ids))
        if not answers:
            raise EngineUnavailable(f"no replica is ready: {_reasons(self._replicas.values())}")
        (first_one, first), *others = answers.items()
        for replica, values in others:
            worst = max((abs(a - b) for a, b in zip(first, values, strict=True)), default=0.0)
            if not worst <= LOGPROB_TOLERANCE:
                raise EngineError(
                    f"{first_one.name} and {replica.name} differ by {worst:.2g} nats under version {replica.policy_version}",
                    hint="one of them does not hold the weights that were published; end it",
                )
        return first

    async def reset_prefix_cache(self) -> None:
        """Has every replica forget all computed prompts; one that cannot be reached is passed over.

        Raises:
            EngineUnavailable: there are replicas, and none can be reached.
        """
        replicas = list(self._replicas.values())
        answered = await self._ask_all(replicas, lambda each: each.client.reset_prefix_cache())
        if replicas and not answered:
            raise EngineUnavailable(f"no replica can be reached: {_reasons(replicas)}")
        for replica in replicas:
            self._index.clear(replica.name)

    # ---- the whole

    async def health(self) -> dict[str, Any]:
        """``{status, reason, policy_version, replicas}``; ``ok`` while any replica is ready."""
        replicas = {name: each.report() for name, each in self._replicas.items()}
        ready = any(each.state is State.READY for each in self._replicas.values())
        reason = None if ready else _reasons(self._replicas.values())
        status = "ok" if ready else "failing"
        return {"status": status, "reason": reason, "policy_version": self._policy_version, "replicas": replicas}

    async def close(self) -> None:
        """Stops the watches and closes the clients; replicas run on."""
        watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.gather(*(each.client.close() for each in self._replicas.values()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _reasons(replicas: Iterable[Replica]) -> str:
    return "; ".join(f"{each.name}: {each.reason}" for each in replicas) or "no replica"
