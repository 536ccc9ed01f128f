"""Numbers as people read them; what is unknown is a dash, never zero."""

from __future__ import annotations

import math


def usd(amount: float | None) -> str:
    """Dollars with two significant digits at least; unknown is a dash, never zero.

    >>> usd(12.345), usd(0.01234), usd(0.0000456), usd(None)
    ('$12.35', '$0.0123', '$0.000046', '–')
    """
    if amount is None:
        return "–"
    size = abs(amount)
    if size == 0 or size >= 1:
        digits = 2
    elif size >= 0.001:
        digits = 4
    else:
        digits = min(1 - math.floor(math.log10(size)), 12)
    return f"{'-' if amount < 0 else ''}${size:,.{digits}f}"


def percent(share: float | None, *, signed: bool = False) -> str:
    """
    >>> percent(0.9583), percent(-0.28, signed=True), percent(None)
    ('95.8%', '-28.0%', '–')
    """
    return "–" if share is None else f"{100 * share:{'+' if signed else ''}.1f}%"


def clock(seconds: float | None) -> str:
    """
    >>> clock(7.4), clock(432), clock(7265)
    ('0:07', '7:12', '2:01:05')
    """
    if seconds is None:
        return "–"
    whole = int(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def count(number: float | None) -> str:
    """
    >>> count(1234.5678), count(0.04321), count(None)
    ('1,235', '0.0432', '–')
    """
    if number is None:
        return "–"
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"
