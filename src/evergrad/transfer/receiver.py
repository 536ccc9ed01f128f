"""The receiving end of a version that travels: fetched, decoded into a slot that nobody reads, proved, made live.

Other processes of this machine may map the receiver's slots (``WireReceiver.descriptor``), so that a host with several engines
is served once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from evergrad.transfer.codecs import codec_named
from evergrad.transfer.files import tensor_bytes
from evergrad.transfer.layout import Layout, Manifest, TransferError
from evergrad.transfer.link import Receipt, copy_bytes
from evergrad.transfer.placements import region
from evergrad.transfer.plan import Plan
from evergrad.transfer.proof import checksum, checksum_of_parts, proofs, proving, side_by_side
from evergrad.transfer.shipment import Item, Payload, Shipment, view_of, whole_plan
from evergrad.transfer.slots import SlotPublisher, SlotReceiver
from evergrad.transfer.transports import Inbox, open_inbox

Announced = Shipment | Mapping[str, Any]


class WireReceiver:
    """Fetches versions into two slots of its own and decides which of them is live.

    ``prepare``, ``stage`` and ``verify`` may run while the live version serves; whatever fails, it goes on.
    """

    def __init__(
        self,
        descriptors: Sequence[Mapping[str, Any]],
        *,
        plan: Plan | None = None,
        rank: int = 0,
        layout: Mapping[str, tuple[Sequence[int], torch.dtype | str]] | None = None,
    ) -> None:
        """
        Args:
            descriptors: Of each publisher, in the order of the plan's source ranks.
            plan: Of the whole transfer; by default one publisher's tensors arrive whole.
            rank: Of this receiver among the plan's destinations.
            layout: Tensor name to shape and dtype of what this rank holds; by default what the publisher has.

        Raises:
            TransferError: a descriptor is malformed or of another plan, or its publisher cannot be reached.
        """
        offered = _offered(descriptors[0])
        plan = plan or whole_plan(offered)
        if any(descriptor.get("plan_hash") != plan.hash for descriptor in descriptors):
            raise TransferError("the publisher has another plan", hint="give both ends the same two placements")
        if any(copy.destination.rank == rank for copy in plan.fan_out):
            raise TransferError(f"rank {rank} is served by another rank of its host", hint="attach to that one's slots")
        self._plan_hash = plan.hash
        self._copies = {copy.key: copy for copy in plan.copies if copy.destination.rank == rank}
        self._slots = SlotPublisher(layout or {spec.name: (spec.shape, spec.dtype) for spec in offered.tensors})
        self._here = SlotReceiver(self._slots.descriptor)
        self._inboxes: list[Inbox] = []
        self._routes: list[list[Payload]] = []
        self._target: int | None = None
        self._arrived: Manifest | None = None
        self._odd: str | None = None
        """A tensor of what arrived that has values which are not finite."""
        self._moved, self._seconds = 0, 0.0
        self.fetch_s = 0.0
        """Of the version that was staged last: how long its bytes were under way."""
        self._buffers = _Buffers()
        self._versions: dict[int, int] = {}
        """What each slot holds, whether or not it was ever live."""
        self._changes: tuple[int, list[_Fetched]] | None = None
        """What made the version that was staged last, and the version it was made of."""
        try:
            for descriptor in descriptors:
                self._inboxes.append(open_inbox(descriptor))
        except BaseException:
            self.close()
            raise

    @property
    def layout(self) -> Layout:
        return self._slots.layout

    @property
    def policy_version(self) -> int | None:
        """Of the live slot; None before the first commit."""
        return self._here.policy_version

    @property
    def descriptor(self) -> dict[str, Any]:
        """Of this receiver's own slots, for a :class:`SlotReceiver` in another process of this machine."""
        return self._slots.descriptor

    @property
    def arrived(self) -> Manifest:
        """Of the version that was staged last, for who has mapped these slots.

        Raises:
            TransferError: none was.
        """
        if self._arrived is None:
            raise TransferError("no version has been staged", hint="call prepare() and stage() first")
        return self._arrived

    def prepare(self, manifest: Announced | Sequence[Announced]) -> None:
        """Reads what each publisher says of a version and decides what to fetch. Nothing is written yet.

        Raises:
            TransferError: of another plan, of different versions, not what this rank needs, or standing on a version that is
                not held here.
        """
        self.abort()
        listed = [manifest] if isinstance(manifest, (Shipment, Mapping)) else list(manifest)
        shipments = [one if isinstance(one, Shipment) else Shipment.from_dict(one) for one in listed]
        if len(shipments) != len(self._inboxes) or len({one.policy_version for one in shipments}) != 1:
            raise TransferError(f"{len(self._inboxes)} publishers must give one version each")
        if any(one.plan_hash != self._plan_hash for one in shipments):
            raise TransferError("the shipment is of another plan", hint="attach to the publisher that made it")
        routes = [one.route(self.policy_version) for one in shipments]
        # Whatever else a route goes over, its last payload makes the version.
        covered = [item.key for route in routes for item in self._own(route[-1])]
        odd = self._copies.keys() - set(covered)
        if odd or len(covered) != len(self._copies):
            raise TransferError(f"the shipment lacks {len(odd)} of {len(self._copies)} parts", where=min(odd, default=None))
        self._routes, self._target = routes, shipments[0].policy_version
        self._moved, self._seconds = 0, max(one.seconds for one in shipments)

    def stage(self) -> None:
        """Fetches and decodes into the slot that nobody reads.

        Raises:
            TransferError: nothing is prepared, the other end is gone, bytes do not match their checksum, or do not decode.
        """
        version, started = self._require_target(), time.perf_counter()
        self.fetch_s = 0.0
        views = self._slots.begin()
        try:
            slot = self._slots.writing
            before = self._versions.pop(slot, None)
            if len(self._routes) == 1 and len(self._routes[0]) == 1 and self._lies_as_it_comes(self._routes[0][0]):
                self._fetch_in_place(self._routes[0][0], slot)
            else:
                self._fetch_and_decode(views, before)
            found = side_by_side({name: proving(view) for name, view in views.items()})
            self._odd = next((name for name, (_, finite) in found.items() if not finite), None)
            self._arrived = self._slots.finish(version, {name: proof for name, (proof, _) in found.items()})
        finally:
            self._slots.abort()
        self._versions[slot] = version
        self._here.prepare(self._arrived)
        self._seconds += time.perf_counter() - started

    def verify(self) -> None:
        """Compares what is here now with what left, bit for bit, where the codec promises that, and looks at the values.

        Raises:
            TransferError: a tensor differs (it was damaged on the way, or the changes stand on other weights than are here), a
                value is not finite, or nothing is staged.
        """
        self._require_target()
        started = time.perf_counter()
        sealed, views = self.arrived, self._here.tensors()
        for item in (item for route in self._routes for item in self._own(route[-1]) if item.exact):
            copy = self._copies[item.key]
            part, buffer = region(views, copy.destination, copy.shape), copy.destination.buffer
            whole = part.shape == views[buffer].shape
            if (sealed.checksums[buffer] if whole else checksum(part.contiguous())) != item.checksum:
                self.abort()
                raise TransferError(
                    f"'{copy.tensor}' does not match its checksum", hint="publish it whole; the old version stays"
                )
        if self._odd is not None:
            self.abort()
            raise TransferError(f"'{self._odd}' has values that are not finite", hint="the old version stays")
        self._here.vouch()
        self._seconds += time.perf_counter() - started

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views, without a copy, of the staged version, else of the live one. They are read-only memory: writing faults."""
        return self._here.tensors()

    def commit(self) -> None:
        """Makes the verified version live.

        Raises:
            TransferError: nothing is staged, or it was not verified.
        """
        self._here.commit()
        self._routes, self._target = [], None

    def abort(self) -> None:
        """Forgets the version that was to come; the live one is untouched."""
        self._here.abort()
        self._routes, self._target = [], None

    def accept(self, manifest: Announced | Sequence[Announced]) -> None:
        """All of it in one, for callers without a token boundary to wait for."""
        self.prepare(manifest)
        self.stage()
        self.verify()
        self.commit()

    def receipt(self) -> Receipt:
        """Of the version under way.

        Raises:
            TransferError: nothing is prepared.
        """
        self._require_target()
        link = sum(inbox.link_gb_per_s for inbox in self._inboxes)
        return Receipt(self._routes[0][-1].codec, self._moved, self._seconds, link)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        self._here.close()
        self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- fetching

    def _own(self, payload: Payload) -> Iterator[Item]:
        return (item for item in payload.items if item.key in self._copies)

    def _require_target(self) -> int:
        if self._target is None:
            raise TransferError("no version is prepared", hint="call prepare(manifest) first")
        return self._target

    def _lies_as_it_comes(self, payload: Payload) -> bool:
        """Whether the payload's bytes are those of a slot, so that they can be fetched right into one."""
        specs = {spec.name: spec for spec in self.layout.tensors}
        for item in payload.items:
            copy = self._copies.get(item.key)
            spec = specs.get(copy.destination.buffer) if copy is not None else None
            if (
                spec is None
                or item.codec != "identity"
                or [(p.shape, p.dtype, p.offset) for p in item.parts] != [(spec.shape, spec.dtype, spec.offset)]
            ):
                return False
        return payload.num_bytes <= self.layout.num_bytes

    def _fetch_in_place(self, payload: Payload, slot: int) -> None:
        memory = self._slots.memory(slot)[: payload.num_bytes]
        self._bring(self._inboxes[0], payload, 0, memory)
        self._remember(None, [])

    def _fetch_and_decode(self, views: dict[str, torch.Tensor], before: int | None) -> None:
        fetched = [
            self._fetch(inbox, payload) for inbox, route in zip(self._inboxes, self._routes, strict=True) for payload in route
        ]
        live = self.policy_version
        stands_on_live = any(route[0].base_version is not None for route in self._routes)
        if stands_on_live:
            self._bring_up(views, before)
        for one in fetched:
            self._decode(one, views)
        one_step = all(len(route) == 1 and route[0].base_version is not None for route in self._routes)
        self._remember(live if one_step else None, fetched)

    def _fetch(self, inbox: Inbox, payload: Payload) -> _Fetched:
        items = list(self._own(payload))
        start = min((item.start for item in items), default=0)
        stop = max((item.stop for item in items), default=0)
        memory = self._buffers.take(stop - start)
        self._bring(inbox, payload, start, tensor_bytes(memory[: stop - start]))
        one = _Fetched([item.moved(-start) for item in items], memory)
        for item in one.items:
            if not item.exact and checksum_of_parts(memory, item.parts) != item.checksum:
                raise TransferError(f"'{item.key}' does not match its checksum", hint="publish again; the old version stays")
        return one

    def _bring(self, inbox: Inbox, payload: Payload, start: int, memory: memoryview) -> None:
        started = time.perf_counter()
        inbox.fetch(payload.name, start, memory)
        self.fetch_s += time.perf_counter() - started
        self._moved += len(memory)

    def _bring_up(self, views: dict[str, torch.Tensor], before: int | None) -> None:
        """Makes the free slot what the live one is: by the changes between the two where they are known, else by a copy."""
        made_live = self._arrived is not None and self._arrived.policy_version == self.policy_version
        if self._changes is not None and self._changes[0] == before and made_live:
            for one in self._changes[1]:
                self._decode(one, views)
            return
        live = self._here.tensors()
        list(proofs().map(copy_bytes, live.values(), (views[name] for name in live)))

    def _decode(self, one: _Fetched, views: dict[str, torch.Tensor]) -> None:
        for item in one.items:
            copy = self._copies[item.key]
            try:
                parts = [view_of(one.memory, spec) for spec in item.parts]
                codec_named(item.codec).decode(parts, region(views, copy.destination, copy.shape))
            except (TransferError, ValueError, RuntimeError, IndexError) as error:
                raise TransferError(f"'{copy.tensor}' does not decode: {error}", hint="the old version stays") from error

    def _remember(self, base: int | None, fetched: list[_Fetched]) -> None:
        """Keeps the changes that were just made to a slot, for the day when the other one needs them too."""
        if self._changes is not None:
            self._buffers.give(self._changes[1])
        self._changes = None if base is None else (base, fetched)
        if base is None:
            self._buffers.give(fetched)


class _Fetched:
    """Items and the bytes that they are made of."""

    def __init__(self, items: list[Item], memory: torch.Tensor) -> None:
        self.items, self.memory = items, memory


class _Buffers:
    """Memory to fetch into, used again: asking the system for it costs as much time as filling it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        self._free.sort(key=len)
        for index, memory in enumerate(self._free):
            if len(memory) >= num_bytes:
                return self._free.pop(index)
        # One that is too small would never be used again.
        self._free = self._free[1:]
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give(self, fetched: Sequence[_Fetched]) -> None:
        self._free += [one.memory for one in fetched]


def _offered(descriptor: Mapping[str, Any]) -> Layout:
    try:
        return Layout.from_dict(descriptor["tensors"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"not a descriptor of a publisher: {error!r}") from error
