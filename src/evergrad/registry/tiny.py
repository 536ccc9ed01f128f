"""The ``tiny`` model: Llama-shaped, 455 thousand parameters, made from nothing but this file and a seed.

For tests, long loops and measurements of overhead. It has a byte-level BPE tokenizer of 512 entries that never meets an
unknown character, splits numbers into digits, and speaks ChatML.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TINY_RECIPE = 1
"""Raised whenever the model that the recipe makes changes; part of the cache folder's name."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tiny(
    folder: Path,
    seed: int = 0,
    *,
    vocab_size: int = 512,
    hidden_size: int = 96,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    max_position_embeddings: int = 2048,
) -> Path:
    """Writes a tiny model with tokenizer and chat template to ``folder`` and returns it.

    The same arguments give the same bytes. Grouped-query attention and tied embeddings, as in the models it stands for.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(vocab_size)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers inside; afterwards as before."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_text(), trainer)
    if core.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the recipe's text gives {core.get_vocab_size()} entries, not {vocab_size}; ask for at most that many"
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _text() -> Iterator[str]:
    """A few hundred lines in the manner of the tasks: requests, tool calls, tool answers, sums and colours."""
    verbs = ["refund", "cancel", "find", "order", "status", "payback", "lookup", "answer"]
    things = ["red", "green", "blue", "yellow", "black", "white", "cup", "lamp", "shoes", "book", "chair", "ring"]
    months = ["January", "March", "May", "June", "July", "August", "October", "December"]
    greetings = ["Hello", "Good morning", "Dear support", "Excuse me"]
    roles = ["system", "user", "assistant", "tool"]
    for index, (verb, thing, month) in enumerate(itertools.product(verbs, things, months)):
        number = index * 7919 % 97
        yield f"Please {verb} the {thing} of order K{number}. What is the status, and when does it arrive?"
        yield f"{verb}(id=K{number}, amount={index % 83}, code={index % 9})"
        yield f"error: try {verb}(id=K{number}); window open until {month} {number % 28 + 1}, paid {index % 61}, delivered"
        yield f"Sorry, closed since {month} {number % 28 + 1}. Refunded, ref {number}. It arrives {month} {index % 28 + 1}."
        yield f"The colour is {thing}. Call a tool or answer: yes, no, {thing}. {number} + {index % 50} = {number + index % 50}"
        greeting = greetings[index % len(greetings)]
        yield f"{greeting}, could you {verb} my {thing}? Thank you, I will wait for your answer until {month}."
        yield roles[index % len(roles)] + "\nTools:\n"
