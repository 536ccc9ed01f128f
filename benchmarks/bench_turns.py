"""What a conversation costs to read again: tokens that the engine computes a second time, in turns with tool results.

64 sessions in groups of 8 with one task each play 6 turns. A turn's prompt is all that was said before, as drawn, and a tool's
result. Tools take their time, so sessions drift apart and their turns meet in one batch in every order. A cold cache would
compute each prompt whole; what is needed at least is each distinct token after its distinct context once. What the engine
computes beyond that, guesses that did not come true aside, it computes again. The model is random and small: which tokens are
computed does not depend on what they say.

The last line of output is one JSON object; the same is kept under ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks import record
from transformers import LlamaConfig, LlamaForCausalLM

from evergrad.inference import EngineConfig
from evergrad.inference.engine import Engine, Request
from evergrad.types import Sampling

_VOCABULARY = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), arguments.groups, arguments.samples, arguments.turns)
    record.keep(result, record.cores())


@dataclass
class _Session:
    tokens: list[int]
    """Of the conversation so far."""
    random: random.Random
    turns: int = 0
    due: int = 0
    """The step from which its next turn can be asked."""
    drawn: list[int] = field(default_factory=list)


def measure(folder: Path, groups: int, samples: int, turns: int, **changes: Any) -> dict[str, Any]:
    """Plays all sessions to their end; ``changes`` are to the engine's configuration."""
    _make_model(folder)
    engine = Engine(EngineConfig(model=str(folder), device="cpu", **changes))
    sessions = _sessions(groups, samples)
    needed: set[int] = set()
    asking: dict[str, _Session] = {}
    cold = clock = 0
    while any(session.turns < turns for session in sessions) or engine.has_work:
        for name, session in enumerate(sessions):
            if session.turns < turns and session.due <= clock and str(name) not in asking:
                asking[str(name)] = session
                sampling = Sampling(max_tokens=session.random.randint(8, 32), seed=name * 100 + session.turns)
                engine.submit(Request(str(name), tuple(session.tokens), sampling))
        for event in engine.step():
            session = asking[event.request_id]
            if event.token_id is not None:
                session.drawn.append(event.token_id)
            if event.finish_reason is not None:
                whole = [*session.tokens, *session.drawn]
                cold += len(whole) - 1
                needed |= _prefixes(whole[:-1])
                del asking[event.request_id]
                _go_on(session, clock)
        clock += 1
    guessed = engine.num_drafted - engine.num_accepted
    computed = engine.num_computed - guessed
    return {
        "benchmark": "turns",
        "recomputed_share": round((computed - len(needed)) / cold, 5),
        "tokens_recomputed": computed - len(needed),
        "tokens_computed": computed,
        "tokens_cold": cold,
        "tokens_needed": len(needed),
        "tokens_guessed_in_vain": guessed,
        "preemptions": engine.num_preemptions,
        "sessions": len(sessions),
        "turns": turns,
        "kv_cache_tokens": engine.config.kv_cache_tokens,
    }


def _sessions(groups: int, samples: int) -> list[_Session]:
    rules = random.Random(0)
    system = [rules.randrange(_VOCABULARY) for _ in range(150)]
    sessions: list[_Session] = []
    for group in range(groups):
        task = [rules.randrange(_VOCABULARY) for _ in range(rules.randint(20, 60))]
        sessions += [_Session([*system, *task], random.Random(100 * group + sample)) for sample in range(samples)]
    return sessions


def _go_on(session: _Session, clock: int) -> None:
    """A tool answers, sooner or later."""
    chance = session.random
    result = [chance.randrange(_VOCABULARY) for _ in range(chance.randint(10, 60))]
    session.tokens = [*session.tokens, *session.drawn, *result]
    session.drawn, session.turns = [], session.turns + 1
    session.due = clock + 1 + min(200, int(chance.paretovariate(1.1)))


def _prefixes(tokens: list[int]) -> set[int]:
    """Each token with all before it, as one number (64 bits, chained)."""
    found, chain = set(), 0
    for token in tokens:
        chain = hash((chain, token))
        found.add(chain)
    return found


def _make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
