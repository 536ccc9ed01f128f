"""Records are readable while they are written, whole when they carry their name, and strict JSON whatever they hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evergrad.rollouts import RolloutWriter, read_rollouts, rollout_json, step_name
from evergrad.types import Completion, EvergradError, FinishReason, Message, Outcome, PolicySpan, Rollout, Turn

COMPLETION = Completion((5, 6), (-0.25, -0.5), FinishReason.STOP, (PolicySpan(3, 0, 2),))
ROLLOUT = Rollout(
    "g/0", "g", "t", (Turn((Message("user", "hé\n"), Message("assistant", "x")), (1,), COMPLETION, 0.25),), Outcome.SCORED, 1.0
)


def strictly(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not strict JSON: {constant}")

    return json.loads(line, parse_constant=refuse)


def test_a_step_is_readable_while_it_runs_and_renamed_when_complete(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / "rollouts")
    partial = tmp_path / "rollouts" / (step_name(3) + ".partial")
    for index in range(3):
        writer.write(3, replace(ROLLOUT, rollout_id=f"g/{index}"))
        assert [each["rollout_id"] for each in read_rollouts(partial)] == [f"g/{i}" for i in range(index + 1)]
    final = writer.complete(3)
    assert not partial.exists()
    assert final.name == "step-000003.jsonl"
    (record, *rest) = read_rollouts(final)
    assert len(rest) == 2
    assert record["turns"][0]["completion"]["token_ids"] == [5, 6]
    assert record["turns"][0]["messages"][0]["content"] == "hé\n"
    assert record["turns"][0]["reward"] == 0.25
    assert (record["outcome"], record["reward"], record["success"]) == ("scored", 1.0, True)


def test_a_line_that_is_being_written_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl.partial"
    path.write_text(rollout_json(ROLLOUT) + "\n" + rollout_json(ROLLOUT)[:40])
    assert len(list(read_rollouts(path))) == 1
    path.write_text(f"{rollout_json(ROLLOUT)}\n{{broken\n{rollout_json(ROLLOUT)}\n")
    with pytest.raises(EvergradError, match=r":2"):
        list(read_rollouts(path))
    with pytest.raises(EvergradError, match="no such"):
        list(read_rollouts(tmp_path / "none"))


def test_an_interrupted_step_is_begun_anew_and_a_repeated_one_replaced(tmp_path: Path) -> None:
    interrupted = RolloutWriter(tmp_path)
    interrupted.write(0, replace(ROLLOUT, rollout_id="old"))
    interrupted.close()
    again = RolloutWriter(tmp_path)
    again.write(0, replace(ROLLOUT, rollout_id="new"))
    assert [each["rollout_id"] for each in read_rollouts(again.complete(0))] == ["new"]
    again.write(0, replace(ROLLOUT, rollout_id="newer"))
    assert [each["rollout_id"] for each in read_rollouts(again.complete(0))] == ["newer"]
    assert list(read_rollouts(again.complete(1))) == []


@pytest.mark.parametrize("line", ["[]", "7", "null", "{}", '{"rollout_id": "r"}', "{", "[" * 100_000])
def test_a_line_that_is_no_rollout_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "step-000000.jsonl"
    path.write_text(f"{rollout_json(ROLLOUT)}\n{line}\n")
    with pytest.raises(EvergradError, match=r"not a rollout: .*step-000000\.jsonl:2.*Next: "):
        list(read_rollouts(path))


def test_what_came_too_late_for_a_batch_is_discarded(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    writer.write(0, ROLLOUT)
    writer.complete(0)
    writer.write(1, ROLLOUT)
    (tmp_path / "step-000007.jsonl.partial").touch()  # of a process that was killed
    writer.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000.jsonl"]
    writer.write(1, ROLLOUT)
    assert len(list(read_rollouts(writer.complete(1)))) == 1


def test_non_finite_numbers_are_shown_in_strict_json() -> None:
    damaged = replace(COMPLETION, logprobs=(math.nan, -math.inf))
    rollout = replace(
        ROLLOUT, turns=(Turn((), (1,), damaged),), reward=None, outcome=Outcome.VERIFIER_FAULT, reward_parts={"a": math.inf}
    )
    record = strictly(rollout_json(rollout))
    assert record["turns"][0]["completion"]["logprobs"] == ["NaN", "-Infinity"]
    assert record["reward_parts"] == {"a": "Infinity"}
    assert record["reward"] is None
    strictly(rollout_json(replace(ROLLOUT, turns=(Turn((Message("assistant", "\ud800"),), (1,), COMPLETION),))))


def test_a_refusing_disk_is_one_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(EvergradError, match="rollouts cannot be written"):
        RolloutWriter(blocked / "rollouts").write(0, ROLLOUT)
    full = Path("/dev/full")
    if full.exists():
        writer = RolloutWriter(tmp_path)
        (tmp_path / (step_name(0) + ".partial")).symlink_to(full)
        with pytest.raises(EvergradError, match="No space left"):
            writer.write(0, ROLLOUT)
