"""The two ends of a transfer, whatever lies between them: which classes a configuration or a descriptor asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from evergrad.transfer.config import TransferConfig
from evergrad.transfer.layout import Layout, Manifest
from evergrad.transfer.link import Receipt
from evergrad.transfer.publisher import WirePublisher
from evergrad.transfer.receiver import WireReceiver
from evergrad.transfer.shipment import Shipment
from evergrad.transfer.slots import SlotPublisher, SlotReceiver
from evergrad.transfer.transports import FileOutbox, NixlOutbox, Outbox, TcpOutbox


class Publisher(Protocol):
    """The end that has the weights."""

    @property
    def layout(self) -> Layout: ...

    @property
    def descriptor(self) -> dict[str, Any]:
        """All that a receiver needs to attach; JSON values."""
        ...

    @property
    def slots(self) -> dict[str, Any]:
        """All that another process of this machine needs to write into the memory of a version, with a ``BoxWriter``."""
        ...

    @property
    def writing(self) -> int:
        """The slot between :meth:`begin` and :meth:`finish`."""
        ...

    def begin(self) -> dict[str, torch.Tensor]:
        """Views, each to be filled before :meth:`finish`: by :meth:`write`, or by the caller, who may
        say so with :meth:`written`."""
        ...

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Has a tensor copied into its view; it must not change before :meth:`finish`."""
        ...

    def written(self, name: str) -> None:
        """Says that a view has been filled by the caller, so that its checksum is computed meanwhile."""
        ...

    def finish(self, policy_version: int) -> Manifest | Shipment:
        """Seals what was written, and says what a receiver needs to take it."""
        ...

    def abort(self) -> None:
        """Forgets what was written since :meth:`begin`; does nothing after :meth:`finish`."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The end that serves. Each method but ``commit`` may run beside the live version, and whatever fails leaves that live."""

    @property
    def layout(self) -> Layout: ...

    def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Takes note of a version that is to come."""
        ...

    def stage(self) -> None:
        """Brings it here, beside the live one."""
        ...

    def verify(self) -> None:
        """Proves it."""
        ...

    def receipt(self) -> Receipt:
        """What it took so far; between ``prepare`` and ``commit``."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """The staged version, else the live one."""
        ...

    def commit(self) -> None:
        """Makes it live."""
        ...

    def abort(self) -> None:
        """Forgets it; the live one is untouched."""
        ...

    def close(self) -> None: ...


def open_publisher(config: TransferConfig, layout: Mapping[str, tuple[Sequence[int], torch.dtype | str]]) -> Publisher:
    """
    Raises:
        TransferError: no memory, a port or a folder that cannot be used, no NIXL, or a dtype that cannot travel.
    """
    if config.transport == "shared_memory":
        return SlotPublisher(layout)
    outbox: Outbox
    if config.transport == "tcp":
        outbox = TcpOutbox(config.host)
    elif config.transport == "nixl":
        outbox = NixlOutbox()
    else:
        assert config.url is not None, "checked by the configuration"
        outbox = FileOutbox(config.url, config.keep)
    return WirePublisher(layout, outbox, config.codec)


def open_receiver(descriptor: Mapping[str, Any]) -> Receiver:
    """
    Raises:
        TransferError: the descriptor is malformed, or does not lead to a publisher.
    """
    return WireReceiver([descriptor]) if "transport" in descriptor else SlotReceiver(descriptor)
