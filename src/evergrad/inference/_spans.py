"""Which policy version drew which tokens of a completion."""

from __future__ import annotations

from collections.abc import Iterable

from evergrad.types import PolicySpan


def joined(spans: Iterable[PolicySpan]) -> tuple[PolicySpan, ...]:
    """Adjacent spans of one version made one.

    >>> joined([PolicySpan(1, 0, 1), PolicySpan(1, 1, 2), PolicySpan(2, 2, 3)])
    (PolicySpan(policy_version=1, start=0, end=2), PolicySpan(policy_version=2, start=2, end=3))
    """
    found: list[PolicySpan] = []
    for span in spans:
        if found and found[-1].policy_version == span.policy_version:
            found[-1] = PolicySpan(span.policy_version, found[-1].start, span.end)
        else:
            found.append(span)
    return tuple(found)
