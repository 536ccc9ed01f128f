"""Proofs: one pass says what two would."""

from __future__ import annotations

import pytest
import torch
import xxhash

from evergrad.transfer.proof import Task, all_finite, checksum, copying, proving, sealing, side_by_side

CHUNK = (1 << 19) // 4
"""Float32 values that are gone through at once."""
SIZES = [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 300_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", SIZES)
def test_one_pass_says_what_two_would(size: int, dtype: torch.dtype) -> None:
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
    found, finite = proving(tensor).run()
    assert finite
    assert found == checksum(tensor)
    if size:
        assert found == xxhash.xxh3_64_hexdigest(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, -1])
def test_one_odd_value_anywhere_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.ones(400_000, dtype=dtype)
    tensor[place] = value
    assert not all_finite(tensor)
    assert not proving(tensor).run()[1]
    assert not all_finite(tensor.view(800, 500).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES[1:])
def test_a_copy_and_its_checksum(size: int, dtype: torch.dtype) -> None:
    source = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    target = torch.zeros(size, dtype=dtype)
    assert copying(source, target).run() == checksum(target) == sealing(target).run()
    assert torch.equal(target, source)


def test_the_largest_values_there_are_pass() -> None:
    tensor = torch.full((200_000,), torch.finfo(torch.float32).max)
    assert all_finite(tensor)
    assert proving(tensor).run() == (checksum(tensor), True)


@pytest.mark.parametrize("sizes", [[], [5], [1, 300_000, 2, 0, 1], list(range(50))])
def test_side_by_side_keeps_names_and_order(sizes: list[int]) -> None:
    tensors = {f"{place}": torch.full((size,), float(place)) for place, size in enumerate(sizes)}
    found = side_by_side({name: sealing(tensor) for name, tensor in tensors.items()})
    assert list(found.items()) == [(name, checksum(tensor)) for name, tensor in tensors.items()]


def test_an_error_in_a_task_reaches_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side({"a": Task(1, lambda: 1), "b": Task(1, lambda: 1 // 0)})
