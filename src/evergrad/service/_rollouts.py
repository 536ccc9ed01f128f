"""``evergrad rollouts show``: what the model was shown, what it sampled, and what that was worth.

Everything that a model or a tool wrote is printed with its control characters escaped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from evergrad.config import nearest
from evergrad.rollouts import read_rollouts
from evergrad.service._edge import printable
from evergrad.service._runs import rollout_files, run_config
from evergrad.service._screen import cell, console, print_json
from evergrad.types import InputError, Outcome

SOURCES = ("train", "eval", "live")
"""What a run keeps; demonstrations are played, checked and trained on, and not written."""
_ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "bold", "tool": "magenta"}
_OUTCOME_STYLES = {Outcome.SCORED: "green", Outcome.POLICY_FAULT: "yellow"}
_SHADES = ((-0.05, ""), (-0.5, "on grey23"), (-1.5, "on dark_goldenrod"), (-3.0, "on dark_orange3"), (float("-inf"), "on red3"))
"""A sampled token is shaded by the first bound that its log-probability reaches."""

Record = dict[str, Any]


def show_rollouts(
    run: Path,
    rollout_id: str | None,
    *,
    last: int,
    source: str | None = None,
    outcome: str | None = None,
    tokens: bool = False,
    as_json: bool = False,
) -> None:
    """Prints one rollout, or the last ones that fit, oldest first.

    Raises:
        InputError: no rollout of that id (names the nearest), no such source or outcome, or none yet.
    """
    _require(source, SOURCES, "source")
    _require(outcome, [each.value for each in Outcome], "outcome")
    if rollout_id is not None:
        records = [_find(run, rollout_id)]
    else:
        records = list(_last(run, last, lambda record: _fits(record, source, outcome)))
    if as_json:
        print_json(records)
        return
    pieces = _tokenizer(run) if tokens else None
    screen = console()
    for record in records:
        _print_rollout(screen, record, pieces)
    if tokens:
        _print_legend(screen)


def _last(run: Path, number: int, fits: Callable[[Record], bool]) -> Iterator[Record]:
    found: deque[Record] = deque()
    for path in reversed(rollout_files(run)):
        for record in reversed(list(read_rollouts(path))):
            if len(found) < number and fits(record):
                found.appendleft(record)
        if len(found) == number:
            break
    if not found:
        raise InputError("no rollout fits", where=str(run / "rollouts"), hint="wait for the first ones, or ask for others")
    yield from found


def _find(run: Path, rollout_id: str) -> Record:
    known: deque[str] = deque(maxlen=10_000)
    for path in reversed(rollout_files(run)):
        for record in read_rollouts(path):
            if record["rollout_id"] == rollout_id:
                return record
            known.append(record["rollout_id"])
    close = nearest(rollout_id, known)
    hint = close if "did you mean" in close else "'evergrad rollouts show' without an id shows the last ones"
    raise InputError(f"no rollout '{rollout_id}'", where=str(run / "rollouts"), hint=hint)


def _fits(record: Record, source: str | None, outcome: str | None) -> bool:
    return source in (None, record["source"]) and outcome in (None, record["outcome"])


def _require(value: str | None, valid: Sequence[str], what: str) -> None:
    if value is not None and value not in valid:
        raise InputError(f"unknown {what} '{value}'", hint=nearest(value, valid))


def _print_rollout(screen: Console, record: Record, pieces: Callable[[int], str] | None) -> None:
    reward = record["reward"]
    head = Text.assemble(
        cell(record["rollout_id"], "bold"),
        "  ",
        cell(record["outcome"], _OUTCOME_STYLES.get(record["outcome"], "red")),
        cell("" if reward is None else f"  reward {reward:g}" if isinstance(reward, (int, float)) else f"  reward {reward}"),
        cell(f"  {record['source']}  {record['task_id']}  {record.get('slice') or ''}", "dim"),
    )
    screen.print(head)
    for turn in record["turns"]:
        _print_turn(screen, turn, pieces)
    if record.get("fault"):
        screen.print(cell(f"fault: {record['fault']}", "red"))
    parts = record.get("reward_parts") or {}
    if len(parts) > 1:
        screen.print(cell("reward parts: " + ", ".join(f"{name} {value}" for name, value in parts.items()), "dim"))
    usage = record.get("usage") or {}
    screen.print(
        cell(
            f"{usage.get('prompt_tokens', 0)} prompt tokens ({usage.get('cached_tokens', 0)} reused), "
            f"{usage.get('completion_tokens', 0)} sampled at temperature {record.get('temperature')}\n",
            "dim",
        )
    )


def _print_turn(screen: Console, turn: Record, pieces: Callable[[int], str] | None) -> None:
    completion = turn["completion"]
    for message in turn["messages"]:
        style = _ROLE_STYLES.get(message["role"], "")
        sampled = message["role"] == "assistant"
        text = _shaded(completion, pieces) if sampled and pieces else cell(message["content"], style)
        screen.print(Text.assemble(cell(f"{message['role']:>9}  ", f"{style} dim"), text))
    versions = sorted({span["policy_version"] for span in completion["policy_spans"]})
    counts = f"{len(turn['prompt_token_ids'])} + {len(completion['token_ids'])} tokens, {completion['finish_reason']}"
    earned = "" if turn.get("reward") is None else f", turn reward {turn['reward']:g}"
    screen.print(cell(f"{'':>11}{counts}, policy version {', '.join(map(str, versions))}{earned}", "dim"))


def _shaded(completion: Record, pieces: Callable[[int], str]) -> Text:
    """The sampled tokens one by one, exactly as they were trained on; a thin bar stands between them."""
    text = Text()
    for token_id, logprob in zip(completion["token_ids"], completion["logprobs"], strict=True):
        value = float(logprob)
        shade = next((style for bound, style in _SHADES if value >= bound), _SHADES[-1][1])
        text.append(printable(pieces(token_id)), style=shade)
        text.append("│", style="dim")
    return text


def _print_legend(screen: Console) -> None:
    legend = Text("log-probability of the sampled token at least: ", style="dim")
    for bound, style in _SHADES:
        legend.append(f" {bound:g} " if bound != float("-inf") else " less ", style=style)
    screen.print(legend)


def _tokenizer(run: Path) -> Callable[[int], str]:
    """From a token id to its text, by the tokenizer of the run's base model."""
    from tokenizers import Tokenizer

    from evergrad.registry import base_model

    tokenizer = Tokenizer.from_file(str(base_model(run_config(run)["model"]) / "tokenizer.json"))
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))
