"""Guesses of what rows will say next, so that one step can compute several of a row's tokens.

A step of a few rows costs little less than one of a few dozen: the products run far below the machine's speed. Tool calls
repeat what the conversation holds already, so the tokens after the last occurrence of a row's last tokens are often what comes
next. Each guess is computed along with the row; tokens are then drawn position by position, exactly as they would have been one
step at a time, and the guess counts only as far as it agrees with what was drawn. Draws depend on a seed and a place, not on
the step, so completions are the same with and without guesses.

How good guesses are is learnt on the way, for each kind of evidence, from what is drawn after every guess, made use of or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ORDERS = (4, 3, 2)
"""Lengths of the contexts that are looked up, longest first."""
CONTEXT = _ORDERS[0]
"""The longest of them."""
_WORTH = 0.35
"""Least probability at which a token is guessed. A further token of a small step costs about a third of a row's share."""
_PRIOR = 0.5
_MEMORY = 0.97
"""Share of the past that an outcome leaves in place."""

Evidence = tuple[str, int]
"""Where a guess comes from (the row itself, or any row) and the length of the context that it follows."""


_LIMIT = 500_000
"""Contexts after which a lookup begins anew, with the ones so far still at hand until it is full again."""


class Lookup:
    """The token after the last occurrence of each context."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Takes note of ``tokens[start:]``, each after those before it."""
        if len(self._next) > _LIMIT:
            self._older, self._next = self._next, {}
        for at in range(start, len(tokens)):
            for order in _ORDERS:
                if at >= order:
                    self._next[tuple(tokens[at - order : at])] = tokens[at]

    def after(self, context: tuple[int, ...]) -> int | None:
        token = self._next.get(context)
        return self._older.get(context) if token is None else token

    def copy(self) -> Lookup:
        twin = Lookup()
        twin._next, twin._older = self._next.copy(), self._older
        return twin


@dataclass(frozen=True)
class Guess:
    """What may follow a row, and how likely all of it up to each token is."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    evidence: Evidence
    """Of the first token."""


class Drafter:
    """Makes guesses, and learns how far to trust them."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._common = Lookup()
        self._trust: dict[Evidence, float] = {}

    def forget(self) -> None:
        """As at the start: what is guessed next depends on nothing before."""
        self._common = Lookup()
        self._trust = {}

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Takes note of what any row reads or says."""
        if self._max_length:
            self._common.learn(tokens, start)

    def guess(self, own: Lookup, tokens: Sequence[int], limit: int) -> Guess | None:
        """At most ``limit`` tokens that may follow; at least one whenever there is any evidence, however weak."""
        context = tuple(tokens[-CONTEXT:])
        found: list[int] = []
        chances: list[float] = []
        first: Evidence | None = None
        chance = 1.0
        while len(found) < min(limit, self._max_length):
            seen = self._look_up(own, context)
            if seen is None:
                break
            token, evidence = seen
            chance *= self._trust.get(evidence, _PRIOR)
            if first is not None and chance < _WORTH:
                break
            first = first or evidence
            found.append(token)
            chances.append(chance)
            context = (*context, token)[-CONTEXT:]
        return Guess(tuple(found), tuple(chances), first) if first is not None else None

    def outcome(self, guess: Guess, came_true: bool) -> None:
        """Says whether a token that was drawn is the first of a guess that was made for its place."""
        trust = self._trust.get(guess.evidence, _PRIOR)
        self._trust[guess.evidence] = _MEMORY * trust + (1.0 - _MEMORY) * came_true

    def _look_up(self, own: Lookup, context: tuple[int, ...]) -> tuple[int, Evidence] | None:
        for order in _ORDERS:
            if len(context) < order:
                continue
            for name, lookup in (("row", own), ("any", self._common)):
                token = lookup.after(context[-order:])
                if token is not None:
                    return token, (name, order)
        return None


def share_out(guesses: Iterable[tuple[int, Guess]], room: int) -> dict[int, int]:
    """How many tokens of each guess, by its key, to compute when there is room for ``room``: the likeliest of all."""
    options = [
        (-chance, depth, key)
        for key, guess in guesses
        for depth, chance in enumerate(guess.chances, start=1)
        if chance >= _WORTH
    ]
    # Chances only fall along a guess, so the likeliest of all never skip one.
    taken: dict[int, int] = {}
    for _, depth, key in sorted(options)[: max(0, room)]:
        taken[key] = max(taken.get(key, 0), depth)
    return taken
