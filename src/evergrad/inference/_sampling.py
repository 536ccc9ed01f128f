"""From logits to the distribution that is drawn from, draws by given uniforms, and logarithms of what was drawn.

Shape letters: R rows, V vocabulary, C chunks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from evergrad.inference._rows import Distribution

_CHUNK = 128
"""Tokens whose weights are summed before any sum is taken in double precision: a tenth of the work of a full running sum."""


class Draws:
    """The distributions of a step's rows, after the tokens that a grammar allows, temperature, min-p, top-k and top-p: each
    cuts what those before it left, as in vLLM, so that both engines draw from one distribution.

    For temperature 0, :meth:`draw` takes the largest, and :meth:`logprobs` are those of temperature 1, as other engines report
    them: the logarithm of one would say nothing.

    Args:
        logits: [R, V], left as they are.
        distributions: One per row.
        allowed: By row, [V] bool, where not every token may be drawn.
    """

    def __init__(
        self, logits: torch.Tensor, distributions: Sequence[Distribution], allowed: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        if allowed:
            logits = logits.clone()
            for row, tokens in allowed.items():
                logits[row].masked_fill_(~tokens.to(logits.device), float("-inf"))
        self._greedy = [one.temperature == 0.0 for one in distributions]
        self._logits = logits
        self._divisors = torch.tensor([one.temperature or 1.0 for one in distributions], device=logits.device)
        scores = logits.float()
        if any(one.temperature not in (0.0, 1.0) for one in distributions):
            scores = scores / self._divisors[:, None]
        cut = [row for row, one in enumerate(distributions) if one.top_k > 0 or one.top_p < 1.0 or one.min_p > 0.0]
        if cut:
            kept = _truncate(scores[cut], [distributions[row] for row in cut])
            scores = scores.index_copy(0, torch.tensor(cut, device=logits.device), kept)
        self._truncates = bool(cut)
        # In one pass; not relied on to sum to one. Padded to whole chunks by tokens without weight.
        weights = torch.softmax(scores, dim=-1)
        if missing := -weights.shape[1] % _CHUNK:
            weights = torch.nn.functional.pad(weights, (0, missing))
        self._weights = weights.view(len(weights), -1, _CHUNK)
        # [R, C], running sums of the chunks' weights in double precision.
        self._sums = self._weights.sum(dim=-1).double().cumsum(dim=-1)
        total = self._sums[:, -1]
        self.usable: list[bool] = (torch.isfinite(total) & (total > 0)).tolist()
        """Per row: whether the model gave a distribution at all."""

    def draw(self, rows: Sequence[int], uniforms: Sequence[float]) -> list[int]:
        """One token per entry of ``rows``: the first whose cumulative probability in row ``rows[i]`` exceeds ``uniforms[i]``,
        or the likeliest where the row is greedy. Rows must be usable."""
        device = self._sums.device
        index = torch.tensor(rows, dtype=torch.long, device=device)
        sums = self._sums[index]
        aims = torch.tensor(uniforms, dtype=torch.float64, device=device) * sums[:, -1]
        chunks = _first_above(sums, aims)
        within = self._weights[index, chunks].double().cumsum(dim=-1)
        before = torch.where(chunks > 0, sums.gather(1, (chunks - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        tokens: list[int] = (chunks * _CHUNK + _first_above(within, aims - before)).tolist()
        greedy = sorted({row for row in rows if self._greedy[row]})
        if greedy:
            # Not by weight: two scores that differ may have the same.
            likeliest = dict(zip(greedy, self._logits[greedy].argmax(dim=-1).tolist(), strict=True))
            tokens = [likeliest.get(row, token) for row, token in zip(rows, tokens, strict=True)]
        return tokens

    def logprobs(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Natural-log probability of ``tokens[i]`` in row ``rows[i]``; −inf for what was cut off."""
        index = torch.tensor(rows, dtype=torch.long, device=self._sums.device)
        token = torch.tensor(tokens, dtype=torch.long, device=self._sums.device)
        weights = self._weights.view(len(self._weights), -1)
        # From the logits, since a weight that is zero by rounding has no logarithm; relative to a token that has one.
        heavy = self._heavy()[index]
        scores = (self._logits[index, token].double() - self._logits[index, heavy].double()) / self._divisors[index]
        if self._truncates:
            scores = scores.masked_fill(weights[index, token] == 0, float("-inf"))
        # A rounding above zero would be a probability above one.
        base = weights[index, heavy].double().log() - self._sums[index, -1].log()
        found: list[float] = (scores + base).clamp(max=0.0).tolist()
        return found

    def _heavy(self) -> torch.Tensor:
        """[R] a token of each row whose weight is far from zero: the heaviest of the heaviest chunk."""
        rows = torch.arange(len(self._sums), device=self._sums.device)
        chunk = self._sums.diff(dim=-1, prepend=torch.zeros_like(self._sums[:, :1])).argmax(dim=-1)
        return chunk * _CHUNK + self._weights[rows, chunk].argmax(dim=-1)


def _first_above(sums: torch.Tensor, aims: torch.Tensor) -> torch.Tensor:
    """[N] index of the first of the running sums [N, M] that exceeds the aim [N]; rounding cannot push it off the end, nor to
    an entry without weight."""
    last = sums[:, -1]
    aims = torch.minimum(aims, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(sums, aims[:, None], right=True)[:, 0]


def _truncate(scores: torch.Tensor, distributions: Sequence[Distribution]) -> torch.Tensor:
    vocabulary = scores.shape[-1]
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([min(one.top_k, vocabulary) or vocabulary for one in distributions], device=scores.device)
    top_p = torch.tensor([one.top_p for one in distributions], dtype=torch.float64, device=scores.device)
    min_p = torch.tensor([one.min_p for one in distributions], dtype=torch.float64, device=scores.device)
    cut = torch.arange(vocabulary, device=scores.device) >= top_k[:, None]
    # The logarithm of 0 is −inf, which cuts nothing.
    cut |= (ordered - ordered[:, :1]).double() < min_p.log()[:, None]
    ordered = ordered.masked_fill(cut, float("-inf"))
    probabilities = torch.softmax(ordered.double(), dim=-1)
    # A token stays while those before it do not reach top_p yet; so the first always stays.
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= top_p[:, None], float("-inf"))
    return torch.full_like(scores, float("-inf")).scatter_(-1, tokens, ordered)
