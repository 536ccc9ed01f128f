"""What each replica's prefix cache holds, predicted from what was sent there.

A prompt is cut into blocks, and each block is known by the hash of all tokens up to its end, under a root that stands for the
policy version: what was computed under one version is not found under another. Blocks count as held from the moment that a
request is sent, so that siblings which leave together see each other, and are forgotten in the order in which an engine would
evict them. The number of cached tokens that an engine reports corrects the prediction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

BlockHash = int


@dataclass(slots=True)
class _Held:
    last_use: int
    computed: bool = False
    """Whether the replica has shown that it computed the block; before that it may still be on its way there."""


@dataclass(slots=True)
class _Cache:
    capacity: int
    """Blocks."""
    blocks: OrderedDict[BlockHash, _Held] = field(default_factory=OrderedDict)
    """The one that would be evicted first comes first."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What of one prompt a replica was expected to have when the prompt was sent."""

    blocks: int
    """Leading blocks that were held, computed or on their way."""
    last_uses: tuple[int, ...]
    """When each of the leading blocks that were surely computed had been used last; never increasing."""


class PrefixIndex:
    """Predicted prefix caches of any number of replicas.

    >>> index = PrefixIndex(block_size=2)
    >>> index.add("a", capacity=100)
    >>> sent = index.use("a", index.chain([1, 2, 3, 4], root=0))
    >>> index.match(index.chain([1, 2, 3, 9], root=0)), index.match(index.chain([1, 2, 3, 9], root=1))
    ({'a': 1}, {})
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._caches: dict[str, _Cache] = {}
        self._holders: dict[BlockHash, set[str]] = {}
        self._now = 0

    def add(self, replica: str, capacity: int) -> None:
        """A replica whose cache has ``capacity`` blocks and holds nothing yet; one that is known gets the new capacity."""
        cache = self._caches.setdefault(replica, _Cache(capacity))
        cache.capacity = capacity
        self._shrink(replica, cache)

    def remove(self, replica: str) -> None:
        self.clear(replica)
        self._caches.pop(replica, None)

    def clear(self, replica: str) -> None:
        """The replica has forgotten everything, as after a change of weights."""
        cache = self._caches.get(replica)
        if cache is not None:
            for block in cache.blocks:
                self._unlist(replica, block)
            cache.blocks.clear()

    def chain(self, tokens: Sequence[int], root: int, after: Sequence[BlockHash] = ()) -> list[BlockHash]:
        """Hashes of the full blocks of ``tokens``, in order; ``after`` are those of its first blocks, where they are known."""
        size, tokens = self.block_size, tuple(tokens)
        found = list(after[: len(tokens) // size])
        last = found[-1] if found else hash((root, -1))
        for start in range(len(found) * size, len(tokens) - size + 1, size):
            last = hash((last, tokens[start : start + size]))
            found.append(last)
        return found

    def match(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """How many leading blocks each replica holds; those that hold none are left out."""
        found: dict[str, int] = {}
        live: set[str] = set(self._caches)
        for depth, block in enumerate(chain):
            holders = self._holders.get(block)
            left = live - holders if holders else live
            if left:
                if depth:
                    found.update(dict.fromkeys(left, depth))
                live = live - left
            if not live:
                return found
        if chain:
            found.update(dict.fromkeys(live, len(chain)))
        return found

    def use(self, replica: str, chain: Sequence[BlockHash]) -> Prediction:
        """A prompt is sent to ``replica``, which will hold its blocks from now on. Returns what it was expected to hold."""
        cache = self._caches[replica]
        self._now += 1
        held = 0
        surely: list[int] = []
        for block in chain:
            known = cache.blocks.get(block)
            if known is None:
                break
            if known.computed and len(surely) == held:
                surely.append(known.last_use)
            held += 1
        self._touch(replica, cache, chain)
        return Prediction(held, tuple(surely))

    def computed(self, replica: str, chain: Sequence[BlockHash]) -> None:
        """The replica has computed these blocks: it has drawn a token after them, or all tokens of them."""
        cache = self._caches.get(replica)
        if cache is None:
            return
        self._now += 1
        self._touch(replica, cache, chain)
        for block in chain:
            held = cache.blocks.get(block)
            if held is not None:
                held.computed = True

    def correct(self, replica: str, prediction: Prediction, cached_blocks: int) -> None:
        """Takes note that only ``cached_blocks`` leading blocks were there.

        The cache must have evicted the others, and with them, since it evicts what was used longest ago, all that had not been
        used since.
        """
        cache = self._caches.get(replica)
        if cache is None or cached_blocks >= len(prediction.last_uses):
            return
        evicted = prediction.last_uses[cached_blocks]
        while cache.blocks:
            block, held = next(iter(cache.blocks.items()))
            if held.last_use > evicted:
                break
            del cache.blocks[block]
            self._unlist(replica, block)

    def num_blocks(self, replica: str) -> int:
        """Blocks that the replica is believed to hold."""
        return len(self._caches[replica].blocks)

    def _touch(self, replica: str, cache: _Cache, chain: Sequence[BlockHash]) -> None:
        # From the end, so that the ends of chains are the first to go.
        for block in reversed(chain):
            held = cache.blocks.get(block)
            if held is None:
                cache.blocks[block] = _Held(self._now)
                self._holders.setdefault(block, set()).add(replica)
            else:
                held.last_use = self._now
                cache.blocks.move_to_end(block)
        self._shrink(replica, cache)

    def _shrink(self, replica: str, cache: _Cache) -> None:
        while len(cache.blocks) > cache.capacity:
            block, _ = cache.blocks.popitem(last=False)
            self._unlist(replica, block)

    def _unlist(self, replica: str, block: BlockHash) -> None:
        holders = self._holders[block]
        holders.discard(replica)
        if not holders:
            del self._holders[block]
