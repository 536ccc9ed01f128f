"""A transformers model that scores forests: the model's own layers, our attention, log-probabilities of chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence
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

_OTHERS = "use a model of the Llama, Mistral, Qwen 2, Qwen 3 or Gemma 3 family"
_CHECK_TOKENS = 24
_CHECK_TRUNK = 10
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
        TrainerError: no such folder, not a causal language model, damaged weights, or an architecture that is computed
            differently here than by transformers.
    """
    require_model_folder(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # transformers raises many kinds for a bad folder
        raise TrainerError(f"the model does not load: {error}", where=path) from error
    model = model.to(device).eval()
    samples = _check_samples(model.config.get_text_config().vocab_size)
    expected = _own_logprobs(model, samples, path)  # before any layer of it is replaced
    write_out_backward(model)
    _require_faithful(model, samples, expected, path)
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
    # index_select, not indexing: on a CPU its backward adds rows up in a fixed order, so that a step repeats bit for bit.
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


def sequence_logprobs(score: ScoreForest, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token but the first, given those before it: ``len(token_ids) - 1`` numbers."""
    return _forest_logprobs(score, [_all_trained(token_ids, temperature)])[0]


def _all_trained(token_ids: tuple[int, ...], temperature: float = 1.0) -> TrainingSample:
    zeros = (0.0,) * len(token_ids)
    return TrainingSample(token_ids, (0, *(1,) * (len(token_ids) - 1)), zeros, zeros, 0, 0, temperature)


@torch.no_grad()
def _forest_logprobs(score: ScoreForest, samples: Sequence[TrainingSample]) -> list[list[float]]:
    """Of each sample, what its tokens but the first have in one forest of all of them."""
    lengths = [len(sample.token_ids) for sample in samples]
    wanted = [TrainedTokens(sample, np.arange(1, length), length - 1) for sample, length in zip(samples, lengths, strict=True)]
    (forest,) = plant(wanted, sum(lengths))
    values = score(forest).logprobs.double().cpu().numpy()
    found = {id(item.sample): values[forest.sample_of_token == index] for index, item in enumerate(forest.items)}
    return [found[id(sample)].tolist() for sample in samples]


def _require_faithful(model: Any, samples: Sequence[TrainingSample], expected: Tensor, path: str) -> None:
    """Compares our scores of a forest of ``samples`` with ``expected``, so that a model that does something else with its
    attention, layers or logits (soft caps, multipliers, a state that runs from token to token, …) is refused instead of
    trained wrongly.

    Raises:
        TrainerError: they differ.
    """
    try:
        ours = _forest_logprobs(partial(score_forest, model), samples)
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise TrainerError(f"this architecture cannot be trained here: {error}", where=path, hint=_OTHERS) from error
    tolerance = _CHECK_TOLERANCE if model.dtype in (torch.float32, torch.float64) else 0.25
    difference = float((torch.tensor(ours) - expected).abs().max())
    if not difference <= tolerance:
        raise TrainerError(f"log-probabilities differ from transformers' own by {difference:.2g}", where=path, hint=_OTHERS)


def _check_samples(vocab_size: int) -> list[TrainingSample]:
    """Two that begin alike and then part: only a forest shows what one branch must not see of the other."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocab_size, (2, _CHECK_TOKENS), generator=generator)
    drawn[1, :_CHECK_TRUNK] = drawn[0, :_CHECK_TRUNK]
    return [_all_trained(tuple(token_ids)) for token_ids in drawn.tolist()]


@torch.no_grad()
def _own_logprobs(model: Any, samples: Sequence[TrainingSample], path: str) -> Tensor:
    """[samples, tokens − 1] as transformers computes them, each sample on its own.

    Raises:
        TrainerError: it cannot.
    """
    token_ids = torch.tensor([sample.token_ids for sample in samples])
    model.set_attn_implementation("eager")
    try:
        device = model.get_output_embeddings().weight.device
        logits = model(input_ids=token_ids.to(device), use_cache=False).logits.float().cpu()
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise TrainerError(f"this architecture cannot be trained here: {error}", where=path, hint=_OTHERS) from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return torch.log_softmax(logits[:, :-1], -1).gather(2, token_ids[:, 1:, None]).squeeze(2)
