"""Data files as a user writes them, read strictly and turned into token ids with the positions that are trained.

The walk of one line::

    file ──read_lines──▶ JSON object ──rows.parse──▶ Row (messages, text or a pair) ──Encoder──▶ EncodedRow
    (line number)        or a Problem               or Problems                    or a Problem   │ sample(), samples()
                                                                                                   ▼
                                                                                             TrainingSample

Nothing is guessed: a line that cannot be trained on as it stands is named with its field, its value and what to do, and a file
with one such line is refused before the first step. Formats are one entry each in ``rows.FORMATS``.
"""

from __future__ import annotations

from evergrad.training.data.config import DataConfig
from evergrad.training.data.encode import EncodedRow, Encoder
from evergrad.training.data.files import Dataset, Examination, examine, load_dataset
from evergrad.training.data.problems import DataError, Problem
from evergrad.training.data.rows import FORMATS, Conversation, Pair, Row, Text, parse
from evergrad.training.data.tokens import Tokens

__all__ = [
    "FORMATS",
    "Conversation",
    "DataConfig",
    "DataError",
    "Dataset",
    "EncodedRow",
    "Encoder",
    "Examination",
    "Pair",
    "Problem",
    "Row",
    "Text",
    "Tokens",
    "examine",
    "load_dataset",
    "parse",
]
