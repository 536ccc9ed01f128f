"""Transports: how bytes get from one machine to another, both ends in one file, one line below each.

Shared memory is not among them: there nothing is fetched, as both ends map the same pages (:mod:`evergrad.transfer.slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evergrad.config import nearest
from evergrad.transfer.layout import TransferError
from evergrad.transfer.transports.base import Inbox, Outbox
from evergrad.transfer.transports.files import FileInbox, FileOutbox
from evergrad.transfer.transports.nixl import NixlInbox, NixlOutbox
from evergrad.transfer.transports.tcp import TcpInbox, TcpOutbox

__all__ = [
    "INBOXES",
    "FileInbox",
    "FileOutbox",
    "Inbox",
    "NixlInbox",
    "NixlOutbox",
    "Outbox",
    "TcpInbox",
    "TcpOutbox",
    "open_inbox",
]

INBOXES: dict[str, Callable[[Mapping[str, Any]], Inbox]] = {
    "files": FileInbox,
    "nixl": NixlInbox,
    "tcp": TcpInbox,
}


def open_inbox(descriptor: Mapping[str, Any]) -> Inbox:
    """The other end of an outbox.

    Raises:
        TransferError: an unknown transport, or the other end cannot be reached.
    """
    name = str(descriptor.get("transport"))
    if name not in INBOXES:
        raise TransferError(f"no transport '{name}'", hint=nearest(name, INBOXES))
    return INBOXES[name](descriptor)
