"""A transformers model that scores forests: the model's own layers, our attention, log-probabilities of chosen tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from evergrad.training.attention import ATTENTION_NAME, AttentionPlans
from evergrad.training.config import TrainerError, require_model_folder
from evergrad.training.forest import Forest, TrainedTokens, plant
from evergrad.training.layers import write_out_backward
from evergrad.training.logprobs import chosen_logprobs
from evergrad.types import TrainingSample

_CHECK_TOKENS = 24
_CHECK_TOLERANCE = 1e-3


class Scores(NamedTuple):
    """What one forward pass says of a forest; in float32 or wider."""

    logprobs: Tensor
    """[T] of every trained token."""
    entropies: Tensor | None
    """[T] of the distribution that it was drawn from, on demand."""
    states: Tensor
    """[R, width] hidden states that tokens are predicted from."""


class ScoreForest(Protocol):
    """:func:`score_forest` of one model, wherever its weights are."""

    def __call__(self, forest: Forest, *, entropies: bool = False) -> Scores: ...


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Loads a local Hugging Face folder, ready for :func:`score_forest`.

    Raises:
        TrainerError: no such folder, not a causal language model, or damaged weights.
    """
    require_model_folder(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # transformers raises many kinds for a bad folder
        raise TrainerError(f"the model does not load: {error}", where=path) from error
    model = model.to(device).eval()
    write_out_backward(model)
    return model


def score_forest(model: Any, forest: Forest, *, entropies: bool = False) -> Scores:
    """Log-probability of every trained token of ``forest``, and on demand its distribution's entropy."""
    head = model.get_output_embeddings()
    device = head.weight.device
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    decoder = getattr(model, model.base_model_prefix)
    hidden = decoder(
        input_ids=torch.from_numpy(forest.token_ids)[None].to(device),
        position_ids=torch.from_numpy(forest.depths)[None].to(device),
        use_cache=False,
        forest_plans=AttentionPlans(forest, device, head.weight.dtype),
    ).last_hidden_state[0]
    # index_select, not indexing: its backward adds rows up in a fixed order, so that a step repeats bit for bit.
    states = hidden.index_select(0, torch.from_numpy(forest.rows).to(device))
    pair_logprobs, row_entropies = chosen_logprobs(
        states,
        head.weight,
        head.bias,
        torch.from_numpy(forest.temperatures).to(device, wide),
        torch.from_numpy(forest.row_of_pair).to(device),
        torch.from_numpy(forest.targets).to(device),
        entropies=entropies,
    )
    pairs = torch.from_numpy(forest.pair_of_token).to(device)
    logprobs = pair_logprobs.index_select(0, pairs)
    if row_entropies is None:
        return Scores(logprobs, None, states)
    return Scores(logprobs, row_entropies.index_select(0, torch.from_numpy(forest.row_of_token).to(device)), states)


@torch.no_grad()
def sequence_logprobs(score: ScoreForest, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token but the first, given those before it: ``len(token_ids) - 1`` numbers."""
    count = len(token_ids)
    zeros = (0.0,) * count
    sample = TrainingSample(token_ids, (0, *(1,) * (count - 1)), zeros, zeros, 0, 0, temperature)
    (forest,) = plant([TrainedTokens(sample, np.arange(1, count), count - 1)], count)
    values: list[float] = score(forest)[0].tolist()
    return values


@torch.no_grad()
def check_faithful(model: Any, path: str) -> None:
    """Compares our forward with transformers' own on a few tokens, so that a model that does something else with its
    attention or logits (soft caps, scaled logits, recurrent layers, …) is refused instead of trained wrongly.

    Raises:
        TrainerError: they differ.
    """
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.config.get_text_config().vocab_size, (_CHECK_TOKENS,), generator=generator)
    try:
        ours = torch.tensor(sequence_logprobs(partial(score_forest, model), tuple(token_ids.tolist())))
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise TrainerError(f"this architecture cannot be trained here: {error}", where=path) from error
    model.set_attn_implementation("eager")
    try:
        device = model.get_output_embeddings().weight.device
        logits = model(input_ids=token_ids[None].to(device), use_cache=False).logits[0].float().cpu()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    theirs = torch.log_softmax(logits[:-1], -1).gather(1, token_ids[1:, None]).squeeze(1)
    tolerance = _CHECK_TOLERANCE if model.dtype in (torch.float32, torch.float64) else 0.25
    difference = float((ours - theirs).abs().max())
    if not difference <= tolerance:
        raise TrainerError(
            f"log-probabilities differ from transformers' own by {difference:.2g}", where=path, hint="use another architecture"
        )
