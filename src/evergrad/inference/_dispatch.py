"""Requests on their way: placed, queued, sent, read, and taken elsewhere when their replica goes.

The books of :class:`~evergrad.inference._replica.Replica` and the queues change between two waits only, so each step finds them
whole. Whoever changes a replica's state does it here, for with it go the requests that wait there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from evergrad.inference._prefixes import PrefixIndex
from evergrad.inference._replica import Charge, Replica, Request, State
from evergrad.inference._routing import Route, RoutingRule, group_of
from evergrad.inference.config import EngineError, EngineUnavailable
from evergrad.types import Completion, FinishReason, Sampling

BLOCK_TOKENS = 16
MAX_TRIES = 5
"""Replicas that may fail one request before it is given up: it may be the request that fails them."""
_EARLY_S = 1e-3
"""A timer may fire a moment before its time."""
REMEMBERED = 100_000
"""Sessions and groups whose place is remembered."""


class Dispatcher:
    """Completes requests at replicas that others add, watch and remove."""

    def __init__(self, rule: RoutingRule, patience_s: float) -> None:
        self._rule, self._patience_s = rule, patience_s
        self.replicas: dict[str, Replica] = {}
        self.pins: dict[str, str] = {}
        """Lockstep sessions to their replica."""
        self.index = PrefixIndex(BLOCK_TOKENS)
        self.stranded: dict[Request, float] = {}
        """Requests for which no replica is ready, and since when."""
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()
        """(``session`` or ``group``, its id) to the replica where it was last, or began."""
        self._first_turns = self._later_turns = 0

    async def complete(self, prompt: tuple[int, ...], sampling: Sampling, session_id: str | None) -> Completion:
        """
        Raises:
            EngineUnavailable: no replica was ready for so long, or ``MAX_TRIES`` of them went away under the request.
            EngineError: a replica refused the request.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        later_turn = session_id is not None and ("session", session_id) in self._homes
        request = Request(prompt, sampling, session_id, group_of(session_id), later_turn)
        self._later_turns += later_turn
        self._first_turns += not later_turn
        while request.finish_reason is None:
            replica = await self._admission(request)
            await self._attempt(request, replica)
        return request.completion(loop.time() - started)

    # ---- states

    def rise(self, replica: Replica) -> None:
        replica.lost = False
        if replica.state is State.DOWN:
            replica.state, replica.reason = State.DRAINING if replica.leaving else State.READY, ""
            self.place_stranded()
        self._fill(replica)

    def fall(self, replica: Replica, reason: str) -> None:
        replica.state, replica.reason = State.DOWN, reason
        self.requeue(replica)

    def requeue(self, replica: Replica) -> None:
        for request in replica.empty_queue():
            replica.discharge(request)
            self._place(request)

    # ---- one request

    async def _admission(self, request: Request) -> Replica:
        """The replica that has room for the request; it is on that replica's books by then."""
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[Replica] = loop.create_future()
        request.admitted = admitted
        try:
            self._place(request)
            while not admitted.done():
                left = self.stranded.get(request, loop.time()) + self._patience_s - loop.time()
                if left < _EARLY_S:
                    raise self._nobody(request)
                await asyncio.wait({admitted}, timeout=left)
            return admitted.result()
        except BaseException:
            self._withdraw(request)
            raise
        finally:
            request.admitted = None

    def _nobody(self, request: Request) -> EngineUnavailable:
        said = [str(error) for error in request.errors[-1:]] or [f"{r.name}: {r.reason}" for r in self.replicas.values()]
        return EngineUnavailable(f"no replica was ready for {self._patience_s:g} s: {'; '.join(said) or 'there is none'}")

    def _place(self, request: Request) -> None:
        """Puts the request on the books of the replica that the rule chooses, and sends it or queues it there."""
        replica = self._choose(request)
        if replica is None:
            self.stranded.setdefault(request, asyncio.get_running_loop().time())
            return
        self.stranded.pop(request, None)
        self._assign(request, replica)
        if replica.has_room or request.session in self.pins:
            self._send(request, replica)
        else:
            replica.enqueue(request)

    def place_stranded(self) -> None:
        for request in list(self.stranded):
            self._place(request)

    def _choose(self, request: Request) -> Replica | None:
        pinned = self.replicas.get(self.pins.get(request.session or "", ""))
        if pinned is not None:
            return pinned if pinned.state is not State.DOWN else None
        ready = [each for each in self.replicas.values() if each.state is State.READY]
        if not ready:
            return None
        if len(ready) == 1:
            return ready[0]
        count = len(request.prompt) + len(request.token_ids)
        # The last token is always computed, since what follows it is not cached.
        most, found = max(0, count - 1) // BLOCK_TOKENS, dict[str, int]()
        chains = {version: self._chain(request, version) for version in {each.policy_version for each in ready}}
        for version, chain in chains.items():
            depths = self.index.match(chain)
            found |= {each.name: depths.get(each.name, 0) for each in ready if each.policy_version == version}
        options = [each.option(chains[each.policy_version], min(most, found[each.name])) for each in ready]
        key = ("session", request.session) if request.later_turn else ("group", request.group)
        home = self._homes.get((key[0], key[1] or ""))
        route = Route(-(-count // BLOCK_TOKENS), request.session, request.group, home, request.later_turn, self._return_share)
        return self.replicas[self._rule.choose(route, options)]

    @property
    def _return_share(self) -> float:
        return self._later_turns / max(1, self._first_turns + self._later_turns)

    def _chain(self, request: Request, version: int) -> list[int]:
        key = (len(request.token_ids), version)
        if key not in request.chains:
            request.chains[key] = self.index.chain((*request.prompt, *request.token_ids), version)
        return request.chains[key]

    def _assign(self, request: Request, replica: Replica) -> None:
        chain = self._chain(request, replica.policy_version)
        prediction = self.index.use(replica.name, chain)
        charge = Charge(chain, chain[prediction.blocks :], prediction, replica.policy_version)
        replica.charge(request, charge)
        if request.session is not None:
            before = self._homes.get(("session", request.session))
            if before in self.replicas and before != replica.name:
                self.replicas[before].leave(request.session)
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
        self.stranded.pop(request, None)
        for replica in self.replicas.values():
            if request in replica.charges:
                self._settle(request, replica)

    async def _attempt(self, request: Request, replica: Replica) -> None:
        """Has the replica go on with the request, to its end or to the replica's own; what it drew is kept either way."""
        reading = asyncio.create_task(self._read(request, replica))
        replica.attempts.add(reading)
        try:
            await asyncio.wait({reading})
        finally:
            # Nothing is awaited here: a second cancellation would leave the books as they are. A cancelled task reads no more.
            replica.attempts.discard(reading)
            reading.cancel()
            self._settle(request, replica)
        error: BaseException | None = EngineUnavailable(f"{replica.name} was lost: {replica.reason}")
        if not reading.cancelled():
            error = reading.exception()
        if error is None:
            return
        if not isinstance(error, EngineUnavailable):
            raise error
        self.suspect(replica, error)
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
        self.index.correct(replica.name, charge.prediction, request.cached_tokens // BLOCK_TOKENS)
        # The last token was drawn, and never computed.
        whole = (*request.prompt, *request.token_ids[:-1])
        self.index.computed(replica.name, self.index.chain(whole, charge.version, after=charge.chain))

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
        while 2 * replica.num_sent < replica.limit.value and any(each.first_turns for each in self.replicas.values()):
            longest = max(self.replicas.values(), key=lambda each: len(each.first_turns))
            request = None if longest is replica else longest.last_new()
            if request is None:
                return
            longest.discharge(request)
            self._assign(request, replica)
            self._send(request, replica)

    def suspect(self, replica: Replica, error: EngineError) -> None:
        """Something failed for the replica's sake: it gets no request until it has said that it is well."""
        if replica.state is State.READY:
            self.fall(replica, str(error))
