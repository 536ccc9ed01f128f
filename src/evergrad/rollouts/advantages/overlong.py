"""A soft price on length, to add to a reward before advantages are taken."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, longest: int, margin: int) -> float:
    """0 up to ``longest − margin`` tokens, then falling in a line to −1 at ``longest`` and beyond (DAPO, arXiv 2503.14476).

    An answer near its limit learns that it is before it is cut off, where a reward of 0 would not tell long from wrong.

    Raises:
        ValueError: the margin is not in 1 … longest.

    >>> [overlong_penalty(n, longest=100, margin=20) for n in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= margin <= longest:
        raise ValueError(f"margin {margin} is not in 1 … {longest}")
    return max(min((longest - margin - num_tokens) / margin, 0.0), -1.0)
