"""Moves named tensors with a policy version from one process to another.

::

    placements ──make_plan──▶ plan ──codec──▶ what travels ──transport──▶ receiver: prepare, stage, verify, commit or abort

Within one machine a :class:`SlotPublisher` owns two slots of shared memory and a :class:`SlotReceiver` maps them: new weights
are written to the slot nobody reads, proved by checksum, and become live when the receiver commits. Between machines a
:class:`WirePublisher` offers encoded tensors over TCP or in files, and a :class:`WireReceiver` brings them into slots of its
own. Between days, a folder in Hugging Face layout appears whole, by a rename, or not at all. The room knows tensors by name and
never sees a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evergrad.transfer.layout import Layout, Manifest, TensorSpec, TransferError
from evergrad.transfer.plan import Placement, make_plan

if TYPE_CHECKING:
    from evergrad.transfer.adapters import (
        NamedTensors,
        load_adapter,
        lora_scale,
        merge_lora,
        merged_tensors,
        require_base,
        row_norms,
    )
    from evergrad.transfer.boxes import BoxWriter
    from evergrad.transfer.config import TransferConfig
    from evergrad.transfer.ends import Publisher, Receiver, open_publisher, open_receiver
    from evergrad.transfer.files import load_tensors, save_tensors, whole_folder
    from evergrad.transfer.publisher import WirePublisher
    from evergrad.transfer.receiver import WireReceiver
    from evergrad.transfer.slots import SlotPublisher, SlotReceiver

__all__ = [
    "BoxWriter",
    "Layout",
    "Manifest",
    "NamedTensors",
    "Placement",
    "Publisher",
    "Receiver",
    "SlotPublisher",
    "SlotReceiver",
    "TensorSpec",
    "TransferConfig",
    "TransferError",
    "WirePublisher",
    "WireReceiver",
    "load_adapter",
    "load_tensors",
    "lora_scale",
    "make_plan",
    "merge_lora",
    "merged_tensors",
    "open_publisher",
    "open_receiver",
    "require_base",
    "row_norms",
    "save_tensors",
    "whole_folder",
]

_HOMES = {
    "BoxWriter": "boxes",
    "NamedTensors": "adapters",
    "Publisher": "ends",
    "Receiver": "ends",
    "SlotPublisher": "slots",
    "SlotReceiver": "slots",
    "TransferConfig": "config",
    "WirePublisher": "publisher",
    "WireReceiver": "receiver",
    "load_adapter": "adapters",
    "load_tensors": "files",
    "lora_scale": "adapters",
    "merge_lora": "adapters",
    "merged_tensors": "adapters",
    "open_publisher": "ends",
    "open_receiver": "ends",
    "require_base": "adapters",
    "row_norms": "adapters",
    "save_tensors": "files",
    "whole_folder": "files",
}


def __getattr__(name: str) -> Any:
    # The parts that need torch load on first use, so that clients of a trainer or engine stay light.
    if name not in _HOMES:
        raise AttributeError(f"module 'evergrad.transfer' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"evergrad.transfer.{_HOMES[name]}"), name)
