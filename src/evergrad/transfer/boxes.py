"""A version that several processes of one machine write together, each its boxes, straight into the slot.

::

    rank 0: publisher.begin() ─▶ slot ──▶ every rank: BoxWriter.write(slot, what it holds) ──▶ rank 0: publisher.finish()

Nobody gathers a tensor: the plan, from what the ranks hold to tensors that lie whole, says who writes what. A rank may write
from ``begin`` to ``finish`` of the publisher that owns the slots, and not after the other ranks are known to be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from evergrad.transfer.placements import held_tensors, make_copies
from evergrad.transfer.plan import Placement, Shard, make_plan
from evergrad.transfer.slots import map_slots


class BoxWriter:
    """One rank's way into the slots of a publisher.

    Args:
        slots: ``Publisher.slots`` of the publisher.
        shards: What each rank holds of the slots' tensors, by ``placements.held_shards``.
        rank: Of this process.

    Raises:
        TransferError: the slots are gone, or the ranks do not hold what lies in them.
    """

    def __init__(self, slots: Mapping[str, Any], shards: Sequence[Sequence[Shard]], rank: int) -> None:
        self.slots = slots
        layout, self._mapped, _ = map_slots(slots, writable=True)
        try:
            shapes = {spec.name: spec.shape for spec in layout.tensors}
            source = Placement.of(shapes, [shard for own in shards for shard in own], hosts=[""] * len(shards))
            self._copies = make_plan(source, Placement.whole(shapes)).sent_by(rank)
        except BaseException:
            self.close()
            raise

    def write(self, slot: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes this rank's boxes of what is ``named``: whole tensors, or ``DTensor`` of which a part is here."""
        make_copies(self._copies, held_tensors(named), self._mapped[slot].views)

    def close(self) -> None:
        for each in self._mapped:
            each.close()
