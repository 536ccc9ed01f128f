"""Which way a model is computed: in the paged cache, proved against transformers, or by transformers itself."""

from __future__ import annotations

from evergrad.inference._fallback import LOSSES, FallbackModel
from evergrad.inference._model import Model
from evergrad.inference._rows import Distribution, Row
from evergrad.inference.config import EngineConfig, EngineError

_PROVED = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")
"""Architectures of which the tests hold every way of computing them against transformers: if one fails here, something is
broken, and a fallback would hide it."""


def load_model(config: EngineConfig) -> tuple[Model, str | None]:
    """The configuration's model, and a notice of what is lost where it is one that transformers computes.

    Raises:
        EngineError: the folder holds no model that can be served, or the device cannot be used.
    """
    try:
        return _proved(Model(config), config), None
    except Exception as error:
        architecture = _architecture(config)
        if architecture is None or architecture in _PROVED:
            raise
        if config.quantization is not None:
            raise EngineError(
                f"a '{architecture}' is computed by transformers ({error}), which quantizes nothing",
                where=config.model,
                hint="leave quantization out",
            ) from error
        notice = f"a '{architecture}' is computed by transformers ({error}): {LOSSES}"
        return _proved(FallbackModel(config), config), notice


def _proved(model: Model, config: EngineConfig) -> Model:
    """The model, compared with transformers' own forward, so that one that is computed wrongly is never served."""
    tokens, expected = model.sample_logprobs
    tokens = tokens[: model.max_len]
    row = Row(list(tokens), len(tokens), Distribution(1.0, 1.0, 0), [], (0, "", 0, 0))
    row.add_blocks(list(range(-(-len(tokens) // config.block_size))), config.block_size)
    worst = max(abs(a - b) for a, b in zip(model.score(row, config.max_batch_tokens, exact=True), expected, strict=False))
    # Half precision rounds differently in different orders of summation.
    limit = 1e-3 if model.dtype.itemsize == 4 else 0.5
    if not worst < limit:
        raise EngineError(
            f"this model's log-probabilities differ from transformers' by {worst:.2g}",
            where=config.model,
            hint="its architecture is not one that the engine can serve",
        )
    return model


def _architecture(config: EngineConfig) -> str | None:
    """The model's, or None where that cannot be read."""
    from transformers import AutoConfig

    try:
        return str(AutoConfig.from_pretrained(config.model).model_type)
    except Exception:
        return None
