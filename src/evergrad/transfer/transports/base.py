"""What a transport is: one end that offers bytes under a name, and one that fetches them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from evergrad.transfer.shipment import Shipment


class Outbox(Protocol):
    """A publisher's end. One file for both ends of a transport; a line in ``transports/__init__.py`` names it."""

    @property
    def descriptor(self) -> Mapping[str, Any]:
        """All that the other end needs to fetch; JSON values."""
        ...

    def offer(self, shipment: Shipment, memory: Mapping[str, memoryview]) -> Shipment:
        """Lets the payloads of a version be fetched.

        Args:
            memory: Bytes by payload name. They stay as they are until the payload is withdrawn.

        Returns:
            The shipment, with whatever older payloads it can be made of besides.

        Raises:
            TransferError: the transport refused; nothing new is offered.
        """
        ...

    def withdraw(self, names: frozenset[str]) -> None:
        """The memory of these payloads will be written: who still fetches them is cut off."""
        ...

    def close(self) -> None: ...


class Inbox(Protocol):
    """A receiver's end."""

    link_gb_per_s: float
    """What this link carried when it was opened, of bytes that mean nothing; 10⁹ bytes a second."""

    def fetch(self, name: str, start: int, into: memoryview) -> None:
        """Fills ``into`` with the bytes of a payload from ``start`` on.

        Raises:
            TransferError: the payload is withdrawn, or the other end is gone, slow or short.
        """
        ...

    def close(self) -> None: ...
