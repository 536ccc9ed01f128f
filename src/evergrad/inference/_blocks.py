"""Who holds which block of the key-value cache, and which block holds what.

A full block is known by its *chain*: the identity of the block before it and the tokens in it. Keys are compared whole, not
by a digest, so a hit is never a collision. The first link of a chain is a root that stands for one version of the weights
under one adapter, or under none; after a change of weights there are new roots, and nothing that was computed before is found.

A block is free (in nobody's use, content worthless), cached (in nobody's use, but found by its chain until its place is
needed), or held by one or more rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

ChainId = int
"""Identity of a chain of full blocks; never used twice. Roots are chains of length zero."""


class OutOfBlocks(Exception):
    """Every block is held; a row must give way."""


@dataclass
class Match:
    """What of a prompt is in the cache already."""

    blocks: list[int] = field(default_factory=list)
    """Full blocks, in order; held for the caller."""
    chain: ChainId = 0
    """Of the last of them."""
    tail: int | None = None
    """A block whose first ``tail_tokens`` tokens go on from there; not held, to be copied before anything else happens."""
    tail_tokens: int = 0


class BlockPool:
    """Allocates blocks and finds them again by content.

    >>> pool = BlockPool(num_blocks=4, block_size=2)
    >>> first = pool.take()
    >>> chain = pool.remember(pool.root, (7, 8), first)
    >>> pool.drop([first])
    >>> pool.match([7, 8, 9]).blocks == [first]
    True
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        """
        Args:
            reuse: False where a block's content is nothing that another row could go on from: none is ever found.
        """
        self.num_blocks, self.block_size, self._reuse = num_blocks, block_size, reuse
        self._holders = [0] * num_blocks
        self._last_chain: ChainId = 0
        self._free: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_content: dict[tuple[ChainId, tuple[int, ...]], int] = {}
        self._content: dict[int, tuple[ChainId, tuple[int, ...]]] = {}
        self._chain: dict[int, ChainId] = {}
        self._children: dict[ChainId, dict[int, None]] = {}
        self._unwritten: set[int] = set()
        self._roots: dict[int, ChainId] = {}
        self.forget_all()

    @property
    def root(self) -> ChainId:
        """Of the weights without an adapter."""
        return self.root_of(0)

    def root_of(self, adapter: int) -> ChainId:
        """Where the chains of an adapter begin; 0 is none."""
        if adapter not in self._roots:
            self._roots[adapter] = self._new_chain()
        return self._roots[adapter]

    def forget_adapter(self, adapter: int) -> None:
        """Nothing that was computed under it is found any more; its blocks are taken when their turn comes."""
        self._roots.pop(adapter, None)

    @property
    def available(self) -> int:
        """Blocks that can be taken without anyone giving way."""
        return len(self._free) + len(self._cached)

    def forget_all(self) -> None:
        """Starts new roots. Rows keep their blocks; nothing is found by content any more.

        The free blocks are put in order, so that what follows depends on nothing that was before, unless rows hold some.
        """
        self._cached.clear()
        self._by_content.clear()
        self._content.clear()
        self._chain.clear()
        self._children.clear()
        self._unwritten.clear()
        self._roots.clear()
        self._free = [block for block in reversed(range(self.num_blocks)) if not self._holders[block]]

    def take(self) -> int:
        """A block for one holder: a free one, else the cached one that was used longest ago.

        Raises:
            OutOfBlocks: none is left.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise OutOfBlocks
        self._holders[block] = 1
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            if not self._holders[block]:
                del self._cached[block]
            self._holders[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One holder less for each; the last one to leave makes it cached, or free when it was never remembered."""
        # From the end, so that the ends of chains are the first to go when space is needed.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._content:
                self._cached[block] = None
            else:
                self._free.append(block)

    def remember(self, chain: ChainId, tokens: tuple[int, ...], block: int, *, written: bool = False) -> ChainId:
        """Says that ``block`` holds ``tokens`` after ``chain``; returns the chain that ends with it.

        It may be said before the step that writes the block: rows of the same step then share it, since a step writes all keys
        and values of a layer before it reads any. Call :meth:`written` after the step, or pass it here when it is so already.
        Fewer tokens than a block has, for a row that ended there, can be found as a tail. When another block is known for the
        same content, that one stays known, and its chain is returned.
        """
        if not self._reuse:
            return chain
        key = (chain, tokens)
        known = self._by_content.get(key)
        if known is not None:
            return self._chain[known]
        self._by_content[key] = block
        self._content[block] = key
        self._children.setdefault(chain, {})[block] = None
        self._chain[block] = self._new_chain()
        if not written:
            self._unwritten.add(block)
        return self._chain[block]

    def written(self) -> None:
        """All that was remembered is in the cache's memory now, and may be copied."""
        self._unwritten.clear()

    def match(self, tokens: Sequence[int], adapter: int = 0) -> Match:
        """The longest prefix of ``tokens`` that is known under the adapter, but never all of them: one must be computed to know
        what follows.

        The full blocks come held; of a block that agrees only in part, the number of its leading tokens that do.
        """
        size, limit = self.block_size, len(tokens) - 1
        found = Match(chain=self.root_of(adapter))
        at = 0
        while at + size <= limit:
            block = self._by_content.get((found.chain, tuple(tokens[at : at + size])))
            if block is None:
                break
            found.blocks.append(block)
            found.chain = self._chain[block]
            at += size
        self.hold(found.blocks)
        for block in self._children.get(found.chain, ()):
            common = _common_length(self._content[block][1], tokens[at : min(at + size, limit)])
            if common > found.tail_tokens and block not in self._unwritten:
                found.tail, found.tail_tokens = block, common
        return found

    def _forget(self, block: int) -> None:
        key = self._content.pop(block)
        del self._by_content[key]
        del self._chain[block]
        self._unwritten.discard(block)
        siblings = self._children[key[0]]
        del siblings[block]
        if not siblings:
            del self._children[key[0]]

    def _new_chain(self) -> ChainId:
        self._last_chain += 1
        return self._last_chain


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
