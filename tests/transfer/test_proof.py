"""Proofs: one pass says what two would."""

from __future__ import annotations

import pytest
import torch
import xxhash

from evergrad.transfer.proof import all_finite, checksum, checksum_and_finite, copy_and_checksum, side_by_side

SIZES = [0, 1, 7, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 300_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", SIZES)
def test_one_pass_says_what_two_would(size: int, dtype: torch.dtype) -> None:
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
    found, finite = checksum_and_finite(tensor)
    assert finite
    assert found == checksum(tensor)
    if size:
        assert found == xxhash.xxh3_64_hexdigest(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 65_535, 65_536, -1])
def test_one_odd_value_anywhere_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.ones(200_000, dtype=dtype)
    tensor[place] = value
    assert not all_finite(tensor)
    assert not checksum_and_finite(tensor)[1]
    assert not all_finite(tensor.view(400, 500).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_and_its_checksum(size: int, dtype: torch.dtype) -> None:
    source = torch.randn(size, generator=torch.Generator().manual_seed(size))
    for tensor in (source, source.to(dtype), source.view(-1, 1).expand(-1, 2)):
        target = torch.zeros(tensor.shape, dtype=dtype)
        assert copy_and_checksum(tensor, target) == checksum(target)
        assert torch.equal(target, tensor.to(dtype))


def test_the_largest_values_there_are_pass() -> None:
    tensor = torch.full((200_000,), torch.finfo(torch.float32).max)
    assert all_finite(tensor)
    assert checksum_and_finite(tensor) == (checksum(tensor), True)


def test_side_by_side_keeps_names() -> None:
    tensors = {str(size): torch.ones(size) for size in SIZES}
    assert side_by_side(len, tensors) == {str(size): size for size in SIZES}
