"""What an engine is told at its start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from evergrad.config import Config
from evergrad.types import EvergradError

UpdateMode = Literal["keep", "drain", "abort"]
"""What becomes of the requests that run when weights change, or at a pause: they go on, end first, or end at once."""


class EngineError(EvergradError):
    """A request, an update or a start that the engine refused, and what to do next."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, does not answer in time, is dead or still loading: another one may do the same work."""


class EngineConfig(Config):
    """Configuration of one engine process.

    >>> EngineConfig(model="models/smollm2").max_rows
    64
    """

    model: str
    """Hugging Face folder: config, safetensors and, for chat, a tokenizer with a chat template."""
    device: str = "auto"
    """``auto`` takes CUDA when there is one; else any torch device."""
    dtype: str = "float32"
    """Of weights, keys and values: ``float32``, ``bfloat16`` or ``float16``."""
    quantization: Literal["int8"] | None = None
    """``int8`` computes the products of linear layers in integers, of float32 weights on a CPU: faster, and near to what the
    weights say, not equal. For sampling what a loss with a correction is trained on."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of one product; None takes the cores of the machine."""
    max_rows: int = Field(default=64, ge=1)
    """Sequences in one step; equal samples of a group count once until they part."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Tokens in one step: every running row's next one, then prompts, in pieces where they do not fit."""
    block_size: int = Field(default=4, ge=1)
    """Tokens of one block of the key-value cache. Prompts of one step share whole blocks, later ones to the token."""
    kv_cache_tokens: int = Field(default=32768, ge=1)
    """Tokens whose keys and values are kept, live and for reuse. Memory is taken as it fills."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Prompt and completion together; None takes the model's own limit or the cache's size, whichever is less."""
    draft_tokens: int = Field(default=8, ge=0)
    """Most tokens that are guessed for one row in one step; 0 guesses none. Completions are the same either way."""
    draft_batch_tokens: int = Field(default=64, ge=0)
    """Guesses fill a step up to this many tokens: what the machine computes in little more time than half as many."""
    seed: int = 0
    """Of requests that bring none."""
    policy_version: int = 0
    """Of the weights in ``model``."""
    served_names: tuple[str, ...] = ()
    """Names under which ``/v1/*`` knows the model, besides its folder's name."""
    awaits_weights: bool = False
    """Answers 503 ``loading`` until a version was loaded over the weights in ``model``, which alone are nobody's to serve."""
    drain_s: int = Field(default=2, ge=0)
    """How long requests that run when the process is told to end may go on, in seconds; no new ones are taken meanwhile."""
    session_hold_s: float = Field(default=30.0, ge=0)
    """How long a step waits for an open session that has nothing to do yet: longer than a tool and a verifier may take, and
    than a busy machine is late, since what is sampled without a session that comes after all does not repeat."""
    admission_delay_s: float = Field(default=0.002, ge=0)
    """How long an idle engine waits for more requests after the first, so that equal ones share a row."""
    stuck_after_s: float = Field(default=4.0, gt=0)
    """A step that takes longer than this, and than five times the longest one before, counts as stuck."""
