"""A small tokenizer with a ChatML template, built in the process, and an environment whose faults can be ordered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from evergrad.envs import Taskset
from evergrad.rollouts import Renderer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "system\nTools:\norder(id)\nrefund(id, amount): if window open\nCall one tool or answer.",
    "user\nPlease refund order F50.\nassistant\norder(id=F50)\ntool\ndelivered, window open until May 15, paid 61",
    "refund(id=F50, amount=61)\ndone, ref 993\nRefunded, ref 993.\nerror: try order(id=F50)",
]

TokenizerMaker = Callable[..., Any]


def build_tokenizer(template: str | None = CHATML, *, bos: bool = False) -> Any:
    """A byte-level BPE of a few hundred tokens; with ``bos`` its ``encode`` adds a start token of its own accord."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        bos_token="<s>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
    )
    wrapped.chat_template = template
    return wrapped


@pytest.fixture(scope="session")
def make_tokenizer() -> TokenizerMaker:
    return build_tokenizer


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(build_tokenizer())


@pytest.fixture(scope="session")
def desk() -> Taskset:
    return Taskset("support_desk")


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Taskset:
    """An environment in which what the model says decides what breaks."""
    path = tmp_path_factory.mktemp("environments") / "troubled.py"
    path.write_text(TROUBLED)
    return Taskset(str(path))


TROUBLED = """
import asyncio, re
from evergrad.envs import Environment, TaskRow, ToolError, reward, tool
from evergrad.types import Limits

class Troubled(Environment):
    limits = Limits(max_turns=3, max_tokens_per_turn=80, max_total_tokens=600, tool_timeout_s=0.2, score_timeout_s=0.2)
    opened = 0
    closed = 0

    @classmethod
    def tasks(cls, rng, config):
        for number in range(1000):
            yield TaskRow(f"Say {number}.", {"number": number})

    async def setup(self):
        type(self).opened += 1

    async def close(self):
        type(self).closed += 1

    @tool
    async def act(self, what: str) -> str:
        if what == "raise":
            raise RuntimeError("the shelf fell")
        if what == "exit":
            raise SystemExit(3)
        if what == "wait":
            await asyncio.sleep(60)
        if what == "spin":
            while True:
                pass
        if what == "refuse":
            raise ToolError("not that")
        if what == "flood":
            return "x " * 5000
        return what

    @reward
    async def judged(self, answer):
        if answer == "raise":
            raise ValueError("judge fell ill")
        if answer == "wait":
            await asyncio.sleep(60)
        if answer == "spin":
            re.match(r"(a+)+b", "a" * 60)
        if answer == "swallow":
            try:
                await asyncio.sleep(60)
            except BaseException:
                return 1.0
        values = {"nan": float("nan"), "none": None, "inf": float("inf"), "text": "1.0", "huge": 1e300, "list": [1.0]}
        return values.get(answer, float(answer == str(self.facts["number"])))
"""
