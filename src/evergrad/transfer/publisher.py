"""The sending end of a version that travels: written into a slot, encoded, offered.

The walk of one version, the other half of which is in :mod:`evergrad.transfer.receiver`::

    publisher.begin() ── views of a free slot, filled ──▶ publisher.finish(version): codec, checksums, outbox.offer
    ──Shipment──▶ receiver.prepare ──▶ stage (inbox.fetch, decode into a free slot) ──▶ verify ──▶ commit

Both ends keep two slots of shared memory. The publisher's hold the newest version and the one before, which is what a sparse
codec compares; the receiver's hold the live version and the one that arrives.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from evergrad.transfer.codecs import Encoded, codec_named
from evergrad.transfer.files import tensor_bytes
from evergrad.transfer.layout import ALIGNMENT, Layout, Manifest, TensorSpec
from evergrad.transfer.link import copy_bytes
from evergrad.transfer.placements import region
from evergrad.transfer.plan import Copy, Plan
from evergrad.transfer.proof import checksum, checksum_of_parts, proofs
from evergrad.transfer.shipment import Item, Payload, Shipment, view_of, whole_plan
from evergrad.transfer.slots import SlotPublisher, dtype_name, fill
from evergrad.transfer.transports import Outbox


class WirePublisher:
    """Publishes what is written into its slots through an outbox, which it owns.

    Args:
        layout: Tensor name to shape and dtype of what this rank holds.
        codec: A line of ``transfer/codecs``.
        plan: Of the whole transfer; by default each tensor goes whole to one receiver.
        rank: Of this publisher among the plan's sources.

    Raises:
        TransferError: an unknown codec, or no memory for two slots.
    """

    def __init__(
        self,
        layout: Mapping[str, tuple[Sequence[int], torch.dtype | str]],
        outbox: Outbox,
        codec: str = "identity",
        *,
        plan: Plan | None = None,
        rank: int = 0,
    ) -> None:
        self._codec_name, self._codec = codec, codec_named(codec)
        self._slots = SlotPublisher(layout)
        self._outbox = outbox
        plan = plan or whole_plan(self._slots.layout)
        self._plan_hash = plan.hash
        self._copies = plan.sent_by(rank)
        self._packed: dict[tuple[int, str], torch.Tensor] = {}
        self._offered: dict[int, frozenset[str]] = {}
        self._last: Manifest | None = None

    @property
    def layout(self) -> Layout:
        return self._slots.layout

    @property
    def descriptor(self) -> dict[str, Any]:
        """All a receiver needs to fetch from here; JSON values. Whoever has it can read the weights."""
        return {
            **self._outbox.descriptor,
            "tensors": self.layout.as_dict(),
            "plan_hash": self._plan_hash,
        }

    @property
    def slots(self) -> dict[str, Any]:
        """See :attr:`SlotPublisher.slots`."""
        return self._slots.slots

    @property
    def writing(self) -> int:
        """See :attr:`SlotPublisher.writing`."""
        return self._slots.writing

    def begin(self) -> dict[str, torch.Tensor]:
        """Views of a slot, to be filled entirely before :meth:`finish`. Who still fetches what lies there is cut off."""
        views = self._slots.begin()
        self._outbox.withdraw(self._offered.pop(self._slots.writing, frozenset()))
        return views

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """See :meth:`SlotPublisher.write`."""
        self._slots.write(name, tensor)

    def written(self, name: str) -> None:
        """See :meth:`SlotPublisher.written`."""
        self._slots.written(name)

    def finish(self, policy_version: int) -> Shipment:
        """Offers what was written since :meth:`begin`.

        Raises:
            TransferError: nothing is being written, or the transport refused.
        """
        started = time.perf_counter()
        sealed = self._slots.finish(policy_version)
        last = self._last
        self._last = sealed
        memory: dict[str, memoryview] = {}
        payloads = []
        if not self._codec.stands_on_previous:
            payloads.append(self._payload(sealed, self._codec_name, None, memory))
        else:
            whole = self._payload(sealed, "identity", None, memory)
            if last is not None and last.policy_version < policy_version and last.slot != sealed.slot:
                changes = self._payload(sealed, self._codec_name, last, memory)
                # What a receiver would gain by it is less than nothing.
                payloads += [changes] if changes.num_bytes < whole.num_bytes else []
            payloads.append(whole)
        self._offered[sealed.slot] = frozenset(memory)
        seconds = sealed.seconds + time.perf_counter() - started
        return self._outbox.offer(Shipment(policy_version, self._plan_hash, tuple(payloads), seconds), memory)

    def abort(self) -> None:
        """Gives the slot that is being written back."""
        self._slots.abort()

    def stage(self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> Shipment:
        """Copies ``named_tensors`` (cast to the layout's dtypes) and offers them.

        Raises:
            TransferError: a name is unknown, missing or doubled, a shape differs, or the transport refused.
        """
        self.begin()
        try:
            fill(self, named_tensors)
            return self.finish(policy_version)
        finally:
            self.abort()

    def close(self) -> None:
        self._outbox.close()
        self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _payload(self, sealed: Manifest, codec: str, base: Manifest | None, memory: dict[str, memoryview]) -> Payload:
        name = f"{sealed.policy_version}-{secrets.token_hex(6)}"
        if codec == "identity" and self._lies_as_it_goes():
            # The slot itself is what is sent.
            items = tuple(self._lying_item(copy, sealed) for copy in self._copies)
            memory[name] = self._slots.memory(sealed.slot)
            num_bytes = self.layout.num_bytes
        else:
            packed = self._buffer(sealed.slot, codec)
            items, num_bytes = self._pack(codec, sealed, base, packed)
            memory[name] = tensor_bytes(packed)[:num_bytes]
        base_version = None if base is None else base.policy_version
        return Payload(name, sealed.policy_version, base_version, self._codec_name if base else codec, num_bytes, items)

    def _lies_as_it_goes(self) -> bool:
        one_receiver = len({copy.destination.rank for copy in self._copies}) == 1
        return one_receiver and all(self._is_whole(copy) for copy in self._copies)

    def _is_whole(self, copy: Copy) -> bool:
        return self._slots.views(0)[copy.source.buffer].shape == torch.Size(copy.shape)

    def _lying_item(self, copy: Copy, sealed: Manifest) -> Item:
        spec = next(spec for spec in self.layout.tensors if spec.name == copy.source.buffer)
        return Item(copy.key, "identity", (spec,), sealed.checksums[spec.name], exact=True)

    def _buffer(self, slot: int, codec: str) -> torch.Tensor:
        if (slot, codec) not in self._packed:
            most = sum(copy.numel * self._slots.views(0)[copy.source.buffer].element_size() for copy in self._copies)
            # No codec makes more of a tensor than it is, but for a scale and the borders between parts.
            self._packed[slot, codec] = torch.empty(most + 4 * ALIGNMENT * len(self._copies), dtype=torch.uint8)
        return self._packed[slot, codec]

    def _pack(self, codec: str, sealed: Manifest, base: Manifest | None, packed: torch.Tensor) -> tuple[tuple[Item, ...], int]:
        items, offset = [], 0
        views = self._slots.views(sealed.slot)
        before = None if base is None else self._slots.views(base.slot)

        def encode(copy: Copy) -> tuple[torch.Tensor, Encoded]:
            tensor = region(views, copy.source, copy.shape).contiguous()
            previous = None if before is None else region(before, copy.source, copy.shape).contiguous()
            return tensor, codec_named(codec).encode(tensor, previous)

        # Encoded side by side, laid one behind the other.
        for copy, (tensor, encoded) in zip(self._copies, proofs().map(encode, self._copies), strict=True):
            parts = []
            for number, part in enumerate(encoded.parts):
                spec = TensorSpec(str(number), tuple(part.shape), dtype_name(part.dtype), offset)
                copy_bytes(part, view_of(packed, spec))
                parts.append(spec)
                offset = -(-(offset + spec.num_bytes) // ALIGNMENT) * ALIGNMENT
            exact = codec_named(encoded.codec).exact
            if not exact:
                proof = checksum_of_parts(packed, parts)
            else:
                proof = sealed.checksums[copy.source.buffer] if self._is_whole(copy) else checksum(tensor)
            items.append(Item(copy.key, encoded.codec, tuple(parts), proof, exact))
        return tuple(items), offset
