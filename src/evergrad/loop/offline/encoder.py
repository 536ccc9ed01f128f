"""The encoder of a base model by name: its tokenizer, and how long a row it takes."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from evergrad.registry import base_model
from evergrad.training.data import Encoder


def encoder_for(model: str | Path) -> tuple[Encoder, int | None]:
    """The encoder of ``smollm2-135m``, ``tiny`` or a local folder, and the model's number of positions if it names one.

    Raises:
        ModelError: no such model, or its folder lacks something.
    """
    folder = base_model(model)
    from transformers import AutoTokenizer

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = {**settings, **settings.get("text_config", {})}
    limit = settings.get("max_position_embeddings")
    return Encoder(AutoTokenizer.from_pretrained(folder), str(model)), int(limit) if limit else None


def fingerprint(model: str | Path) -> dict[str, str]:
    """Folder of a base model, and a hash over the bytes of its weights; a gigabyte takes about a second from a warm cache."""
    folder = base_model(model)
    digest = xxhash.xxh3_64()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
    return {"folder": str(folder), "xxh3": digest.hexdigest()}
