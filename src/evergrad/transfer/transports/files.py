"""Bytes in a folder or an object store that both ends reach, through fsspec: ``/shared/run``, ``s3://bucket/run``, …

A version is two objects, written in this order: ``<name>.payload`` and ``<version>.json``, the shipment that names it. Who
reads the second finds the first whole. Payloads go when no version that is still listed needs them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import fsspec

from evergrad.transfer.layout import TransferError
from evergrad.transfer.shipment import Payload, Shipment

_CHUNK = 8 << 20
_PROBE = "probe"
_PROBE_BYTES = 16 << 20
_VERSION = re.compile(r"(\d+)\.json$")
_OURS = re.compile(r"/(\d+\.json|\d+-[0-9a-f]+\.payload)$")


class FileOutbox:
    """Writes versions under ``url`` and removes old ones.

    Args:
        url: A folder, with the protocol of fsspec where it is not a local one.
        keep: Newest versions that stay; what they stand on stays with them.
        snapshot_every: After how many versions that stand on others one is written whole again.
        options: Of fsspec's file system, such as an endpoint. They are part of the descriptor: give no secrets here, but in
            the environment of both ends.

    Raises:
        TransferError: no such protocol, or the place cannot be written.
    """

    def __init__(self, url: str, keep: int = 2, snapshot_every: int = 16, options: Mapping[str, Any] | None = None) -> None:
        self._url, self._options = url, dict(options or {})
        self._keep, self._snapshot_every = max(1, keep), snapshot_every
        self._store = _Store(url, self._options)
        self._listed: list[Shipment] = []
        # Versions of an earlier run would pass for this one's, as they may have higher numbers.
        for name in self._store.names():
            if _OURS.search(name):
                self._store.remove(name.rsplit("/", 1)[-1])
        self._store.write(f"{_PROBE}.payload", memoryview(bytes(_PROBE_BYTES)))

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"transport": "files", "url": self._url, "options": self._options}

    def offer(self, shipment: Shipment, memory: Mapping[str, memoryview]) -> Shipment:
        # One payload is written: the smallest. Who does not hold what it stands on finds that in the older ones.
        new = min(shipment.payloads, key=lambda payload: payload.num_bytes)
        chain = self._chain(new)
        if chain is None or len(chain) > self._snapshot_every:
            new = next(payload for payload in shipment.payloads if payload.base_version is None)
            chain = [new]
        self._store.write(f"{new.name}.payload", memory[new.name][: new.num_bytes])
        whole = replace(shipment, payloads=tuple(chain))
        self._store.write(f"{shipment.policy_version}.json", memoryview(json.dumps(whole.as_dict()).encode()))
        self._listed.append(whole)
        self._remove_old()
        return whole

    def withdraw(self, names: frozenset[str]) -> None:
        """Does nothing: what was written is a copy."""

    def close(self) -> None:
        """Leaves the versions where they are."""

    def _chain(self, newest: Payload) -> list[Payload] | None:
        """The payload and all that it stands on; None when some of that is not there any more."""
        older = {p.policy_version: p for s in self._listed for p in s.payloads}
        chain = [newest]
        while (base := chain[-1].base_version) is not None:
            if base not in older:
                return None
            chain.append(older[base])
        return chain

    def _remove_old(self) -> None:
        gone, self._listed = self._listed[: -self._keep], self._listed[-self._keep :]
        needed = {payload.name for shipment in self._listed for payload in shipment.payloads}
        for shipment in gone:
            # The name first: who still finds it may find it without its payload, and is told so.
            self._store.remove(f"{shipment.policy_version}.json")
        for payload in {p for s in gone for p in s.payloads if p.name not in needed}:
            self._store.remove(f"{payload.name}.payload")


class FileInbox:
    """Reads what a :class:`FileOutbox` wrote, whether or not it still runs.

    Raises:
        TransferError: no such protocol or place.
    """

    def __init__(self, descriptor: Mapping[str, Any]) -> None:
        try:
            self._store = _Store(str(descriptor["url"]), dict(descriptor.get("options") or {}))
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"not a descriptor of a file outbox: {error!r}") from error
        started = time.perf_counter()
        self._store.read_into(f"{_PROBE}.payload", 0, memoryview(bytearray(_PROBE_BYTES)))
        self.link_gb_per_s = _PROBE_BYTES / (time.perf_counter() - started) / 1e9

    def newest(self) -> Shipment:
        """The newest version that is there.

        Raises:
            TransferError: there is none.
        """
        versions = sorted(int(match[1]) for name in self._store.names() if (match := _VERSION.search(name)))
        if not versions:
            raise TransferError("no version has been published", where=self._store.where(""))
        return Shipment.from_dict(self._store.read_json(f"{versions[-1]}.json"))

    def fetch(self, name: str, start: int, into: memoryview) -> None:
        self._store.read_into(f"{name}.payload", start, into)

    def close(self) -> None:
        """There is nothing to let go of."""


class _Store:
    """One folder of a file system; every trouble is a :class:`TransferError` that names the place."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            self._files, self._root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
            self._files.makedirs(self._root, exist_ok=True)
        except (OSError, ValueError, ImportError) as error:
            hint = "the protocol may need a package of its own, such as s3fs"
            raise TransferError(f"not a place for weights: {error}", where=url, hint=hint) from error

    def where(self, name: str) -> str:
        return f"{self._root}/{name}"

    def write(self, name: str, content: memoryview) -> None:
        try:
            # Becomes visible whole or not at all: by a rename on a disk, by the end of the upload in an object store.
            with self._files.transaction, self._files.open(self.where(name), "wb") as file:
                for start in range(0, len(content), _CHUNK):
                    file.write(content[start : start + _CHUNK])
        except OSError as error:
            raise TransferError(f"could not write: {error.strerror or error}", where=self.where(name)) from error

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        try:
            with self._files.open(self.where(name), "rb", block_size=_CHUNK) as file:
                file.seek(start)
                got = 0
                while got < len(into):
                    count = file.readinto(into[got : got + _CHUNK])
                    if not count:
                        raise TransferError(f"{got} of {len(into)} bytes are there", where=self.where(name))
                    got += count
        except FileNotFoundError as error:
            hint = "it may be too old; ask for the newest version"
            raise TransferError("the payload is gone", where=self.where(name), hint=hint) from error
        except OSError as error:
            raise TransferError(f"could not read: {error.strerror or error}", where=self.where(name)) from error

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._files.cat_file(self.where(name)))
        except FileNotFoundError as error:
            raise TransferError("the version is gone", where=self.where(name), hint="ask for the newest") from error
        except (OSError, ValueError) as error:
            raise TransferError(f"unreadable shipment: {error}", where=self.where(name)) from error
        return found

    def names(self) -> list[str]:
        self._files.invalidate_cache(self._root)
        return [str(name) for name in self._files.ls(self._root, detail=False)]

    def remove(self, name: str) -> None:
        # A version too many costs room, and is no reason to stop.
        with suppress(OSError):
            self._files.rm_file(self.where(name))
