"""Rows: what the engine computes, one per distinct sequence of tokens; and samples: what it was asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from evergrad.inference._adapters import Adapter
from evergrad.inference._blocks import ChainId
from evergrad.inference._drafts import Lookup
from evergrad.inference._grammar import Matcher
from evergrad.inference._text import TextStream
from evergrad.types import FinishReason, PolicySpan, Sampling

Order = tuple[int, str, int, int]
"""Place in the queue: requests of open sessions first, then session, arrival, and index of the sample."""


@dataclass(eq=False)
class Sample:
    """One completion in the making. Once it has a finish reason, nothing is added to it."""

    request_id: str
    index: int
    """Of this completion among the request's."""
    sampling: Sampling
    seed: int
    order: Order
    drawn: int = 0
    """Tokens that an earlier try drew and that stand at the prompt's end: the draws go on after them."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens that were not computed for this sample."""
    finish_reason: FinishReason | None = None
    text: TextStream | None = None
    """Watches for stop texts, where there are any."""

    def add(self, token_id: int, logprob: float, policy_version: int, room: int) -> None:
        """Takes one drawn token; ``room`` is how many more the context has space for after it."""
        if self.finish_reason is not None:
            raise AssertionError("a finished sample was drawn for")
        at = len(self.token_ids)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        last = self.spans[-1] if self.spans else None
        if last is not None and last.policy_version == policy_version:
            self.spans[-1] = PolicySpan(policy_version, last.start, at + 1)
        else:
            self.spans.append(PolicySpan(policy_version, at, at + 1))
        if self.text is not None:
            self.text.add(token_id)
        if token_id in self.sampling.stop_token_ids or (self.text is not None and self.text.stopped):
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self.sampling.max_tokens or room <= 0:
            self.finish_reason = FinishReason.LENGTH

    def uniform(self, ahead: int = 0) -> float:
        """The draw of the next token, or of one further ``ahead``, in [0, 1): a function of the seed and the token's place, and
        of nothing else."""
        text = f"{self.seed}:{self.drawn + len(self.token_ids) + ahead}".encode()
        return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) * 2.0**-53


@dataclass(frozen=True)
class Distribution:
    """Samples of a row share one draw's distribution; so this is part of what makes requests equal."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float = 0.0
    grammar: tuple[str, int] | None = None
    """What every completion must follow, and how many of the prompt's last tokens are already part of it."""

    @classmethod
    def of(cls, sampling: Sampling, grammar: tuple[str, int] | None = None) -> Distribution:
        if sampling.greedy:
            return cls(0.0, 1.0, 0, 0.0, grammar)
        return cls(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, grammar)


@dataclass(eq=False)
class Row:
    """One sequence in the cache, and the samples whose tokens it is, prompt included."""

    tokens: list[int]
    prompt_len: int
    distribution: Distribution
    samples: list[Sample]
    order: Order
    """Place in the queue; the smallest is served first."""
    adapter: Adapter | None = None
    """What is added to the base for this row."""
    matcher: Matcher | None = None
    """Where in its grammar the row is; None without one."""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose keys and values are in ``blocks``."""
    chain: ChainId | None = None
    """Of the full blocks so far; None when they hold anything of an older version, and must not be found again."""
    num_chained: int = 0
    """Blocks in the chain."""
    lookup: Lookup | None = None
    """What followed what in ``tokens``; made when first needed."""
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Place in the cache of each token that ``blocks`` has room for."""

    @property
    def started(self) -> bool:
        """Whether anything was drawn for it."""
        return len(self.tokens) > self.prompt_len

    @property
    def num_waiting(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.num_computed

    def own_lookup(self) -> Lookup:
        if self.lookup is None:
            self.lookup = Lookup()
            self.lookup.learn(self.tokens, 0)
        return self.lookup

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.tokens)
        self.tokens.extend(tokens)
        if self.lookup is not None:
            self.lookup.learn(self.tokens, start)

    def add_blocks(self, blocks: list[int], block_size: int) -> None:
        self.blocks.extend(blocks)
        places = (np.asarray(blocks, dtype=np.int64)[:, None] * block_size + np.arange(block_size)).reshape(-1)
        self.slots = np.concatenate([self.slots, places])

    def clear_blocks(self) -> None:
        self.blocks, self.num_computed = [], 0
        self.chain, self.num_chained = None, 0
        self.slots = np.empty(0, dtype=np.int64)
