"""A model whose next token depends visibly on every position, a tokenizer with a chat template, and engines over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evergrad.inference import EngineConfig
from evergrad.inference.engine import Engine, Event, Request
from evergrad.types import FinishReason, PolicySpan, Sampling

VOCABULARY = 300
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path, seed: int, **changes: Any) -> Path:
    """A Llama folder with weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    # One token per byte, so that a token is often part of a character only.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>", unk_token=None
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIALS})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "small", seed=0)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return make_model(tmp_path_factory.mktemp("model") / "other", seed=1)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> LlamaForCausalLM:
    return load_reference(model_folder)


def load_reference(folder: Path) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def reference_logprobs(
    model: LlamaForCausalLM, prompt: Sequence[int], drawn: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """[len(drawn), V] of transformers' own forward over the whole sequence."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def worst_error(
    model: LlamaForCausalLM, prompt: Sequence[int], done: Done, temperature: float = 1.0, start: int = 0, end: int | None = None
) -> float:
    """Largest difference between the engine's logprobs of tokens [start, end) and transformers'."""
    expected = reference_logprobs(model, prompt, done.token_ids, temperature)
    picked = expected[range(len(done.token_ids)), done.token_ids]
    return float((torch.tensor(done.logprobs, dtype=torch.float64) - picked)[start:end].abs().max())


@dataclass
class Done:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    spans: tuple[PolicySpan, ...] = ()
    cached_tokens: int = 0
    error: str | None = None


Results = dict[tuple[str, int], Done]


def gather(events: Sequence[Event], into: Results) -> None:
    for event in events:
        done = into.setdefault((event.request_id, event.index), Done())
        assert done.finish_reason is None, "an event after the last one"
        if event.token_id is not None:
            done.token_ids.append(event.token_id)
            done.logprobs.append(event.logprob)
        if event.finish_reason is not None:
            done.finish_reason, done.spans, done.error = event.finish_reason, event.policy_spans, event.error
            done.cached_tokens = event.cached_tokens


def finish(engine: Engine, into: Results | None = None) -> Results:
    """Steps until nothing is left to do."""
    results: Results = {} if into is None else into
    while engine.has_work:
        gather(engine.step(), results)
    return results


def ask(engine: Engine, prompt: Sequence[int], sampling: Sampling, n: int = 1, name: str = "one") -> list[Done]:
    engine.submit(Request(name, tuple(prompt), sampling, n=n))
    results = finish(engine)
    return [results[name, index] for index in range(n)]


@pytest.fixture
def make_engine(model_folder: Path) -> Callable[..., Engine]:
    def make(**changes: Any) -> Engine:
        settings = {"model": str(model_folder), "device": "cpu", "kv_cache_tokens": 4096, "block_size": 8}
        return Engine(EngineConfig(**{**settings, **changes}))

    return make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    assert not engine.has_work


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 259, (length,), generator=generator).tolist())
