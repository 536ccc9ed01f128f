"""A weight-transfer engine of vLLM's: reads a version out of the publisher's shared memory. Runs inside vLLM's workers.

The memory is proved and held by the run's own process for as long as the update lasts, so nothing is checked or locked here.
vLLM's loader takes Hugging Face names and fuses, shards and packs by itself; what was not published is read from the base
model's files.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class SlotInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What stays the same from version to version."""

    tensors: list[dict[str, Any]]
    """``name``, ``shape``, ``dtype`` and ``offset`` in the slot, in bytes."""
    base: str
    """Folder of the model that the publisher trains."""


@dataclass
class SlotUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where a version lies."""

    path: str
    inode: int


class SlotWeightTransferEngine(WeightTransferEngine[SlotInitInfo, SlotUpdateInfo]):  # type: ignore[misc]
    """Loads whole versions through vLLM's layer by layer reload."""

    init_info_cls = SlotInitInfo
    update_info_cls = SlotUpdateInfo
    _published: SlotInitInfo | None = None

    def init_transfer_engine(self, init_info: SlotInitInfo) -> None:
        self._published = init_info

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SlotUpdateInfo) -> None:
        if self._published is None:
            raise ValueError("no publisher: POST /init_weight_transfer_engine first")
        self.model.load_weights(self._named(self._published, update_info))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _pack_heads_again(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's, which waits for an accelerator that a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def shutdown(self) -> None:
        self._published = None

    def _named(self, published: SlotInitInfo, update: SlotUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """All of the model's tensors, in the order of its layers, so that few wait for others of their layer."""
        slot = dict(_slot_tensors(published.tensors, update))
        for path in sorted(Path(published.base).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, slot[name] if name in slot else file.get_tensor(name)


def _pack_heads_again(model: torch.nn.Module) -> None:
    """On a CPU vLLM multiplies by packed copies of its matrices. The reload renews that of a layer whose weights were loaded;
    an output embedding that is tied to the input's has none of its own, and would go on with the old ones."""
    for layer in model.modules():
        if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)


def _slot_tensors(tensors: list[dict[str, Any]], update: SlotUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    descriptor = os.open(update.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != update.inode:
            raise ValueError(f"what is at {update.path} is not the publisher's slot")
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for spec in tensors:
        dtype = getattr(torch, spec["dtype"])
        size = dtype.itemsize
        for length in spec["shape"]:
            size *= length
        yield spec["name"], whole[spec["offset"] : spec["offset"] + size].view(dtype).view(spec["shape"])
