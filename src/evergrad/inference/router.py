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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from evergrad.inference._prefixes import PrefixIndex
from evergrad.inference._replica import Charge, Replica, ReplicaClient, Request, State
from evergrad.inference._routing import CostRule, Route, RoutingRule, assign_groups, group_of
from evergrad.inference.config import EngineError, EngineUnavailable
from evergrad.types import Completion, FinishReason, Sampling

BLOCK_TOKENS = 16
LOOK_EVERY_S = 1.0
SILENT_LOOKS = 3
"""So many looks in a row without an answer, each of up to five seconds, and a replica's requests are taken elsewhere."""
MAX_TRIES = 5
"""Replicas that may fail one request before it is given up: it may be the request that fails them."""
REMEMBERED = 100_000
"""Sessions and groups whose place is remembered."""
LOGPROB_TOLERANCE = 1e-3
"""Nats by which replicas of one version may differ."""

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
        self._rule = rule or CostRule()
        self._patience_s = patience_s
        self._replicas: dict[str, Replica] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._index = PrefixIndex(BLOCK_TOKENS)
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()
        """(``session`` or ``group``, its id) to the replica where it was last, or began."""
        self._pins: dict[str, str] = {}
        """Lockstep sessions to their replica."""
        self._stranded: dict[Request, None] = {}
        """Requests for which no replica is ready."""
        self._descriptor: Mapping[str, Any] | None = None
        self._bring: Bring | None = None
        """Gives a replica the weights that are served."""
        self._policy_version = 0
        self._weights = asyncio.Lock()
        """Held while weights change or a replica joins, so that none misses a version."""
        self._moved_sessions = 0
        self._first_turns = self._later_turns = 0

    # ---- generation

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        """One completion.

        Raises:
            EngineUnavailable: no replica was ready for ``patience_s``, or ``MAX_TRIES`` of them went away under it.
            EngineError: a replica refused the request.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        home = None if session_id is None else self._homes.get(("session", session_id))
        request = Request(tuple(prompt_token_ids), sampling, session_id, group_of(session_id), home is not None)
        self._later_turns += request.later_turn
        self._first_turns += not request.later_turn
        while request.finish_reason is None:
            replica = await self._admission(request)
            await self._attempt(request, replica)
        return request.completion(loop.time() - started)

    async def _admission(self, request: Request) -> Replica:
        """The replica that has room for the request; it is on that replica's books by then."""
        admitted: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        request.admitted = admitted
        try:
            self._place(request)
            while not admitted.done():
                await asyncio.wait({admitted}, timeout=self._patience_s)
                if request in self._stranded:
                    raise self._nobody(request)
            return admitted.result()
        except BaseException:
            self._withdraw(request)
            raise
        finally:
            request.admitted = None

    def _nobody(self, request: Request) -> EngineUnavailable:
        said = [str(error) for error in request.errors[-1:]] or [f"{r.name}: {r.reason}" for r in self._replicas.values()]
        return EngineUnavailable(f"no replica was ready for {self._patience_s:g} s: {'; '.join(said) or 'there is none'}")

    def _place(self, request: Request) -> None:
        """Puts the request on the books of the replica that the rule chooses, and sends it or queues it there."""
        replica = self._choose(request)
        if replica is None:
            self._stranded[request] = None
            return
        self._assign(request, replica)
        if replica.has_room or request.session in self._pins:
            self._send(request, replica)
        else:
            replica.enqueue(request)

    def _place_stranded(self) -> None:
        stranded, self._stranded = self._stranded, {}
        for request in stranded:
            self._place(request)

    def _choose(self, request: Request) -> Replica | None:
        pinned = self._replicas.get(self._pins.get(request.session or "", ""))
        if pinned is not None:
            return pinned if pinned.state is not State.DOWN else None
        ready = [each for each in self._replicas.values() if each.state is State.READY]
        if not ready:
            return None
        if len(ready) == 1:
            return ready[0]
        count = len(request.prompt) + len(request.token_ids)
        # The last token is always computed, since what follows it is not cached.
        most, found = (count - 1) // BLOCK_TOKENS, dict[str, int]()
        chains = {version: self._chain(request, version) for version in {each.policy_version for each in ready}}
        for version, chain in chains.items():
            depths = self._index.match(chain)
            found |= {each.name: depths.get(each.name, 0) for each in ready if each.policy_version == version}
        options = [each.option(chains[each.policy_version], min(most, found[each.name])) for each in ready]
        key = ("session", request.session) if request.later_turn else ("group", request.group)
        home = self._homes.get((key[0], key[1] or ""))
        route = Route(-(-count // BLOCK_TOKENS), request.session, request.group, home, request.later_turn, self._return_share)
        return self._replicas[self._rule.choose(route, options)]

    @property
    def _return_share(self) -> float:
        return self._later_turns / max(1, self._first_turns + self._later_turns)

    def _chain(self, request: Request, version: int) -> list[int]:
        key = (len(request.token_ids), version)
        if key not in request.chains:
            request.chains[key] = self._index.chain((*request.prompt, *request.token_ids), version)
        return request.chains[key]

    def _assign(self, request: Request, replica: Replica) -> None:
        chain = self._chain(request, replica.policy_version)
        prediction = self._index.use(replica.name, chain)
        charge = Charge(chain, chain[prediction.blocks :], prediction, replica.policy_version)
        replica.charge(request, charge)
        if request.session is not None:
            before = self._homes.get(("session", request.session))
            if before in self._replicas and before != replica.name:
                self._replicas[before].leave(request.session)
            replica.reside(request.session, len(chain), asyncio.get_running_loop().time())
            self._remember(("session", request.session), replica)
        if request.group is not None and not request.later_turn:
            self._remember(("group", request.group), replica)

    def _remember(self, key: tuple[str, str], replica: Replica) -> None:
        self._homes[key] = replica.name
        self._homes.move_to_end(key)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    def _send(self, request: Request, replica: Replica) -> None:
        assert request.admitted is not None, "nobody waits for it"
        replica.charges[request].sent = True
        replica.num_sent += 1
        request.admitted.set_result(replica)

    def _withdraw(self, request: Request) -> None:
        """The request is given up before a replica had room for it, or in the moment that one had."""
        self._stranded.pop(request, None)
        for replica in self._replicas.values():
            if request in replica.charges:
                self._settle(request, replica)

    async def _attempt(self, request: Request, replica: Replica) -> None:
        """Has the replica go on with the request, to its end or to the replica's own; what it drew is kept either way."""
        reading = asyncio.create_task(self._read(request, replica))
        replica.attempts.add(reading)
        try:
            await asyncio.wait({reading})
        finally:
            replica.attempts.discard(reading)
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            self._settle(request, replica)
        error: BaseException | None = EngineUnavailable(f"{replica.name} was lost: {replica.reason}")
        if not reading.cancelled():
            error = reading.exception()
        if error is None:
            return
        if not isinstance(error, EngineUnavailable):
            raise error
        self._suspect(replica, error)
        request.errors.append(error)
        if len(request.errors) >= MAX_TRIES:
            raise EngineUnavailable(f"given up after {MAX_TRIES} tries; the last one: {error}") from error

    async def _read(self, request: Request, replica: Replica) -> None:
        charge, before = replica.charges[request], len(request.token_ids)
        sampling = request.sampling_left()
        if not sampling.max_tokens:
            request.finish_reason = FinishReason.LENGTH  # the last piece was lost, and said nothing else
            return
        tokens = (*request.prompt, *request.token_ids)
        async for piece in replica.client.stream(tokens, sampling, session_id=request.session, drawn=before):
            if piece.token_ids and charge.pending:
                replica.prefilled(charge)
            request.take(piece, before)
            replica.wrote(charge, 1 + (len(request.token_ids) - before) // BLOCK_TOKENS)
        if request.finish_reason is None:
            raise EngineUnavailable("the answer broke off", where=replica.name)
        self._learn(request, replica, charge)

    def _learn(self, request: Request, replica: Replica, charge: Charge) -> None:
        """What a finished request says about the replica's cache."""
        if replica.policy_version != charge.version:
            return
        self._index.correct(replica.name, charge.prediction, request.cached_tokens // BLOCK_TOKENS)
        # The last token was drawn, and never computed.
        whole = (*request.prompt, *request.token_ids[:-1])
        self._index.computed(replica.name, self._index.chain(whole, charge.version, after=charge.chain))

    def _settle(self, request: Request, replica: Replica) -> None:
        """Takes a request off a replica's books, and gives its place to the next."""
        if request not in replica.charges:
            return
        waiting = replica.num_queued > 0
        charge = replica.discharge(request)
        if charge.sent:
            replica.limit.finished(was_binding=waiting)
        replica.note_idle()
        self._fill(replica)

    def _fill(self, replica: Replica) -> None:
        while replica.has_room:
            request = replica.next_waiting()
            if request is None:
                break
            self._send(request, replica)
        if replica.state is State.READY:
            self._steal(replica)

    def _steal(self, replica: Replica) -> None:
        """A replica that is half empty takes new sessions that wait elsewhere."""
        while 2 * replica.num_sent < replica.limit.value:
            longest = max(self._replicas.values(), key=lambda each: len(each.first_turns))
            request = None if longest is replica else longest.last_new()
            if request is None:
                return
            longest.discharge(request)
            self._assign(request, replica)
            self._send(request, replica)

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
        self._rise(replica)
        self._watches[name] = asyncio.create_task(self._watch(replica), name=f"watch-{name}")

    async def remove(self, name: str) -> None:
        """A replica leaves at once; its requests go on elsewhere from the token that they had reached.

        Raises:
            EngineError: there is no such replica.
        """
        replica = self._find(name)
        self._watches.pop(name).cancel()
        await self._lose(replica, "removed")
        del self._replicas[name]
        self._index.remove(name)
        await replica.client.close()

    async def drain(self, name: str) -> None:
        """A replica leaves when it has finished what it is at; new requests, later turns included, go elsewhere meanwhile.

        Raises:
            EngineError: there is no such replica.
        """
        replica = self._find(name)
        replica.leaving = asyncio.Event()
        if replica.state is State.READY:
            replica.state = State.DRAINING
        self._requeue(replica)
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
                self._fall(replica, str(error))
                if silent == SILENT_LOOKS:
                    await self._lose(replica, replica.reason)
            else:
                silent = 0
                self._rise(replica)

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

    def _rise(self, replica: Replica) -> None:
        replica.lost = False
        if replica.state is State.DOWN:
            replica.state, replica.reason = State.DRAINING if replica.leaving else State.READY, ""
            self._place_stranded()
        self._fill(replica)

    def _fall(self, replica: Replica, reason: str) -> None:
        replica.state, replica.reason = State.DOWN, reason
        self._requeue(replica)

    async def _lose(self, replica: Replica, reason: str) -> None:
        """Takes everything from a replica that is gone; nothing is known about its cache any more."""
        self._fall(replica, reason)
        replica.lost = True
        await self._reopen(replica)
        for attempt in replica.attempts:
            attempt.cancel()
        self._index.clear(replica.name)

    def _suspect(self, replica: Replica, error: EngineError) -> None:
        """A request failed for the replica's sake: it gets no other until it has said that it is well."""
        if replica.state is State.READY:
            self._fall(replica, str(error))

    def _requeue(self, replica: Replica) -> None:
        for request in replica.empty_queue():
            replica.discharge(request)
            self._place(request)

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
        await asyncio.gather(*(self._open(self._replicas[name], each) for name, each in per_replica.items()))

    async def _open(self, replica: Replica, session_ids: Sequence[str]) -> None:
        await replica.client.open_sessions(session_ids)
        replica.pinned.update(session_ids)
        self._pins.update(dict.fromkeys(session_ids, replica.name))

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
        misses = await asyncio.gather(*(self._replicas[name].client.close_sessions(each) for name, each in per_replica.items()))
        return sum(misses)

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
        self._place_stranded()

    # ---- weights

    async def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Has every replica map a publisher's slots, and each that joins later."""
        async with self._weights:
            self._descriptor = dict(descriptor)
            answers = await asyncio.gather(*(each.client.attach(descriptor) for each in self._replicas.values()))
        return answers[0] if answers else {}

    async def update_weights(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Has every replica take a published version; one that does not gets no requests until it has.

        Returns:
            ``{policy_version, pause_s, seconds, left_behind}``: the longest pause and time, and the names of replicas without
            the version, each with its reason.

        Raises:
            EngineError: no replica took it; the old version is served on.
        """
        return await self._change(int(manifest["policy_version"]), lambda client: client.update_weights(manifest))

    async def load_weights(
        self, weights_uri: str, policy_version: int, served_names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Has every replica read a folder; else as :meth:`update_weights`."""
        return await self._change(policy_version, lambda client: client.load_weights(weights_uri, policy_version, served_names))

    async def _change(self, policy_version: int, bring: Bring) -> dict[str, Any]:
        async with self._weights:
            replicas = list(self._replicas.values())
            results = await asyncio.gather(*(self._bring_to(each, bring) for each in replicas), return_exceptions=True)
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
                self._fall(replica, f"does not have version {policy_version}: {error}")
        return {
            "policy_version": policy_version,
            "pause_s": max(float(each["pause_s"]) for each in took),
            "seconds": max(float(each["seconds"]) for each in took),
            "left_behind": {replica.name: str(error) for replica, error in failed.items()},
        }

    async def _bring_to(self, replica: Replica, bring: Bring) -> dict[str, Any]:
        if replica.lost:
            raise EngineUnavailable(replica.reason)
        bringing = asyncio.ensure_future(bring(replica.client))
        replica.attempts.add(bringing)
        try:
            await asyncio.wait({bringing})
        finally:
            replica.attempts.discard(bringing)
            bringing.cancel()
        if bringing.cancelled():
            raise EngineUnavailable(f"{replica.name} was lost meanwhile: {replica.reason}")
        return bringing.result()

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1: computed by every replica that is ready, so that what
        is compared with it is compared with all of them.

        Raises:
            EngineError: no replica is ready, or two of them differ by more than a thousandth of a nat.
        """
        ready = [each for each in self._replicas.values() if each.state is State.READY]
        if not ready:
            raise EngineUnavailable("no replica is ready")
        first, *others = await asyncio.gather(*(each.client.logprobs(token_ids) for each in ready))
        for replica, values in zip(ready[1:], others, strict=True):
            worst = max((abs(a - b) for a, b in zip(first, values, strict=True)), default=0.0)
            if not worst <= LOGPROB_TOLERANCE:
                raise EngineError(
                    f"{ready[0].name} and {replica.name} differ by {worst:.2g} nats under version {replica.policy_version}",
                    hint="one of them does not hold the weights that were published; end it",
                )
        return first

    async def reset_prefix_cache(self) -> None:
        """Has every replica forget all computed prompts."""
        present = [each for each in self._replicas.values() if not each.lost]
        await asyncio.gather(*(each.client.reset_prefix_cache() for each in present))
        for replica in present:
            self._index.clear(replica.name)

    # ---- the whole

    async def health(self) -> dict[str, Any]:
        """``{status, reason, policy_version, replicas}``; ``ok`` while any replica is ready."""
        replicas = {name: each.report() for name, each in self._replicas.items()}
        ready = any(each.state is State.READY for each in self._replicas.values())
        reason = None if ready else "; ".join(f"{each.name}: {each.reason}" for each in self._replicas.values()) or "no replica"
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
