"""TRL's ``GRPOTrainer`` as the benchmarks use it: handed a batch that was sampled before, and told when to stop the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from evergrad.types import TrainingSample

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
logging.disable_progress_bar()


@dataclass(frozen=True)
class Cut:
    """How TRL cuts an optimizer step."""

    rows: int
    """Samples of one micro-batch (``per_device_train_batch_size``)."""
    checkpointing: bool
    """Computes activations again in the backward pass instead of keeping them (``gradient_checkpointing``)."""

    def __str__(self) -> str:
        return f"{self.rows} rows{', gradient checkpointing' if self.checkpointing else ''}"


DEFAULT = Cut(8, True)
"""What TRL 1.16 does when it is told nothing."""


def batch_inputs(samples: Sequence[TrainingSample]) -> dict[str, torch.Tensor]:
    """What TRL makes of a batch that it generated: rectangles of ids, masks, advantages and behaviour log-probabilities.

    Samples have the same number of prompt tokens and of others, so nothing is padded. What an environment wrote between
    turns is in ``tool_mask``, as after TRL's own loop of tool calls.
    """
    starts = {sample.loss_mask.index(1) for sample in samples}
    (start,) = starts
    ids = torch.tensor([sample.token_ids for sample in samples])
    mask = torch.tensor([sample.loss_mask for sample in samples])[:, start:]
    return {
        "prompt_ids": ids[:, :start],
        "prompt_mask": torch.ones_like(ids[:, :start]),
        "completion_ids": ids[:, start:],
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": torch.tensor([sample.advantages[start] for sample in samples]),
        "old_per_token_logps": torch.tensor([sample.logprobs for sample in samples])[:, start:],
        "num_items_in_batch": mask.sum(),
    }


@dataclass
class Clock(TrainerCallback):
    """Times TRL's optimizer steps: all micro-batches forward and backward, clipping, the optimizer."""

    before: Callable[[int], None] = lambda _: None
    """Called before each step with its number, while the clock stands."""
    gradient: Callable[[int, torch.nn.Module], None] = lambda _, __: None
    """Called with the step's number and the model when its gradient is whole."""
    seconds: list[float] = field(default_factory=list)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.before(state.global_step)
        self._started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        paused = time.perf_counter()
        self.gradient(state.global_step, model)
        self._started += time.perf_counter() - paused

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


class GivenBatch(GRPOTrainer):
    """Trains on one batch again and again; everything after generation is TRL's own."""

    def __init__(self, inputs: dict[str, torch.Tensor], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.given = inputs
        self.losses: list[float] = []
        """Of each micro-batch; those of a step add up to its loss."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.given)

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        self.losses.append(float(loss.detach()))
        return loss


def given_batch(
    folder: Path, samples: Sequence[TrainingSample], cut: Cut, steps: int, clock: Clock, output: Path, **settings: Any
) -> GivenBatch:
    """A trainer whose ``train()`` makes ``steps`` optimizer steps on ``samples``, full fine-tuning in float32."""
    prompt, answer = samples[0].loss_mask.index(1), len(samples[0].token_ids)
    arguments = GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=cut.rows,
        gradient_accumulation_steps=len(samples) // cut.rows,
        gradient_checkpointing=cut.checkpointing,
        max_completion_length=answer - prompt,
        lr_scheduler_type="constant",
        **settings,
    )
    trainer = GivenBatch(
        batch_inputs(samples),
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "."}] * len(samples)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
