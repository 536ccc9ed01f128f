"""Codecs: what arrives is what left, to the bit or within the promise, and sparse never costs more than dense."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.transfer import TransferError
from evergrad.transfer.codecs import CODECS, Encoded, codec_named
from evergrad.transfer.codecs.float8_block import BLOCK

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def num_bytes(encoded: Encoded) -> int:
    return sum(part.numel() * part.element_size() for part in encoded.parts)


def there_and_back(name: str, tensor: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    encoded = CODECS[name].encode(tensor, previous)
    assert all(part.is_contiguous() for part in encoded.parts)
    out = previous.clone()
    CODECS[encoded.codec].decode(encoded.parts, out)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(CODECS)), SHAPES, DTYPES, st.floats(0, 1), st.integers(0, 2**31))
def test_what_arrives_is_what_left(name: str, shape: tuple[int, ...], dtype: torch.dtype, density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    previous = torch.randn(shape, generator=generator).to(dtype)
    other = torch.randn(shape, generator=generator).to(dtype)
    tensor = torch.where(torch.rand(shape, generator=generator) < density, other, previous)
    arrived = there_and_back(name, tensor, previous)
    if CODECS[name].exact:
        assert same_bits(arrived, tensor)
    again, once = (CODECS[name].encode(tensor, previous).parts for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(again, once, strict=True))


def test_sparse_keeps_every_bit_of_odd_values() -> None:
    previous = torch.zeros(1000)
    tensor = previous.clone()
    tensor[[3, 500, 999]] = torch.tensor([float("nan"), -0.0, float("inf")])
    assert CODECS["sparse"].encode(tensor, previous).codec == "sparse"
    assert same_bits(there_and_back("sparse", tensor, previous), tensor)


@pytest.mark.parametrize("places", [[], [0], [299_999], [65_535], [65_536], [131_072, 131_073], [0, 65_536, 131_072, 262_145]])
def test_sparse_reaches_places_that_are_far_apart(places: list[int]) -> None:
    previous = torch.arange(300_000, dtype=torch.float32)
    tensor = previous.clone()
    tensor[places] = -1.0
    encoded = CODECS["sparse"].encode(tensor, previous)
    assert encoded.codec == "sparse"
    assert num_bytes(encoded) <= 6 * (len(places) + 300_000 // 65_536)
    assert same_bits(there_and_back("sparse", tensor, previous), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.03, 0.1, 0.4, 0.6, 1.0])
def test_sparse_is_never_larger_than_dense(dtype: torch.dtype, density: float) -> None:
    generator = torch.Generator().manual_seed(1)
    previous = torch.randn(200, 500, generator=generator).to(dtype)
    tensor = torch.where(torch.rand(200, 500, generator=generator) < density, previous * 2, previous)
    encoded = CODECS["sparse"].encode(tensor, previous)
    assert num_bytes(encoded) <= tensor.numel() * tensor.element_size()
    if density <= 0.1:
        entry = tensor.element_size() + 2
        assert num_bytes(encoded) <= entry * (1.1 * density * tensor.numel() + 2)
    if density == 1.0:
        assert encoded.codec == "identity"
        assert encoded.parts[0] is tensor


def test_sparse_without_a_version_before_is_dense() -> None:
    assert CODECS["sparse"].encode(torch.ones(100), None).codec == "identity"


def test_sparse_into_a_view_that_is_not_contiguous() -> None:
    whole = torch.zeros(6, 10)
    out, tensor = whole[:, 2:5], torch.zeros(6, 3)
    tensor[4, 1] = 7.0
    encoded = CODECS["sparse"].encode(tensor, torch.zeros(6, 3))
    CODECS[encoded.codec].decode(encoded.parts, out)
    assert torch.equal(out, tensor)
    assert whole.sum() == 7.0


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_casts_keep_their_promise(scale: float) -> None:
    tensor = torch.randn(7, 333, generator=torch.Generator().manual_seed(0)) * scale
    half = there_and_back("bfloat16", tensor, torch.zeros_like(tensor))
    assert ((half - tensor).abs() <= 2.0**-8 * tensor.abs()).all()
    eighth = there_and_back("float8_block", tensor, torch.zeros_like(tensor))
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    largest = flat.abs().amax(1).repeat_interleave(BLOCK)[: tensor.numel()].view(tensor.shape)
    assert ((eighth - tensor).abs() <= torch.maximum(2.0**-4 * tensor.abs(), 2.0**-17 * largest) * 1.001).all()
    assert num_bytes(CODECS["float8_block"].encode(tensor, None)) < 0.27 * num_bytes(CODECS["identity"].encode(tensor, None))


def test_parts_that_do_not_fit_are_refused() -> None:
    out = torch.zeros(4, 4)
    far = CODECS["sparse"].encode(torch.arange(400.0).where(torch.arange(400) > 398, torch.zeros(400)), torch.zeros(400))
    for name, parts in {
        "identity": (torch.ones(4),),
        "bfloat16": (torch.ones(5, 4, dtype=torch.bfloat16),),
        "float8_block": (torch.ones(15, dtype=torch.uint8), torch.ones(1)),
        "sparse": far.parts,
    }.items():
        with pytest.raises(TransferError):
            CODECS[name].decode(parts, out)
        assert not out.any()


def test_an_unknown_codec_names_the_nearest() -> None:
    with pytest.raises(TransferError, match="'sparse'"):
        codec_named("sparce")
