"""A run that rolls out with another engine: what its configuration may ask for, and a whole one on a real vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from evergrad.config import ConfigError, parse_config
from evergrad.loop.config import RunConfig
from evergrad.registry import base_model
from evergrad.registry.tiny import make_tiny
from tests.loop.conftest import TWO_CYCLES, Start, finish
from tests.loop.test_methods import learned_steps

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
        ({"engine": {"quantization": "int4"}}, "'int8'"),
        ({"engine": {"backend": "vllm", "quantization": "int8"}}, "house's own engine"),
    ],
)
def test_what_an_engine_cannot_take_is_refused_before_anything_starts(tables: dict[str, Any], told: str) -> None:
    whole = {"environment": {"name": "support_desk"}, "transfer": {"adapter_only": True}, **tables}
    with pytest.raises(ConfigError, match=told):
        parse_config(RunConfig, whole, where="a.toml", folder=Path.cwd())


def test_merged_weights_of_any_adapter_are_taken() -> None:
    tables = {"engine": {"backend": "vllm"}, "trainer": {"lora": {"dora": True, "rank": 600}}}
    assert parse_config(RunConfig, {"environment": {"name": "support_desk"}, **tables}, where="a.toml").engine.starts_server


UNCORRECTED: dict[str, Any] = {"name": "ppo", "options": {"anchor": "proximal"}}
CORRECTED: dict[str, Any] = {"name": "ppo", "options": {"anchor": "proximal", "correction": {"cap": 2.0}}}


@pytest.mark.parametrize("stage", ["learn", "adapt"])
def test_a_quantized_policy_is_not_trained_on_without_a_correction(stage: str) -> None:
    def parsed(loss: dict[str, Any], **further: Any) -> RunConfig:
        tables = {"environment": {"name": "support_desk"}, stage: {"rl": {"loss": loss, **further}}}
        return parse_config(RunConfig, {**tables, "engine": {"quantization": "int8"}}, where="a.toml")

    with pytest.raises(ConfigError, match=r"loss 'ppo'.*does not correct.*policy_gradient.*anchor = 'behaviour'"):
        parsed(UNCORRECTED)
    for sound in (CORRECTED, {"name": "ppo"}, {"name": "policy_gradient"}):
        assert parsed(sound).engine.quantization == "int8"
    # Where nothing is sampled to be trained on, nothing has to be corrected.
    assert parsed(UNCORRECTED, steps=0).engine.quantization == "int8"


def test_what_is_rolled_out_is_quantized_and_nothing_else(tiny_config: Path, tmp_path: Path, start: Start) -> None:
    """Each update is proved against the trainer to a thousandth of a nat, or the run would end."""
    tiny_config.write_text(f'{tiny_config.read_text()}\n[engine]\nquantization = "int8"\n')
    run = tmp_path / "run"
    finish(start("run", str(tiny_config), "--run-dir", str(run)))
    steps = learned_steps(run)
    assert len(steps) == 3
    for step in steps:
        # With an exact engine the divergence is below 1e-6, and no ratio is a thousandth off.
        assert 1e-6 < step["mismatch_kl"] < 0.05
        assert 1e-3 < step["ratio_max_error"] < 2
    assert "mismatch KL" in (run / "report.html").read_text()
    assert worst_gap(run, "step-000000", run / "versions" / "t-c1-sft") > 1e-3
    for rolled, folder in (("base-model", base_model("tiny")), ("eval-t-c1-rl--letters@v1", run / "versions" / "t-c1-rl")):
        assert worst_gap(run, rolled, folder) < 1e-3


# Two whole runs: `make test-slow`.
@pytest.mark.slow
def test_it_learns_as_much_from_what_int8_rolls_out(tmp_path: Path, start: Start) -> None:
    after = {}
    for name in ("float32", "int8"):
        config, run = tmp_path / f"{name}.toml", tmp_path / name
        config.write_text(TWO_CYCLES + ('\n[engine]\nquantization = "int8"\n' if name == "int8" else ""))
        finish(start("run", str(config), "--run-dir", str(run), "--set", "budget.cycles=1"))
        (cycle,) = json.loads((run / "report.json").read_text())["cycles"]
        assert cycle["verdict"] == "promoted"
        after[name] = cycle["score_after"]
    assert after["int8"] == pytest.approx(after["float32"], abs=0.1)


def worst_gap(run: Path, rolled: str, folder: Path) -> float:
    """Largest difference between the log-probabilities of recorded rollouts and those of the model in ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for line in (run / "rollouts" / f"{rolled}.jsonl").read_text().splitlines():
        for turn in json.loads(line)["turns"]:
            prompt, completion = turn["prompt_token_ids"], turn["completion"]
            tokens = completion["token_ids"]
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1)[range(len(tokens)), tokens]
            worst = max(worst, float((torch.tensor(completion["logprobs"]) - expected).abs().max()))
    return worst


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
