"""The rows of a run: read, split into those that are trained and those that are held out, and named for the record."""

from __future__ import annotations

from typing import Any

from evergrad.loop.offline.config import METHODS, TrainConfig
from evergrad.loop.offline.encoder import encoder_for
from evergrad.loop.offline.plan import Sequences, content, hold_out
from evergrad.loop.offline.screen import TrainScreen
from evergrad.training.data import Dataset, load_dataset
from evergrad.types import InputError, TrainingSample


class Data:
    """The rows of a run, trained and held out.

    Raises:
        InputError: a file or model that cannot be used, or no row left to train.
    """

    def __init__(self, config: TrainConfig, screen: TrainScreen) -> None:
        settings, pairs = config.data, METHODS[config.method].pairs
        encoder, limit = encoder_for(config.model)
        self._file = load_dataset(settings.file, settings, encoder, limit, pairs=pairs)
        self._heldout_file: Dataset | None = None
        self.trained, self.heldout = hold_out(self._file.rows, settings.heldout, config.seed)
        if settings.heldout_file is not None:
            self._heldout_file = load_dataset(settings.heldout_file, settings, encoder, limit, pairs=pairs)
            self.heldout = list(self._heldout_file.rows)
            known = {content(row) for row in self.trained}
            twice = sum(content(row) in known for row in self.heldout)
            if twice:
                text = f"{twice} of {len(self.heldout)} held-out rows are trained, too: their loss says nothing about new ones"
                screen.note(text, style="yellow")
        if not self.trained:
            raise InputError("all rows are held out", where=settings.file, hint="lower data.heldout")
        for each in (self._file, self._heldout_file):
            for what, lines in (("dropped", each.dropped), ("cut", each.truncated)) if each is not None else ():
                if each is not None and lines:
                    screen.note(f"{each.path}: {len(lines)} over-long rows are {what}, the first in line {lines[0]}")

    def trained_samples(self) -> list[TrainingSample]:
        """All sequences of the rows that are trained, in the order of the file; the two of a pair are neighbours."""
        return self._samples(self.trained, self._file)

    def heldout_samples(self) -> list[TrainingSample]:
        """The same of the rows that are held out."""
        return self._samples(self.heldout, self._heldout_file or self._file)

    def _samples(self, rows: list[Sequences], file: Dataset) -> list[TrainingSample]:
        return [each.sample(file.path) for row in rows for each in row]

    def batch(self, numbers: list[int]) -> list[TrainingSample]:
        """The sequences of some rows that are trained."""
        return self._samples([self.trained[number] for number in numbers], self._file)

    def identity(self) -> dict[str, dict[str, Any]]:
        """What the files are, for the run folder and the report."""
        files = {"training": self._file, "held-out": self._heldout_file}
        return {
            role: {
                "file": each.path,
                "sha256": each.sha256,
                "format": each.format,
                "rows": len(each.rows),
                "dropped": len(each.dropped),
                "truncated": len(each.truncated),
                "tokens": each.tokens,
                "trained_tokens": each.trained_tokens,
            }
            for role, each in files.items()
            if each is not None
        }
