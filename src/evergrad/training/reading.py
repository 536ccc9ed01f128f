"""Reads numbers of single tokens off forward passes: each rank computes its share of the forests, and all hear of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from evergrad.training.forest import FloatArray, Forest, TrainedTokens
from evergrad.training.ranks import Ranks
from evergrad.types import TrainingSample

Columns: TypeAlias = Callable[[Forest], list[Tensor]]
"""What is read off a forest: tensors of [T]."""


@torch.no_grad()
def read_off(
    ranks: Ranks, max_nodes: int, wanted: Sequence[TrainedTokens], columns: Columns
) -> dict[int, list[tuple[float, ...]]]:
    """By the ``id`` of the sample: what each of the columns says at the wanted positions, 0.0 elsewhere.

    Args:
        ranks: All of them must call it.
        max_nodes: Distinct tokens of one forest.
    """
    number_of = {id(item.sample): number for number, item in enumerate(wanted)}
    found: dict[int, FloatArray] = {}
    share = ranks.share(wanted, max_nodes)
    for forest in share.forests:
        read = np.stack([column.cpu().double().numpy() for column in columns(forest)])
        for index, item in enumerate(forest.items):
            found[number_of[id(item.sample)]] = read[:, forest.sample_of_token == index]
    for forest in share.idle:
        columns(forest)
    for others in ranks.everyones(found):
        found |= others
    rows: dict[int, list[tuple[float, ...]]] = {}
    for item in wanted:
        read = found[number_of[id(item.sample)]]
        whole_rows = np.zeros((len(read), len(item.sample.token_ids)))
        whole_rows[:, item.positions] = read
        rows[id(item.sample)] = [tuple(row) for row in whole_rows.tolist()]
    return rows


def in_order(
    samples: Sequence[TrainingSample], found: Mapping[int, list[tuple[float, ...]]], columns: int
) -> list[list[tuple[float, ...]]]:
    """What :func:`read_off` found of each sample; zeros for those without a wanted position."""
    return [found.get(id(sample), [(0.0,) * len(sample.token_ids)] * columns) for sample in samples]
