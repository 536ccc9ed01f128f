"""From logits to the distribution that is drawn from, and draws from it by given uniforms.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evergrad.inference._rows import Distribution


def log_distribution(logits: torch.Tensor, distributions: Sequence[Distribution]) -> torch.Tensor:
    """[R, V] natural-log probabilities after temperature, then top-k, then top-p; −inf for what was cut off.

    For temperature 0 they are those of temperature 1, as other engines report them: the draw is the largest, and a logarithm
    of one would say nothing.
    """
    scores = logits.float()
    if any(one.temperature not in (0.0, 1.0) for one in distributions):
        divisors = torch.tensor([one.temperature or 1.0 for one in distributions], device=scores.device)
        scores = scores / divisors[:, None]
    cut = [row for row, one in enumerate(distributions) if one.top_k > 0 or one.top_p < 1.0]
    if cut:
        scores = scores.contiguous() if scores is not logits else scores.clone(memory_format=torch.contiguous_format)
        scores[cut] = _truncate(scores[cut], [distributions[row] for row in cut])
    return torch.log_softmax(scores, dim=-1)


def draw(log_probs: torch.Tensor, rows: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """One token per entry of ``rows``: the first whose cumulative probability in row ``rows[i]`` exceeds ``uniforms[i]``.

    Summed in double precision, so that no token is out of reach or too easily reached by rounding.
    """
    cumulative = torch.exp(log_probs.double()).cumsum(dim=-1)
    index = torch.tensor(rows, device=log_probs.device)
    # The sum is one up to rounding; a uniform counts relative to it, so it cannot fall off the end.
    total = cumulative[index, -1]
    aims = torch.tensor(uniforms, dtype=torch.float64, device=log_probs.device) * total
    aims = torch.minimum(aims, torch.nextafter(total, torch.zeros_like(total)))
    chosen: list[int] = torch.searchsorted(cumulative[index], aims[:, None], right=True)[:, 0].tolist()
    return chosen


def _truncate(scores: torch.Tensor, distributions: Sequence[Distribution]) -> torch.Tensor:
    vocabulary = scores.shape[-1]
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([min(one.top_k, vocabulary) or vocabulary for one in distributions], device=scores.device)
    top_p = torch.tensor([one.top_p for one in distributions], dtype=torch.float64, device=scores.device)
    cut = torch.arange(vocabulary, device=scores.device) >= top_k[:, None]
    ordered = ordered.masked_fill(cut, float("-inf"))
    probabilities = torch.softmax(ordered.double(), dim=-1)
    # A token stays while those before it do not reach top_p yet; so the first always stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= top_p[:, None], float("-inf"))
    return torch.full_like(scores, float("-inf")).scatter_(-1, tokens, ordered)
