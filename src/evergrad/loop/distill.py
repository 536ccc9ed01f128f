"""Settings of on-policy distillation: who the teacher is, and what it may read."""

from __future__ import annotations

from pydantic import field_validator, model_validator

from evergrad.config import Config, found_model


class DistillConfig(Config):
    """The teacher of on-policy distillation: it scores what the student sampled, token by token, and the loss moves the student
    to it (Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv 2306.13649).

    Without ``model`` and ``version`` it is the student as it was at the beginning of the stage.
    """

    model: str | None = None
    """A name or a local Hugging Face folder, as ``model`` of the run; with the student's tokenizer."""
    version: str | None = None
    """An earlier version of this run, such as ``demo-c1-rl``."""
    hint: bool = False
    """Whether the teacher also reads what the environment's ``hint`` says. The student then learns to do without it what it
    can do with it (Shenfeld et al. 2026, "Self-Distillation Enables Continual Learning", arXiv 2601.19897)."""

    _found = field_validator("model")(found_model)

    @property
    def frozen(self) -> bool:
        """Whether the teacher is the frozen reference that the trainer keeps."""
        return self.model is None and self.version is None

    @model_validator(mode="after")
    def _one_teacher(self) -> DistillConfig:
        if self.model is not None and self.version is not None:
            raise ValueError("a stage has one teacher; name a model or a version, not both")
        if self.frozen and not self.hint:
            raise ValueError(
                "the teacher would be the student itself, with nothing to teach; name a model or an earlier version, or set "
                "hint = true"
            )
        return self
