"""A publisher's versions, received on behalf of a server that cannot attach to one: proved here, then handed on.

Whole, as a place in shared memory or as a Hugging Face folder; or as an adapter in PEFT layout, where that is what travels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.inference.config import EngineError
from evergrad.transfer import (
    SlotReceiver,
    WireReceiver,
    load_adapter,
    load_tensors,
    merged_tensors,
    open_receiver,
    require_base,
    whole_folder,
)
from evergrad.transfer.files import write_safetensors

if TYPE_CHECKING:
    import torch

_NOT_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model folder that go along with other weights."""


@dataclass(frozen=True)
class Arrived:
    """One version, proved. Its memory stays as it is until the next one is taken."""

    policy_version: int
    tensors: Mapping[str, torch.Tensor]
    adapter: Mapping[str, Any] | None
    """PEFT's configuration, where ``tensors`` are the parts of an adapter."""
    transfer: Mapping[str, Any]
    """What :class:`~evergrad.transfer.link.Receipt` says."""
    slot: Mapping[str, Any]
    """``path`` and ``inode`` of the memory that holds ``tensors``."""

    def write_model(self, folder: Path, base: Path) -> None:
        """Fills ``folder`` with the model of this version: what did not arrive is the base's."""
        write_model(folder, base, self.adapter, self.tensors)

    def write_adapter(self, folder: Path) -> None:
        """Fills ``folder`` with the adapter of this version, in PEFT layout; it appears whole.

        Raises:
            EngineError: whole weights arrived.
            TransferError: the disk refused.
        """
        if self.adapter is None:
            raise EngineError("whole weights were published, not an adapter", hint="set transfer.adapter_only = true")
        with whole_folder(folder) as partial:
            (partial / "adapter_config.json").write_text(json.dumps(self.adapter), encoding="utf-8")
            write_safetensors(partial / "adapter_model.safetensors", self.tensors.items())


class Arrivals:
    """One publisher at a time, one version at a time. The methods block; call them outside of the event loop, one by one."""

    def __init__(self) -> None:
        self._receiver: SlotReceiver | WireReceiver | None = None
        self._adapter: Mapping[str, Any] | None = None
        self._slots: list[Mapping[str, Any]] = []

    def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Attaches to a publisher, in place of the one before.

        Raises:
            TransferError: the descriptor does not lead to a publisher.
        """
        receiver = open_receiver(descriptor)
        assert isinstance(receiver, (SlotReceiver, WireReceiver)), "there are no others"
        self.close()
        self._receiver, self._adapter = receiver, descriptor.get("adapter")
        self._slots = (receiver.descriptor if isinstance(receiver, WireReceiver) else descriptor)["slots"]
        return {"tensors": len(receiver.layout.tensors), "layout_hash": receiver.layout.hash}

    @property
    def layout(self) -> list[dict[str, Any]]:
        """Name, shape, dtype and offset in the slot of each tensor; JSON values.

        Raises:
            EngineError: no publisher is attached.
        """
        return self._attached().layout.as_dict()

    def take(self, manifest: Mapping[str, Any]) -> Arrived:
        """The version that ``manifest`` names, beside the one before; :meth:`keep` or :meth:`drop` it afterwards.

        Raises:
            EngineError, TransferError: nothing attached, another layout, a publisher that is gone, a checksum that does not
                fit, or a value that is not finite.
        """
        receiver = self._attached()
        receiver.prepare(manifest)
        try:
            receiver.stage()
            receiver.verify()
            slot = receiver.arrived.slot if isinstance(receiver, WireReceiver) else int(manifest["slot"])
            version, transfer = int(manifest["policy_version"]), receiver.receipt().as_dict()
            return Arrived(version, receiver.tensors(), self._adapter, transfer, self._slots[slot])
        except BaseException:
            receiver.abort()
            raise

    def keep(self) -> None:
        """The version that was taken is served; the publisher may write over the one before."""
        self._attached().commit()

    def drop(self) -> None:
        """The version that was taken is not served."""
        self._attached().abort()

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _attached(self) -> SlotReceiver | WireReceiver:
        if self._receiver is None:
            raise EngineError("no publisher is attached", hint="call attach() with its descriptor first")
        return self._receiver


def write_model(folder: Path, base: Path, adapter: Mapping[str, Any] | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """A Hugging Face folder that appears whole: ``tensors``, or an adapter's parts merged, over the weights of ``base``.

    Raises:
        EngineError, TransferError: the disk refused, or the tensors do not fit the base.
    """
    known = load_tensors(base)
    changed = tensors if adapter is None else dict(merged_tensors(known, (adapter, tensors), str(base)))
    odd = next((name for name, tensor in changed.items() if name not in known or known[name].shape != tensor.shape), None)
    if odd is not None:
        raise EngineError(f"'{odd}' is not in the base model, or of another shape", where=str(base))
    with whole_folder(folder) as partial:
        for pattern in _NOT_WEIGHTS:
            for path in base.glob(pattern):
                if not path.name.endswith(".index.json"):
                    (partial / path.name).write_bytes(path.read_bytes())
        write_safetensors(partial / "model.safetensors", {**known, **changed}.items())


def read_folder(folder: Path, base: Path) -> tuple[Mapping[str, Any] | None, dict[str, torch.Tensor]]:
    """PEFT's configuration, where it is an adapter's folder, and all tensors.

    Raises:
        TransferError: a file is missing or damaged, or the adapter is for another base.
    """
    if not (folder / "adapter_config.json").is_file():
        return None, load_tensors(folder)
    config, tensors = load_adapter(folder)
    require_base(config, str(base), str(folder))
    return config, tensors
