"""Input drift: are the texts of now drawn as those of then were? A permutation test on the maximum mean discrepancy.

Each text is the bag of its words, digits taken as one another (numbers of orders say nothing), scaled to length 1. With x̄ and
ȳ the mean bags of both sides::

    MMD² = |x̄ − ȳ|²        p = (1 + number of shuffles with at least this MMD²) / (1 + shuffles)

(Gretton et al., "A kernel two-sample test", JMLR 2012, with a linear kernel.) The p-value is exact whatever the sizes. Looks
are many, so the k-th gets the level α/(k(k+1)): over all of them together an alarm without drift has a chance of α at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evergrad.evals.evaluation import EvalError

_SHUFFLES = 4999
_WORD = re.compile(r"[^\W\d_]+|\d")


def drift_p(seen: Sequence[str], reference: Sequence[str], *, seed: int = 0) -> float:
    """Chance of a difference as large as that between two sets of texts, were they drawn alike.

    >>> drift_p(["find my lamp"] * 8, ["refund order 7"] * 8) < 0.01
    True
    >>> drift_p(["refund order 9"] * 8, ["refund order 7"] * 8)
    1.0

    Raises:
        EvalError: a side without texts.
    """
    import numpy as np

    if not seen or not reference:
        raise EvalError(f"{len(seen)} texts against {len(reference)}", hint="compare one with one at least")
    bags = _bags([*seen, *reference])
    n, m = len(seen), len(reference)
    rng = np.random.default_rng(seed)
    # Row k holds 1/n where text i is on the one side in shuffle k, and −1/m where it is on the other.
    places = rng.permuted(np.tile(np.arange(n + m), (_SHUFFLES, 1)), axis=1) < n
    sides = np.where(np.vstack([np.arange(n + m) < n, places]), 1 / n, -1 / m)
    distances = ((sides @ bags) ** 2).sum(axis=1)
    return float((1 + (distances[1:] >= distances[0] - 1e-12).sum()) / (1 + _SHUFFLES))


def drift_level(alpha: float, look: int) -> float:
    """The level of a look, counted from 1; all of them together sum to ``alpha``.

    >>> [round(drift_level(0.01, look), 5) for look in (1, 2, 3)]
    [0.005, 0.00167, 0.00083]
    """
    return alpha / (look * (look + 1))


def _bags(texts: Sequence[str]) -> Any:
    """One row a text: its words, counted, scaled to length 1."""
    import numpy as np

    words = [[word if word.isalpha() else "0" for word in _WORD.findall(text.lower())] for text in texts]
    columns = {word: index for index, word in enumerate(sorted({word for each in words for word in each}))}
    bags = np.zeros((len(texts), max(1, len(columns))))
    for row, each in enumerate(words):
        for word in each:
            bags[row, columns[word]] += 1
    lengths = np.linalg.norm(bags, axis=1, keepdims=True)
    return bags / np.where(lengths > 0, lengths, 1)
