"""Folders of tensors are whole or absent, and damage is found before anything is used."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from evergrad.transfer import TransferError, load_tensors, save_tensors, whole_folder


def some(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((40, 50), value),
        "b": torch.arange(6, dtype=torch.int64),
        "c": torch.zeros(3, dtype=torch.bfloat16),
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in expected)


def test_round_trip_with_metadata(tmp_path: Path) -> None:
    save_tensors(tmp_path / "v1", some().items(), {"policy_version": "3"})
    assert_equal(load_tensors(tmp_path / "v1"), some())
    with safe_open(tmp_path / "v1" / "model.safetensors", framework="pt") as file:
        assert file.metadata()["policy_version"] == "3"
        assert file.metadata()["format"] == "pt"
    assert os.listdir(tmp_path) == ["v1"]


def test_views_and_transposes_are_saved_as_what_they_show(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    save_tensors(tmp_path / "v", [("t", whole.t()), ("row", whole[1])])
    assert_equal(load_tensors(tmp_path / "v"), {"t": whole.t(), "row": whole[1]})


def test_replacing_a_folder_leaves_only_the_new_one(tmp_path: Path) -> None:
    save_tensors(tmp_path / "v", some(1.0).items())
    (tmp_path / "v" / "old.txt").write_text("old")
    save_tensors(tmp_path / "v", some(2.0).items())
    assert_equal(load_tensors(tmp_path / "v"), some(2.0))
    assert os.listdir(tmp_path) == ["v"]
    assert os.listdir(tmp_path / "v") == ["model.safetensors"]


def test_an_error_while_filling_leaves_what_was_there(tmp_path: Path) -> None:
    save_tensors(tmp_path / "v", some(1.0).items())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        save_tensors(tmp_path / "v", broken())
    with pytest.raises(TransferError, match="twice"):
        save_tensors(tmp_path / "v", [*some(2.0).items(), *some(2.0).items()])
    assert_equal(load_tensors(tmp_path / "v"), some(1.0))
    assert os.listdir(tmp_path) == ["v"]


@pytest.mark.parametrize("keep", [0, 7, 100, 8000, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = save_tensors(tmp_path / "v", some().items()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TransferError):
        load_tensors(tmp_path / "v")


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "v", some().items()) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(TransferError, match="checksum"):
        load_tensors(tmp_path / "v")


def test_foreign_folders_load_and_incomplete_ones_do_not(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"part-{number}.safetensors")
    index = {"weight_map": {name: f"part-{number}.safetensors" for number, name in enumerate(tensors)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(load_tensors(tmp_path), tensors)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(TransferError, match="part-1"):
        load_tensors(tmp_path)
    with pytest.raises(TransferError, match="no weights"):
        load_tensors(tmp_path / "nowhere")


FULL_DISK = textwrap.dedent(
    """
    import resource, sys, torch
    from evergrad.transfer import TransferError, save_tensors
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        save_tensors(sys.argv[1], [("a", torch.full((40, 50), 2.0))])
    except TransferError as error:
        print(error)
    """
)


def test_a_full_disk_is_one_clear_error_and_the_old_folder_stays(tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None
    save_tensors(tmp_path / "v", some(1.0).items())
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path / "v")], capture_output=True, text=True, check=True)
    assert "could not write" in done.stdout
    assert "untouched" in done.stdout
    assert_equal(load_tensors(tmp_path / "v"), some(1.0))
    assert os.listdir(tmp_path) == ["v"]


KILLED = textwrap.dedent(
    """
    import os, sys, time
    from evergrad.transfer import whole_folder
    with whole_folder(sys.argv[1]) as partial:
        (partial / "model.safetensors").write_text("half")
        print("half", flush=True)
        time.sleep(60)
    """
)


def test_what_a_killed_writer_left_is_removed_by_the_next_and_never_read(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "v")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    with whole_folder(tmp_path / "v") as partial:  # a writer that is alive is left alone
        assert len(os.listdir(tmp_path)) == 2
        (partial / "x").write_text("x")
    child.kill()
    child.wait()
    child.stdout.close()
    assert len(os.listdir(tmp_path)) == 2
    save_tensors(tmp_path / "v", some().items())
    assert os.listdir(tmp_path) == ["v"]
    assert_equal(load_tensors(tmp_path / "v"), some())
