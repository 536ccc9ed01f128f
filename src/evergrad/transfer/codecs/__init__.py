"""Codecs: what a tensor is on its way, one file each, one line below each."""

from __future__ import annotations

from evergrad.config import nearest
from evergrad.transfer.codecs.base import Codec, Encoded
from evergrad.transfer.codecs.cast import Bfloat16
from evergrad.transfer.codecs.float8_block import Float8Block
from evergrad.transfer.codecs.identity import Identity
from evergrad.transfer.codecs.sparse import Sparse
from evergrad.transfer.layout import TransferError

__all__ = ["CODECS", "Codec", "Encoded", "codec_named"]

CODECS: dict[str, Codec] = {
    "identity": Identity(),
    "bfloat16": Bfloat16(),
    "float8_block": Float8Block(),
    "sparse": Sparse(),
}


def codec_named(name: str) -> Codec:
    """
    Raises:
        TransferError: there is none; names the nearest.
    """
    if name not in CODECS:
        raise TransferError(f"no codec '{name}'", hint=nearest(name, CODECS))
    return CODECS[name]
