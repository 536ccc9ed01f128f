"""What only the transport over NIXL can get wrong: memory that is read while it changes, and a publisher that is gone."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from evergrad.transfer import TransferConfig, TransferError, WirePublisher, WireReceiver, open_publisher, open_receiver
from evergrad.transfer.shipment import Shipment
from evergrad.transfer.transports import NixlInbox, NixlOutbox

INSTALLED = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not INSTALLED, reason="needs the extra nixl")
LAYOUT = {"w": ((1 << 20,), torch.float32)}


@pytest.mark.skipif(INSTALLED, reason="NIXL is installed")
def test_without_nixl_both_ends_say_what_to_install() -> None:
    with pytest.raises(TransferError, match=r"evergrad\[nixl\]"):
        open_publisher(TransferConfig(transport="nixl"), LAYOUT)
    with pytest.raises(TransferError, match=r"evergrad\[nixl\]"):
        NixlInbox({"agent": "AAAA", "directory": 1})


@pytest.mark.parametrize("odd", [{}, {"agent": "AAAA"}, {"agent": "AAAA", "directory": "x"}, {"agent": "=", "directory": 1}])
def test_what_is_no_descriptor_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="not a descriptor"):
        NixlInbox(odd)


@needs_nixl
@pytest.mark.parametrize("size", [0, 1, 1000, (16 << 20) - 1, (16 << 20) + 1, 40 << 20])
def test_every_byte_of_any_range_arrives_in_its_place(size: int) -> None:
    outbox = NixlOutbox()
    content = torch.randint(0, 256, (size + 7,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)).numpy()
    outbox.offer(Shipment(1, "", ()), {"1-a": memoryview(content)[2:]})
    inbox = NixlInbox(outbox.descriptor)
    got = bytearray(size)
    inbox.fetch("1-a", 3, memoryview(got))
    assert bytes(got) == content[5 : 5 + size].tobytes()
    with pytest.raises(TransferError, match="were asked for"):
        inbox.fetch("1-a", 6, memoryview(bytearray(size + 7)))
    outbox.withdraw(frozenset({"1-a"}))
    with pytest.raises(TransferError, match="not offered"):
        inbox.fetch("1-a", 0, memoryview(bytearray(1)))
    inbox.close()
    outbox.close()
    with pytest.raises(TransferError):
        inbox.fetch("probe", 0, memoryview(bytearray(10)))


PUBLISHER = """
import json, sys, torch
from evergrad.transfer import WirePublisher
from evergrad.transfer.transports import NixlOutbox
publisher = WirePublisher({"w": ((1 << 20,), torch.float32)}, NixlOutbox())
version = 0
print(json.dumps([publisher.descriptor, None]), flush=True)
for line in sys.stdin:  # how many versions to publish, one after another
    for _ in range(int(line)):
        version += 1
        shipment = publisher.stage([("w", torch.full((1 << 20,), float(version)))], version)
        print(json.dumps([publisher.descriptor, shipment.as_dict()]), flush=True)
"""


class Elsewhere:
    """A publisher in a process of its own."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", PUBLISHER], stdin=pipe, stdout=pipe, text=True)
        self.descriptor, _ = self.said()

    def said(self) -> tuple[dict[str, object], dict[str, object]]:
        assert self.process.stdout is not None
        line = ""
        while not line.startswith("["):
            line = self.process.stdout.readline()
            assert line, "the publisher ended"
        descriptor, shipment = json.loads(line)
        return descriptor, shipment

    def publish(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    one = Elsewhere()
    yield one
    one.process.kill()
    one.process.communicate()


@needs_nixl
def test_versions_that_are_overtaken_arrive_whole_or_not_at_all(elsewhere: Elsewhere) -> None:
    """The publisher writes one after another into the memory that is being read."""
    with open_receiver(elsewhere.descriptor) as receiver:
        assert isinstance(receiver, WireReceiver)
        elsewhere.publish(30)
        came = 0
        for _ in range(30):
            _, shipment = elsewhere.said()
            try:
                receiver.accept(shipment)
                came += 1
            except TransferError:
                receiver.abort()
            if receiver.policy_version is not None:
                held = receiver.tensors()["w"]
                assert torch.equal(held, torch.full_like(held, float(receiver.policy_version)))
        assert receiver.policy_version == 30, "the last one is not overtaken"
        assert came >= 1


@needs_nixl
def test_a_publisher_that_was_killed_leaves_the_old_version(elsewhere: Elsewhere) -> None:
    with open_receiver(elsewhere.descriptor) as receiver:
        assert isinstance(receiver, WireReceiver)
        elsewhere.publish(2)
        receiver.accept(elsewhere.said()[1])
        _, second = elsewhere.said()
        elsewhere.process.send_signal(signal.SIGKILL)
        elsewhere.process.wait()
        with pytest.raises(TransferError, match="cannot be reached"):
            receiver.accept(second)
        assert receiver.policy_version == 1
        assert torch.equal(receiver.tensors()["w"], torch.ones(1 << 20))


@needs_nixl
def test_a_directory_that_is_none_is_not_believed() -> None:
    outbox = NixlOutbox()
    address = outbox.descriptor["directory"]
    outbox._directory[20] ^= 1
    with pytest.raises(TransferError, match="not the publisher's directory"):
        NixlInbox(outbox.descriptor)
    outbox._directory[20] ^= 1
    NixlInbox(outbox.descriptor).close()
    with pytest.raises(TransferError):
        NixlInbox({**outbox.descriptor, "directory": address + (1 << 40)})
    outbox.close()


@needs_nixl
def test_a_buffer_is_offered_to_nixl_once_whatever_part_of_it_is_sent() -> None:
    outbox = NixlOutbox()
    with WirePublisher(LAYOUT, outbox, "sparse") as publisher, WireReceiver([publisher.descriptor]) as receiver:
        tensor = torch.zeros(1 << 20)
        known = set[int]()
        for version in range(1, 9):
            tensor[: 100 * version] += 1
            receiver.accept(publisher.stage([("w", tensor)], version))
            assert torch.equal(receiver.tensors()["w"], tensor)
            known.add(len(outbox._registered))
        assert max(known) <= 2 + 2 + 2, "directory, probe, two slots, and what is packed for each"
