"""The loop's machine: which stage follows which, and the record of every step, with what it was decided on.

::

    DECIDE ──▶ WARM_START ──▶ LEARN ──▶ MEASURE ──▶ (RELEASE) ──▶ WATCH ──▶ DECIDE of the next cycle, or DONE
       ├───── weights to merge ─▶ MERGE ─▶ ┤                       ▲
       ├───── a system prompt to try ────▶ ┘                       │
       └───────────────────── nothing to try ────────────────────▶ ┘

Each stage ends in one :class:`Decision`. The decision and the move that it makes are saved in one write of ``state.json``, so
that whoever is killed in between has either made both or neither: the record has no gaps and nothing twice.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evergrad.loop._folder import LoopState, Stage


@dataclass(frozen=True, slots=True)
class Decision:
    """How a stage ended.

    >>> Decision(Stage.WATCH, "refused", "v2 ties with v1").following.value
    'watch'
    """

    following: Stage
    word: str
    """What was decided, in a word or two: ``promoted``, ``refused``, ``train``, ``next cycle``."""
    why: str
    """One sentence."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The figures that it rests on; JSON values."""


def take(state: LoopState, decision: Decision, *, at_s: float, usd: float | None) -> None:
    """Puts a decision on record and makes its move; a DECIDE that follows is that of the next cycle."""
    state.decisions.append(
        {
            "number": len(state.decisions) + 1,
            "cycle": state.cycle,
            "stage": state.stage.value,
            "decided": decision.word,
            "why": decision.why,
            "following": decision.following.value,
            "evidence": dict(decision.evidence),
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "at_s": round(at_s, 1),
            "usd": usd,
        }
    )
    if decision.following is Stage.DECIDE:
        begin_next_cycle(state, decision.why, tuple(decision.evidence.get("fired", ())))
    state.stage, state.step = decision.following, 0


def begin_next_cycle(state: LoopState, trigger: str, kinds: tuple[str, ...] = ("schedule",)) -> None:
    """Counts up the cycle; its progress starts from nothing.

    Args:
        trigger: Why it begins, in words.
        kinds: The triggers that fired, by name.
    """
    state.cycle, state.trigger, state.trigger_kinds = state.cycle + 1, trigger, list(kinds)
    state.slices, state.slices_taken = {}, {}
    state.group, state.watch_checks, state.new_failures, state.audited = 0, 0, 0, []
