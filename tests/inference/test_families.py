"""Every family against transformers: prefill, decode, cache hits, preemption, adapters in one batch, a change of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from evergrad.inference import EngineConfig, EngineError
from evergrad.inference._attention import PagedCache
from evergrad.inference._decoder import recognize
from evergrad.inference._rows import Distribution, Row
from evergrad.inference._schedule import Chunk
from evergrad.inference.engine import Engine, Request, RequestError
from evergrad.transfer import TransferError, load_tensors, merged_tensors, save_tensors
from evergrad.types import Sampling
from tests.inference.conftest import VOCABULARY, Results, ask, finish, gather, load_reference, prompt_of, worst_error

TOLERANCE = 1e-4
SPECIALS: dict[str, Any] = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    **SPECIALS,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-untied-bias": LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-untied": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=12),
    "gemma": GemmaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=12, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=12, query_pre_attn_scalar=16),
}

OWN = [family for family in FAMILIES if not family.startswith("gemma")]
"""Those whose layers the engine computes by a definition of its own."""


def make_folder(folder: Path, config: PretrainedConfig, seed: int) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def reference_of(folder: Path) -> Any:
    model = load_reference(folder)
    model.set_attn_implementation("eager")  # the complete one: faster ones leave out a cap on scores
    return model


def make_adapter(
    base: Path, folder: Path, seed: int, targets: tuple[str, ...] = ("q_proj", "down_proj"), **changes: Any
) -> Path:
    settings = {"r": 4, "lora_alpha": 16, "target_modules": list(targets), "task_type": "CAUSAL_LM", **changes}
    torch.manual_seed(seed)
    tuned = get_peft_model(reference_of(base), LoraConfig(**settings))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    tuned.save_pretrained(folder, save_embedding_layers=False)
    return folder


def tuned_reference(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(reference_of(base), adapter).eval()


def make_engine(folder: Path, **changes: Any) -> Engine:
    settings = {"device": "cpu", "kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 24, **changes}
    return Engine(EngineConfig(model=str(folder), **settings))


def answers_are_those_of(engine: Engine, models: dict[str | None, Any], version: int) -> None:
    """One batch in which rows of one prompt have each adapter, or none; then a prompt that goes on from each answer."""
    prompt, results = prompt_of(50), Results()
    for name in models:
        for index in range(2):
            sampling = Sampling(temperature=0.8, max_tokens=12, seed=index)
            engine.submit(Request(f"{name}-{index}", prompt, sampling, n=2, adapter=name))
    finish(engine, results)
    assert len({tuple(results[f"{name}-0", 0].token_ids) for name in models}) == len(models)
    for name, model in models.items():
        for index in range(2):
            for sample in range(2):
                done = results[f"{name}-{index}", sample]
                assert done.spans[0].policy_version == version
                assert worst_error(model, prompt, done, 0.8) < TOLERANCE
        longer = (*prompt, *results[f"{name}-0", 0].token_ids, 7, 8, 9)
        engine.submit(Request(f"{name}-next", longer, Sampling(max_tokens=5, seed=1), adapter=name))
        done = finish(engine)[f"{name}-next", 0]
        assert done.cached_tokens >= len(longer) - 4
        assert worst_error(model, longer, done) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    base, other = (make_folder(tmp_path / str(seed), FAMILIES[family], seed) for seed in (0, 1))
    first = make_adapter(base, tmp_path / "first", 2)
    second = make_adapter(base, tmp_path / "second", 3, ("k_proj", "up_proj", "o_proj"), r=2, use_rslora=True)
    engine = make_engine(base)
    assert engine.notice is None
    assert (engine.model.decoder is not None) == (family in OWN)
    engine.add_adapter(engine.read_adapter("first", first))
    engine.add_adapter(engine.read_adapter("second", second))
    before = {None: reference_of(base), "first": tuned_reference(base, first), "second": tuned_reference(base, second)}
    answers_are_those_of(engine, before, version=0)
    engine.stage_weights(load_tensors(other), whole=True)
    engine.commit(1)
    # Adapters stay; they are added to what is live now.
    after = {None: reference_of(other), "first": tuned_reference(other, first), "second": tuned_reference(other, second)}
    answers_are_those_of(engine, after, version=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_keeps_every_token(tmp_path: Path, family: str) -> None:
    base = make_folder(tmp_path / "base", FAMILIES[family], 0)
    adapter = make_adapter(base, tmp_path / "adapter", 2)
    engine = make_engine(base, kv_cache_tokens=128, max_model_len=80)
    engine.add_adapter(engine.read_adapter("a", adapter))
    models = {None: reference_of(base), "a": tuned_reference(base, adapter)}
    for index in range(6):
        sampling = Sampling(temperature=0.8, max_tokens=25, seed=index)
        engine.submit(Request(str(index), prompt_of(20, seed=index // 2), sampling, adapter="a" if index % 2 else None))
    results = finish(engine)
    assert engine.num_preemptions > 0
    for index in range(6):
        done = results[str(index), 0]
        assert len(done.token_ids) == 25
        assert worst_error(models["a" if index % 2 else None], prompt_of(20, seed=index // 2), done, 0.8) < TOLERANCE


@pytest.mark.parametrize("family", OWN)
def test_the_own_definition_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    """Logits of pieces of several prompts in one step, whichever of them are wanted, with and without an adapter."""
    engine = make_engine(make_folder(tmp_path / "base", FAMILIES[family], 0))
    adapter = engine.read_adapter("a", make_adapter(tmp_path / "base", tmp_path / "a", 2))
    engine.add_adapter(adapter)
    model, own = engine.model, engine.model.decoder
    chunks = []
    for index, (start, end) in enumerate([(0, 9), (0, 1), (7, 20)]):
        row = Row(list(prompt_of(30, seed=index)), 30, Distribution(1.0, 1.0, 0), [], (0, "", 0, 0), adapter if index else None)
        row.add_blocks(list(range(4 * index, 4 * index + 4)), 8)
        if start:
            model.forward([Chunk(row, 0, start)], [])
        chunks.append(Chunk(row, start, end))
    for wanted in ([], [8], [0, 9, 21, 22], list(range(23))):
        model.decoder = own
        found = model.forward(chunks, wanted)
        model.decoder = None
        expected = model.forward(chunks, wanted)
        assert found.shape == expected.shape == (len(wanted), VOCABULARY)
        assert torch.allclose(found, expected, atol=TOLERANCE)


def test_what_is_not_known_to_be_of_the_family_is_left_to_its_own_definition(tmp_path: Path) -> None:
    class Derived(LlamaForCausalLM):
        """May compute anything."""

    cache = PagedCache(3, 64, 2, 16, torch.float32, torch.device("cpu"))
    assert recognize(LlamaForCausalLM(LlamaConfig(**SHAPE)), cache) is not None
    assert recognize(Derived(LlamaConfig(**SHAPE)), cache) is None
    assert recognize(LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")), cache) is None
    half = PagedCache(3, 64, 2, 16, torch.bfloat16, torch.device("cpu"))
    assert recognize(LlamaForCausalLM(LlamaConfig(**SHAPE)), half) is None
    engine = make_engine(make_folder(tmp_path / "gelu", LlamaConfig(**SHAPE, hidden_act="gelu"), 0))
    (done,) = ask(engine, prompt_of(20), Sampling(max_tokens=8, seed=1))
    assert worst_error(reference_of(tmp_path / "gelu"), prompt_of(20), done) < TOLERANCE


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "base", FAMILIES["llama-tied"], 0)


def test_an_adapter_of_the_head_counts_where_logits_are_wanted(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, tmp_path / "head", 4, ("lm_head", "v_proj"))
    engine = make_engine(base)
    engine.add_adapter(engine.read_adapter("head", adapter))
    model, prompt = tuned_reference(base, adapter), prompt_of(30)
    engine.submit(Request("with", prompt, Sampling(max_tokens=8, seed=1), adapter="head"))
    engine.submit(Request("without", prompt, Sampling(max_tokens=8, seed=1)))
    results = finish(engine)
    assert worst_error(model, prompt, results["with", 0]) < TOLERANCE
    assert worst_error(reference_of(base), prompt, results["without", 0]) < TOLERANCE
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].double(), -1)[range(29), prompt[1:]]
    assert engine.logprobs(prompt, "head") == pytest.approx(expected.tolist(), abs=TOLERANCE)
    with pytest.raises(TransferError, match=r"also 'model.embed_tokens.weight'"):
        merged_tensors(engine.model.base, adapter)


def test_adapters_come_and_go_while_requests_run(base: Path, tmp_path: Path) -> None:
    folders = [make_adapter(base, tmp_path / str(seed), seed) for seed in (5, 6)]
    models = [tuned_reference(base, folder) for folder in folders]
    engine, prompt, results = make_engine(base), prompt_of(30), Results()
    engine.add_adapter(engine.read_adapter("mine", folders[0]))
    engine.submit(Request("old", prompt, Sampling(max_tokens=20, seed=1), adapter="mine"))
    for _ in range(4):
        gather(engine.step(), results)
    engine.add_adapter(engine.read_adapter("mine", folders[1]))
    engine.submit(Request("new", prompt, Sampling(max_tokens=20, seed=1), adapter="mine"))
    for _ in range(4):
        gather(engine.step(), results)
    engine.drop_adapter("mine")
    with pytest.raises(RequestError, match="no adapter 'mine'"):
        engine.submit(Request("late", prompt, Sampling(), adapter="mine"))
    finish(engine, results)
    for name, model in zip(("old", "new"), models, strict=True):
        assert len(results[name, 0].token_ids) == 20
        assert worst_error(model, prompt, results[name, 0]) < TOLERANCE
    # What was computed under an adapter is found under no other, not even under one that has its name.
    engine.add_adapter(engine.read_adapter("mine", folders[0]))
    engine.submit(Request("again", prompt, Sampling(max_tokens=4, seed=1), adapter="mine"))
    done = finish(engine)["again", 0]
    assert done.cached_tokens == 0
    assert worst_error(models[0], prompt, done) < TOLERANCE
    with pytest.raises(RequestError, match="did you mean 'mine'"):
        engine.drop_adapter("mime")


@pytest.mark.parametrize("fault", ["truncated", "renamed", "shape", "nan", "dora", "missing"])
def test_an_adapter_that_does_not_fit_is_refused(base: Path, tmp_path: Path, fault: str) -> None:
    engine, prompt = make_engine(base), prompt_of(20)
    (before,) = ask(engine, prompt, Sampling(max_tokens=5, seed=1))
    folder = tmp_path / "adapter"
    if fault != "missing":
        make_adapter(base, folder, 7, use_dora=fault == "dora")
        weights = folder / "adapter_model.safetensors"
        tensors = load_tensors(folder)
        name = next(name for name in tensors if "q_proj.lora_A" in name)
        if fault == "truncated":
            weights.write_bytes(weights.read_bytes()[:-50])
        elif fault == "renamed":
            tensors[name.replace("q_proj", "qproj")] = tensors.pop(name)
        elif fault == "shape":
            tensors[name] = tensors[name][:, :-1].contiguous()
        elif fault == "nan":
            tensors[name] = torch.full_like(tensors[name], float("nan"))
        if fault in ("renamed", "shape", "nan"):
            weights.unlink()
            save_tensors(folder, tensors.items())
            (folder / "model.safetensors").rename(weights)
    with pytest.raises((TransferError, EngineError)):
        engine.add_adapter(engine.read_adapter("bad", folder))
    assert engine.adapters == {}
    (after,) = ask(engine, prompt, Sampling(max_tokens=5, seed=1), name="after")
    assert after.token_ids == before.token_ids


OTHERS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=64, n_layer=2, n_head=4, initializer_range=0.15, **SPECIALS
    ),
    "mamba": MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.3, **SPECIALS
    ),
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures_are_computed_by_transformers_and_say_so(tmp_path: Path, architecture: str) -> None:
    folders = [make_folder(tmp_path / str(seed), OTHERS[architecture], seed) for seed in (0, 1)]
    engine = make_engine(folders[0], kv_cache_tokens=256, max_model_len=100)
    assert engine.notice is not None
    assert f"a '{architecture}' is computed by transformers" in engine.notice
    assert "prompts are read again" in engine.notice
    model, other, results = load_reference(folders[0]), load_reference(folders[1]), Results()
    for index in range(5):
        sampling = Sampling(temperature=0.8, max_tokens=20, seed=index)
        engine.submit(Request(str(index), prompt_of(30, seed=index), sampling, n=1 + index % 3))
    finish(engine, results)
    assert engine.num_preemptions > 0
    for (name, _), done in results.items():
        assert len(done.token_ids) == 20
        assert done.cached_tokens in (0, 30)
        assert worst_error(model, prompt_of(30, seed=int(name)), done, 0.8) < TOLERANCE
    engine.stage_weights(load_tensors(folders[1]), whole=True)
    engine.commit(1)
    (done,) = ask(engine, prompt_of(25), Sampling(max_tokens=5, seed=1), name="after")
    assert worst_error(other, prompt_of(25), done) < TOLERANCE
    with pytest.raises(TransferError):
        engine.add_adapter(engine.read_adapter("any", tmp_path))
