"""A run folder with the files that a run leaves, made by the rooms that write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from evergrad.registry import Registry
from evergrad.rollouts import RolloutWriter
from evergrad.types import (
    Completion,
    FinishReason,
    Message,
    ModelVersion,
    Outcome,
    PolicySpan,
    Rollout,
    Turn,
    Usage,
    Verdict,
)

EVIL = "\x1b]0;owned\x07[bold]not bold[/bold] \x1b[31mred \u202ebackwards"


def make_rollout(
    number: int, *, text: str = "Refunded 30.", outcome: Outcome = Outcome.SCORED, source: str = "train"
) -> Rollout:
    done = Completion((5, 9, 2), (-0.1, -0.7, -4.0), FinishReason.STOP, (PolicySpan(4, 0, 3),))
    said = (Message("user", "Please refund order 50F."), Message("assistant", text))
    reward = 1.0 if outcome is Outcome.SCORED else None
    return Rollout(
        f"r-{number}", f"g-{number // 4}", "colors/ab12", (Turn(said, (1, 2, 3), done),), outcome, reward, {"reward": 1.0},
        Usage(40, 32, 9, 0.5), source, slice="easy", fault="" if reward else "ConnectionError: gone",
    )  # fmt: skip


def make_version(name: str, parent: str | None, number: int) -> ModelVersion:
    return ModelVersion(
        name, parent, number, f"versions/{name}", "tiny", "ab12", "2026-01-01T00:00:00+00:00", {"cycle": number}
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``runs/demo`` under the current folder: two versions, the second promoted, and rollouts of every kind."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/demo")
    with Registry(folder / "registry.sqlite") as registry:
        registry.register(make_version("demo-c1-sft", None, 1))
        registry.register(make_version("demo-c1-rl", "demo-c1-sft", 12))
        registry.promote("production", "demo-c1-sft", bootstrap=True)
        verdict = Verdict(True, ("46 wins, 1 loss of 96 pairs",), {"p_value": 1e-12}, "demo-c1-rl", "demo-c1-sft")
        registry.promote("production", "demo-c1-rl", verdict)
    (folder / "config.toml").write_text('name = "demo"\nmodel = "tiny"\n\n[environment]\nname = "support_desk"\n')
    writer = RolloutWriter(folder / "rollouts")
    for number in range(4):
        writer.write(0, make_rollout(number))
    writer.complete(0)
    writer.write(1, make_rollout(4, text=EVIL, source="live"))
    writer.write(1, make_rollout(5, outcome=Outcome.ENVIRONMENT_FAULT))
    writer.close()
    return folder
