"""A run whose weights travel is the run whose weights do not: the same rollouts, the same updates, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from evergrad.config import ConfigError, parse_config
from evergrad.loop.config import RunConfig
from tests.loop.conftest import Start, finish
from tests.loop.test_methods import learned_steps
from tests.loop.test_resume import weights_hash

TCP = '[transfer]\ntransport = "tcp"\ncodec = "sparse"\n'
ADAPTER = '[transfer]\ntransport = "files"\nurl = "FOLDER"\nadapter_only = true\n'


def run(config: Path, run_dir: Path, start: Start, addition: str) -> list[dict[str, float]]:
    path = run_dir.with_suffix(".toml")
    path.write_text(config.read_text().replace("steps = 3", "steps = 2") + addition)
    finish(start("run", str(path), "--run-dir", str(run_dir)))
    return learned_steps(run_dir)


@pytest.mark.slow
def test_a_run_over_tcp_ends_in_the_same_bits(tiny_config: Path, tmp_path: Path, start: Start) -> None:
    mapped = run(tiny_config, tmp_path / "mapped", start, "")
    travelled = run(tiny_config, tmp_path / "travelled", start, TCP)
    assert weights_hash(tmp_path / "mapped") == weights_hash(tmp_path / "travelled")
    for one, other in zip(mapped, travelled, strict=True):
        assert one["reward"] == other["reward"]
        assert 0 < other["sync_bytes"] <= 1.01 * one["sync_bytes"]
        assert min(one["sync_gb_per_s"], other["sync_gb_per_s"], one["sync_link_share"], other["sync_link_share"]) > 0


@pytest.mark.slow
def test_a_run_that_moves_its_adapter_alone_is_proved_after_each_update(
    tiny_config: Path, tmp_path: Path, start: Start
) -> None:
    tiny_config.write_text(tiny_config.read_text().replace('method = "full"', 'method = "lora"'))
    steps = run(tiny_config, tmp_path / "adapter", start, ADAPTER.replace("FOLDER", str(tmp_path / "weights")))
    # The warm start moved the weights; the proofs after it and after each step stop a run that serves others.
    assert len(steps) == 2
    assert all(0 < step["sync_bytes"] < 1e6 for step in steps)
    assert list((tmp_path / "weights").glob("*.json"))


@pytest.mark.parametrize(
    ("transfer", "told"),
    [
        ({"codec": "sparse"}, "needs transport"),
        ({"transport": "tcp", "codec": "bfloat16"}, "use 'identity' or 'sparse'"),
        ({"transport": "tcp", "codec": "sparce"}, "did you mean 'sparse'"),
        ({"transport": "files"}, "needs one"),
        ({"transport": "tcp", "url": "/x"}, "url goes with"),
        ({"transport": "pigeon"}, "transport"),
        ({"hots": "a"}, "host"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(transfer: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_config(RunConfig, {"environment": {"name": "support_desk"}, "transfer": transfer}, where="here")


def test_an_adapter_that_is_not_trained_cannot_be_moved() -> None:
    data = {"environment": {"name": "support_desk"}, "transfer": {"adapter_only": True}, "trainer": {"method": "full"}}
    with pytest.raises(ConfigError, match="none is trained"):
        parse_config(RunConfig, data, where="here")
