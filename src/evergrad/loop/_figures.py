"""Numbers as people read them; what is unknown is a dash, never zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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


def step_details(record: Mapping[str, Any]) -> str:
    """What a step of reinforcement learning says of its health, in one line; what a loss does not measure is left out.

    >>> step_details({"ratio_mean": 1.0, "clipped_share": 0.02, "sampled_tokens_mean": 18.5, "outcome_policy_fault": 3.0})
    'ratio 1.000  clipped 2.0%  18.5 tokens a rollout  3 policy faults'
    """
    shown = {
        "loss": "loss {:.3g}",
        "ratio_mean": "ratio {:.3f}",
        "ratio_max_error": "at most {:.1e} off",
        "clipped_share": "clipped {:.1%}",
        "mismatch_kl": "mismatch KL {:.1e}",
        "reference_kl": "reference KL {:.1e}",
        "teacher_kl": "teacher KL {:.2g}",
        "sampled_entropy": "entropy {:.2f}",
        "sampled_tokens_mean": "{:.1f} tokens a rollout",
        "useful_token_share": "{:.0%} useful",
        "memory_gib": "{:.2f} GiB",
    }
    words = [form.format(record[name]) for name, form in shown.items() if record.get(name) is not None]
    for name in ("policy_fault", "environment_fault", "verifier_fault"):
        if many := int(record.get(f"outcome_{name}") or 0):
            words.append(f"{many} {name.replace('_', ' ')}{'s' if many > 1 else ''}")
    return "  ".join(words)
