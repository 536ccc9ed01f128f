"""Settings of the data that a run trains on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from evergrad.config import Config, found_path

FormatName = Literal["auto", "chat", "prompt_completion", "text", "tokens", "preference", "preference_openai"]


class DataConfig(Config):
    """Which file, read how."""

    file: str
    """A JSONL file, one object a line."""
    format: FormatName = "auto"
    """How a line reads; ``auto`` takes it from the keys of the first line, and every other line must agree."""
    heldout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows that are measured and never trained. Equal rows go to one side together."""
    heldout_file: str | None = None
    """A file of the same format to measure on, in place of a share."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest row in tokens; by default what the model has positions for."""
    overlong: Literal["refuse", "truncate_left", "truncate_right", "drop"] = "refuse"
    """What becomes of a longer row: the file is refused, the row loses its beginning or end, or it is dropped and counted."""

    _found = field_validator("file", "heldout_file")(found_path)

    @model_validator(mode="after")
    def _one_heldout(self) -> DataConfig:
        if self.heldout and self.heldout_file is not None:
            raise ValueError("heldout is a share of the file and heldout_file another file: set one of them")
        return self
