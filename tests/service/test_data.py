"""``evergrad data check`` and ``evergrad train`` as a user meets them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from evergrad.service.cli import command

EXAMPLES = Path(__file__).parents[2] / "examples" / "train"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("chat", "preferences"):
        shutil.copy(EXAMPLES / f"{name}.jsonl", tmp_path)
    return tmp_path


def test_a_sound_file_shows_lengths_share_and_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["data", "check", "chat.jsonl", "--model", "tiny"]) == 0
    out = capsys.readouterr().out
    for words in ("40, all sound", "1,095 (30.3%) are trained", "length in tokens", "█", "line 1, what"):
        assert words in out
    assert "<|im_start|>assistant\n⟦" in out
    assert "<|im_end|>⟧\n" in out
    assert "\x1b" not in out


def test_without_a_model_the_text_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["data", "check", "preferences.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "length in characters" in out
    assert "--model NAME" in out


def test_both_answers_of_a_pair_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["data", "check", "preferences.jsonl", "--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert out.count("⟦") == 2 + out.count("between ⟦")
    assert "preferred:" in out


def test_problems_stand_one_a_line_with_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistent", "content": "b"}]}] * 25
    Path("bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command(["data", "check", "bad.jsonl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    told = "bad.jsonl:1: messages[1].role: no role of a message, got 'assistent'. Next: did you mean 'assistant'?"
    assert lines[0] == told
    assert len(lines) == 21
    assert lines[-1] == "25 problems in 25 rows, of which the first 20 are shown"


def test_what_in_a_file_would_steer_a_terminal_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil.jsonl").write_text(json.dumps({"text": "\x1b[31mred [bold]x[/bold]"}) + "\n")
    assert command(["data", "check", "evil.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[31mred [bold]x[/bold]" in out


def test_long_rows_are_named_or_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "check", "chat.jsonl", "--model", "tiny", "--max-tokens", "95"]
    assert command(words) == 1
    assert "chat.jsonl:3: " in capsys.readouterr().out
    assert command([*words, "--overlong", "drop"]) == 0
    assert "over-long: lines 3, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data", "check", "none.jsonl"], "data file not found"),
        (["data", "check", "chat.jsonl", "--format", "chatt"], "did you mean 'chat'?"),
        (["data", "check", "chat.jsonl", "--model", "tinny"], "did you mean 'tiny'?"),
        (["data", "chekc", "chat.jsonl"], "did you mean 'check'?"),
        (["train", "none.toml"], "configuration file not found"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(words) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_training_in_an_environment_is_one_cycle_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, list[str], Path | None]] = []

    def run_loop(config: Path, overrides: list[str], run_dir: Path | None) -> Path:
        asked.append((config, overrides, run_dir))
        return Path("runs/x")

    monkeypatch.setattr("evergrad.loop.run_loop", run_loop)
    demo = EXAMPLES.parent / "demo.toml"
    assert command(["train", str(demo), "--set", "seed=7", "--run-dir", "runs/x"]) == 0
    assert command(["run", str(demo), "--once", "--set", "seed=7", "--run-dir", "runs/x"]) == 0
    assert asked[0] == asked[1]
    assert asked[0][1] == ["seed=7", "budget.cycles=1", "watch.requests=0", "traffic.changes=[]"]


def test_what_a_training_learns_from_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path("mine.toml")
    config.write_text('method = "grpo"\n[data]\nfile = "chat.jsonl"\n')
    assert command(["train", str(config)]) == 2
    assert "give the tables [environment] and [learn]" in capsys.readouterr().err
