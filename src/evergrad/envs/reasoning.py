"""Reasoning problems without end: the families of the package ``reasoning_gym``, scored strictly.

A family's own score pays for near misses, and some families pay full marks to answers that hedge. So an answer counts only at a
score of exactly 1.0, and families whose scorer cannot be trusted are refused with the reason.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from pydantic import Field, model_validator

from evergrad.config import nearest
from evergrad.envs._environment import EnvError, Environment, EnvironmentConfig, TaskRow, reward
from evergrad.types import Limits, Message

CLEAN_FAMILIES: tuple[str, ...] = (
    "calendar_arithmetic",
    "chain_sum",
    "gcd",
    "letter_counting",
    "maze",
    "number_sorting",
    "spell_backward",
    "word_sorting",
)
"""The default: gold answers pass, and constants, echoes, hedges and junk do not."""

_HEDGE = "pays full marks to an answer that hedges"
_EVALUATES = "its scorer evaluates the model's text as code"
UNSAFE_FAMILIES: Mapping[str, str] = {
    "game_of_life_halting": "pays full marks to any text",
    "gsm_symbolic": _HEDGE,
    "kakurasu": _HEDGE,
    "knights_knaves": _HEDGE,
    "letter_jumble": _HEDGE,
    "sokoban": _HEDGE,
    "binary_matrix": _EVALUATES,
    "countdown": _EVALUATES,
    "intermediate_integration": _EVALUATES,
    "n_queens": _EVALUATES,
    "polynomial_multiplication": _EVALUATES,
    "puzzle24": _EVALUATES,
    "simple_integration": _EVALUATES,
    "spiral_matrix": _EVALUATES,
    "string_insertion": _EVALUATES,
}
"""Families that are refused, and why (read in reasoning_gym 0.1.25)."""

_NOT_A_NUMBER = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)
_CHUNK = 64
"""Problems made from one seed before the next is drawn."""


def _clean_families() -> dict[str, dict[str, Any]]:
    return {name: {} for name in CLEAN_FAMILIES}


class Reasoning(Environment):
    """One question, one answer, no tools."""

    class Config(EnvironmentConfig):
        """Which problems are asked."""

        families: dict[str, dict[str, Any]] = Field(default_factory=_clean_families)
        """Family name to its parameters in ``reasoning_gym``, e.g. ``{chain_sum = {min_terms = 2, max_terms = 2}}``."""
        system: str | None = ""
        """System message; empty sends an empty one, ``None`` (not expressible in TOML) leaves it to the chat template."""
        short: bool = True
        """Ask in the fewest tokens where a family allows it (``12 + 7 =`` for ``chain_sum``), else in its own words."""
        max_tokens: int = Field(default=96, gt=0)
        """Budget of the answer, end of turn included; 12 are plenty for ``chain_sum``."""

        @model_validator(mode="after")
        def _check_families(self) -> Reasoning.Config:
            if not self.families:
                raise ValueError("families: name at least one")
            for name in self.families:
                if name in UNSAFE_FAMILIES:
                    raise ValueError(f"family '{name}' is refused: {UNSAFE_FAMILIES[name]}")
            return self

    @classmethod
    def limits_for(cls, config: Any) -> Limits:
        return Limits(max_turns=1, max_tokens_per_turn=config.max_tokens, max_total_tokens=1024)

    @classmethod
    def tasks(cls, rng: Random, config: Any) -> Iterator[TaskRow]:
        while True:
            family = rng.choice(sorted(config.families))
            seed = rng.randrange(2**31)
            for entry in _dataset(family, json.dumps(config.families[family], sort_keys=True), seed, _CHUNK):
                yield _row(family, entry, config)
                if len(config.families) > 1:  # one problem a seed, so that families alternate
                    break

    @reward
    async def solved(self, answer: str) -> float:
        """1 when the family's own scorer gives exactly 1.0."""
        entry = self.facts["entry"]
        if _NOT_A_NUMBER.search(answer) and not _NOT_A_NUMBER.search(entry["answer"] or ""):
            return 0.0  # NaN compares as equal in scorers that allow a tolerance
        family = self.facts["family"]
        dataset = _dataset(family, json.dumps(self.config.families.get(family, {}), sort_keys=True), 0, 1)
        return float(dataset.score_answer(answer, entry) == 1.0)

    def demonstrate(self) -> list[str] | None:
        answer = self.facts["entry"]["answer"]
        return None if answer is None else [str(answer)]


def _row(family: str, entry: Mapping[str, Any], config: Any) -> TaskRow:
    metadata = {key: value for key, value in entry["metadata"].items() if key not in ("source_dataset", "source_index")}
    expression = metadata.get("expression") if config.short and family == "chain_sum" else None
    question = f"{expression} =" if expression else entry["question"]
    try:  # through JSON and back: what the scorer reads is then what a stored task holds
        facts = json.loads(json.dumps({"family": family, "entry": {**entry, "metadata": metadata}}))
    except TypeError as error:
        raise EnvError(f"its problems are not plain JSON: {error}", where=f"family {family}") from error
    system = () if config.system is None else (Message("system", config.system),)
    return TaskRow((*system, Message("user", question)), facts, slice=family)


@functools.lru_cache(maxsize=256)
def _dataset(family: str, parameters: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise EnvError("the package reasoning-gym is missing", hint="pip install reasoning-gym") from error
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        raise EnvError(f"reasoning_gym has no family '{family}'", hint=nearest(family, DATASETS))
    try:
        return reasoning_gym.create_dataset(family, seed=seed, size=size, **json.loads(parameters))
    except (TypeError, AssertionError, ValueError) as error:
        raise EnvError(f"parameters do not fit: {error}", where=f"family {family}") from error
