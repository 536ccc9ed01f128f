"""The probe: a few tokens that engine and trainer must score alike, or the engine does not hold the trainer's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evergrad.inference import InferenceClient
from evergrad.types import EvergradError

PROBE_TOKENS = 24
PROBE_TOLERANCE = 1e-3
"""Largest difference, in nats, between the engine's and the trainer's log-probabilities of one token."""


def require_equal(expected: Sequence[float], found: Sequence[float], what: str) -> None:
    """
    Raises:
        EvergradError: the log-probabilities differ, or one of them is no number.
    """
    differences = [abs(a - b) for a, b in zip(expected, found, strict=True)]
    if all(difference <= PROBE_TOLERANCE for difference in differences):
        return
    raise EvergradError(
        f"{what}: the engine's log-probabilities differ from the trainer's by {max(differences):.2g} nats",
        where="weight transfer",
        hint="the weights in the engine are not those of the trainer; see logs/ in the run folder",
    )


async def require_probe(probe: Mapping[str, Any] | None, engine: InferenceClient, what: str) -> None:
    """Has ``engine`` score the probe that was kept with a version; a version without one is taken as it is.

    Raises:
        EvergradError: the engine scores it differently from the trainer that made the version.
    """
    if probe:
        require_equal(probe["logprobs"], await engine.logprobs(probe["token_ids"]), what)
