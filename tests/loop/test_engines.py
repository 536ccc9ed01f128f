"""A run that rolls out with another engine: what its configuration may ask for, and a whole one on a real vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from evergrad.config import ConfigError, parse_config
from evergrad.loop.config import RunConfig
from evergrad.registry.tiny import make_tiny
from tests.loop.conftest import Start
from tests.loop.test_methods import learned_steps
from tests.loop.test_resume import finish

COMMAND = os.environ.get("EVERGRAD_VLLM", "")


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"engine": {"backend": "vlm"}}, "'evergrad', 'vllm' or 'sglang'"),
        ({"engine": {"backnd": "vllm"}}, "did you mean 'backend'"),
        ({"engine": {"backend": "vllm", "command": "./nowhere/vllm"}}, "not found"),
        ({"engine": {"backend": "vllm", "url": "http://a:1"}, "placement": {"replicas": 2}}, "one server"),
        ({"engine": {"backend": "vllm"}, "trainer": {"lora": {"dora": True}}}, "no DoRA"),
        ({"engine": {"backend": "vllm"}, "trainer": {"lora": {"rank": 600}}}, "up to rank 512"),
        ({"engine": {"backend": "sglang", "url": "http://a:1"}, "trainer": {"lora": {"rslora": True}}}, "rslora = false"),
    ],
)
def test_what_an_engine_cannot_take_is_refused_before_anything_starts(tables: dict[str, Any], told: str) -> None:
    whole = {"environment": {"name": "support_desk"}, "transfer": {"adapter_only": True}, **tables}
    with pytest.raises(ConfigError, match=told):
        parse_config(RunConfig, whole, where="a.toml", folder=Path.cwd())


def test_merged_weights_of_any_adapter_are_taken() -> None:
    tables = {"engine": {"backend": "vllm"}, "trainer": {"lora": {"dora": True, "rank": 600}}}
    assert parse_config(RunConfig, {"environment": {"name": "support_desk"}, **tables}, where="a.toml").engine.starts_server


@pytest.mark.vllm
@pytest.mark.skipif(not COMMAND, reason="EVERGRAD_VLLM names no vllm program; make test-vllm does")
@pytest.mark.parametrize("adapter_only", [False, True])
def test_a_whole_run_rolls_out_with_vllm(tiny_config: Path, tmp_path: Path, start: Start, adapter_only: bool) -> None:
    """Warm start, RL, the gate, serving and watching; each update is proved against the trainer, or the run would end."""
    model = make_tiny(tmp_path / "small", hidden_size=128)
    text = tiny_config.read_text().replace('model = "tiny"', f'model = "{model}"').replace("steps = 3", "steps = 2")
    text += f'\n[engine]\nbackend = "vllm"\ncommand = "{COMMAND}"\narguments = ["--enforce-eager", "--max-model-len", "1024"]\n'
    if adapter_only:
        text = text.replace('method = "full"', 'method = "lora"') + "\n[transfer]\nadapter_only = true\n"
    tiny_config.write_text(text)
    finish(start("run", str(tiny_config), "--run-dir", str(tmp_path / "run")))
    steps = learned_steps(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["lockstep_misses"] == 16
        assert step["staleness_mean"] == 0
        assert step["sampled_tokens"] > 0
        assert (step["pause_s"] == 0) == adapter_only
    log = (tmp_path / "run" / "logs" / "engine.log").read_text()
    assert "vLLM" in log or "vllm" in log
    assert not any((tmp_path / "run" / "scratch").glob("version-*"))
