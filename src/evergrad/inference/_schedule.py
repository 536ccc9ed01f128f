"""Which rows take part in a step, with which of their tokens, and in which blocks those go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evergrad.inference._adapters import Adapter
from evergrad.inference._blocks import BlockPool, OutOfBlocks
from evergrad.inference._drafts import Drafter, Guess, share_out
from evergrad.inference._rows import Distribution, Order, Row, Sample
from evergrad.inference.config import EngineConfig

CopyBlock = Callable[[int, int, int], None]
"""Copies the first n tokens of one block to another: (source, target, n)."""


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, end)`` of a row, to be computed in one step, and what may follow them."""

    row: Row
    start: int
    end: int
    guess: Guess | None = None
    """Of what comes next, for the first token's sake; only where the row is computed to its end."""
    draft: tuple[int, ...] = ()
    """The part of the guess that is computed along."""

    @property
    def stop(self) -> int:
        """``end``, draft included."""
        return self.end + len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        return [*self.row.tokens[self.start : self.end], *self.draft]

    @property
    def draws(self) -> bool:
        """Whether the row's next token can be drawn after this."""
        return self.end == len(self.row.tokens)


class Scheduler:
    """Rows that wait and rows that run. A running row owns blocks; when there are none left, the youngest gives way."""

    def __init__(self, pool: BlockPool, drafter: Drafter, copy_block: CopyBlock, config: EngineConfig, max_len: int) -> None:
        self.pool, self._drafter, self._copy_block = pool, drafter, copy_block
        self._max_rows, self._max_batch_tokens = config.max_rows, config.max_batch_tokens
        self._draft_batch_tokens, self._max_len = config.draft_batch_tokens, max_len
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.admits_new = True
        """False while rows for which nothing was drawn yet must wait."""
        self.num_preemptions = self.num_cached = 0
        self._joinable: dict[tuple[tuple[int, ...], Distribution, int], Row] = {}

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self._next_waiting() is not None)

    def enqueue(
        self,
        token_ids: tuple[int, ...],
        distribution: Distribution,
        samples: list[Sample],
        order: Order,
        adapter: Adapter | None = None,
    ) -> Row:
        """Puts samples in the queue: in the row of an equal request that waits too, else in a row of their own."""
        key = (token_ids, distribution, _serial(adapter))
        row = self._joinable.get(key)
        if row is None:
            row = Row(list(token_ids), len(token_ids), distribution, [], order, adapter)
            self._joinable[key] = row
            self.waiting.append(row)
        row.samples.extend(samples)
        row.order = min(row.order, order)
        return row

    def next_step(self) -> list[Chunk]:
        """The chunks of the next step, running rows first. Blocks are taken, and what they will hold is remembered."""
        chunks: list[Chunk] = []
        budget = self._max_batch_tokens
        # Rows that only need their next token go before those that still read their prompt, so none of them skips a step.
        for row in sorted(self.running, key=lambda row: row.num_waiting > 1):
            if row not in self.running:
                continue  # gave way meanwhile
            if budget <= 0:
                break
            chunk = self._grow(row, budget, {id(chunk.row) for chunk in chunks})
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
        self.waiting.sort(key=lambda row: row.order)
        while budget > 0 and len(self.running) < self._max_rows:
            first = self._next_waiting()
            chunk = None if first is None else self._admit(first, budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        return self._with_drafts(chunks)

    def fork(self, row: Row, token_ids: Sequence[int], num_computed: int) -> Row:
        """A row that goes on from ``row`` with ``token_ids``. The first ``num_computed`` tokens of all that are in the row's
        blocks: full ones are shared, the last one is copied in part.

        Without room for one more, the new row waits, and finds its blocks again then.
        """
        child = Row([*row.tokens], row.prompt_len, row.distribution, [], row.order, row.adapter)
        child.lookup = None if row.lookup is None else row.lookup.copy()
        child.extend(token_ids)
        full, rest = divmod(num_computed, self.pool.block_size)
        if len(self.running) >= self._max_rows or (rest and not self.pool.available):
            self.waiting.append(child)
            return child
        shared = row.blocks[:full]
        self.pool.hold(shared)
        child.add_blocks(shared, self.pool.block_size)
        if rest:
            block = self.pool.take()
            self._copy_block(row.blocks[full], block, rest)
            child.add_blocks([block], self.pool.block_size)
        child.num_computed = num_computed
        child.chain, child.num_chained = row.chain, row.num_chained
        self.running.insert(self.running.index(row) + 1, child)
        return child

    def remove(self, row: Row) -> None:
        """Ends a row. What it computed can be found again, its last and partly filled block included."""
        if row in self.running:
            self.running.remove(row)
            self._remember_tail(row)
            self._release(row)
        else:
            self.waiting.remove(row)
            self._unlist(row)

    def make_room(self, num_blocks: int) -> None:
        """Lets the youngest rows give way until ``num_blocks`` can be taken, between two steps."""
        while num_blocks > self.pool.available:
            if not self.running:
                raise OutOfBlocks
            self._preempt(self.running[-1])

    def forget_prefixes(self) -> None:
        """Nothing computed so far is found by content any more; rows that run go on with what they have."""
        self.pool.forget_all()
        for row in list(self.running):
            row.chain = None
            if len(row.tokens) == row.prompt_len:
                # Still reading its prompt: starting over costs little and leaves nothing of the old weights in it.
                self.running.remove(row)
                self._release(row)
                self.waiting.append(row)

    def _next_waiting(self) -> Row | None:
        return next((row for row in self.waiting if self.admits_new or row.started), None)

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """Adds guesses where the step has room for them. They never make a row give way."""
        guesses: dict[int, Guess] = {}
        for place, chunk in enumerate(chunks):
            # A token less than could be drawn: what follows the last one is not asked for.
            room = min(
                max((sample.sampling.max_tokens - len(sample.token_ids) for sample in chunk.row.samples), default=0),
                self._max_len - len(chunk.row.tokens),
            )
            # A grammar's masks are made one token at a time.
            if chunk.draws and room > 1 and chunk.row.matcher is None:
                guess = self._drafter.guess(chunk.row.own_lookup(), chunk.row.tokens, room - 1)
                if guess is not None:
                    guesses[place] = guess
        computed = sum(chunk.end - chunk.start for chunk in chunks)
        taken = share_out(guesses.items(), self._draft_batch_tokens - computed)
        return [self._with_draft(chunk, guesses.get(place), taken.get(place, 0)) for place, chunk in enumerate(chunks)]

    def _with_draft(self, chunk: Chunk, guess: Guess | None, length: int) -> Chunk:
        if guess is None:
            return chunk
        size = self.pool.block_size
        length = min(length, (len(chunk.row.blocks) + self.pool.available) * size - chunk.end)
        missing = max(0, -(-(chunk.end + length) // size) - len(chunk.row.blocks))
        chunk.row.add_blocks([self.pool.take() for _ in range(missing)], size)
        return replace(chunk, guess=guess, draft=guess.tokens[:length])

    def _grow(self, row: Row, budget: int, scheduled: set[int]) -> Chunk | None:
        end = min(len(row.tokens), row.num_computed + budget)
        missing = -(-end // self.pool.block_size) - len(row.blocks)
        while missing > self.pool.available:
            # Rows of this step stay: others may already count on what they will write.
            victim = next((other for other in reversed(self.running) if id(other) not in scheduled), row)
            self._preempt(victim)
            if victim is row:
                return None
        row.add_blocks([self.pool.take() for _ in range(max(0, missing))], self.pool.block_size)
        return self._chunk(row, end)

    def _admit(self, row: Row, budget: int) -> Chunk | None:
        match = self.pool.match(row.tokens, _serial(row.adapter))
        size = self.pool.block_size
        # Room for the whole row now, not only for its first piece: else two long prompts could starve each other.
        missing = -(-(len(row.tokens) + 1) // size) - len(match.blocks)
        if missing > self.pool.available:
            self.pool.drop(match.blocks)
            return None
        row.add_blocks(match.blocks, size)
        row.num_computed = len(match.blocks) * size
        row.chain, row.num_chained = match.chain, len(match.blocks)
        if match.tail is not None and missing < self.pool.available:
            self.pool.hold([match.tail])
            block = self.pool.take()
            self._copy_block(match.tail, block, match.tail_tokens)
            self.pool.drop([match.tail])
            row.add_blocks([block], size)
            row.num_computed += match.tail_tokens
        self.waiting.remove(row)
        self._unlist(row)
        self.running.append(row)
        # Here, where rows come in their own order, and not on arrival: of two that go on differently the last one is believed.
        self._drafter.learn(row.tokens, 0)
        self._count_cached(row)
        end = min(len(row.tokens), row.num_computed + budget)
        row.add_blocks([self.pool.take() for _ in range(-(-end // size) - len(row.blocks))], size)
        return self._chunk(row, end)

    def _unlist(self, row: Row) -> None:
        key = (tuple(row.tokens), row.distribution, _serial(row.adapter))
        if self._joinable.get(key) is row:
            del self._joinable[key]
        # Requests may have come in any order; what is computed must not depend on it.
        row.samples.sort(key=lambda sample: sample.order)

    def _count_cached(self, row: Row) -> None:
        for place, sample in enumerate(row.samples):
            if not sample.token_ids and not sample.cached_tokens:
                # The first of a group pays for the prompt, the others ride along.
                sample.cached_tokens = min(row.num_computed, row.prompt_len) if place == 0 else row.prompt_len
                self.num_cached += sample.cached_tokens

    def _chunk(self, row: Row, end: int) -> Chunk:
        size = self.pool.block_size
        while row.chain is not None and (row.num_chained + 1) * size <= end:
            at = row.num_chained * size
            row.chain = self.pool.remember(row.chain, tuple(row.tokens[at : at + size]), row.blocks[row.num_chained])
            row.num_chained += 1
        return Chunk(row, row.num_computed, end)

    def _remember_tail(self, row: Row) -> None:
        size = self.pool.block_size
        tail = tuple(row.tokens[row.num_chained * size : row.num_computed])
        if row.chain is not None and tail:
            self.pool.remember(row.chain, tail, row.blocks[row.num_chained], written=True)

    def _preempt(self, row: Row) -> None:
        self.num_preemptions += 1
        self.running.remove(row)
        self._remember_tail(row)
        self._release(row)
        self.waiting.append(row)

    def _release(self, row: Row) -> None:
        self.pool.drop(row.blocks)
        row.clear_blocks()


def _serial(adapter: Adapter | None) -> int:
    return 0 if adapter is None else adapter.serial
