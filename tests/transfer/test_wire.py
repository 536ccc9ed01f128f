"""Versions that travel: each arrives whole by every transport and codec, or the one before goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.transfer import Placement, SlotReceiver, TransferError, WirePublisher, WireReceiver, make_plan
from evergrad.transfer.layout import TensorSpec
from evergrad.transfer.placements import fused, region, split
from evergrad.transfer.shipment import Item, Payload, Shipment
from evergrad.transfer.transports import FileInbox, FileOutbox, NixlOutbox, Outbox, TcpInbox, TcpOutbox, open_inbox

LAYOUT = {"a.weight": ((60, 50), torch.float32), "b.weight": ((70,), torch.bfloat16), "c.bias": ((), torch.float32)}
MakeOutbox = Callable[[], Outbox]


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in LAYOUT.items()}


def changed(tensors: Mapping[str, torch.Tensor], seed: int, density: float = 0.02) -> dict[str, torch.Tensor]:
    """A few values of each tensor replaced."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < density, tensor * 2 + 1, tensor)
        for name, tensor in tensors.items()
    }


def equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def over_the_wire(value: Any) -> Any:
    """As an engine's routes read it: JSON, and what is null is absent."""

    def without_nulls(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: each for name, each in pairs if each is not None}

    text = json.dumps(value.as_dict() if isinstance(value, Shipment) else value)
    return json.loads(text, object_pairs_hook=without_nulls)


@pytest.fixture(params=["tcp", "files", "memory", "nixl"])
def make_outbox(request: pytest.FixtureRequest, tmp_path: Path) -> MakeOutbox:
    if request.param == "tcp":
        return TcpOutbox
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="needs the extra nixl")
        return NixlOutbox
    # "memory" is fsspec's object store for tests: no folders, no renames.
    url = str(tmp_path / "versions") if request.param == "files" else f"memory://{tmp_path.name}"
    return lambda: FileOutbox(url)


@pytest.fixture
def make_publisher(make_outbox: MakeOutbox) -> Iterator[Callable[..., WirePublisher]]:
    made: list[WirePublisher] = []

    def make(codec: str = "identity", **options: Any) -> WirePublisher:
        made.append(WirePublisher(LAYOUT, make_outbox(), codec, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def receiver_of(publisher: WirePublisher) -> WireReceiver:
    return WireReceiver([over_the_wire(publisher.descriptor)])


@pytest.mark.parametrize("codec", ["identity", "sparse"])
def test_versions_arrive_bit_for_bit(make_publisher: Callable[..., WirePublisher], codec: str) -> None:
    publisher = make_publisher(codec)
    sent = weights(0)
    with receiver_of(publisher) as receiver:
        for version in range(1, 8):
            receiver.accept(over_the_wire(publisher.stage(sent.items(), version)))
            assert receiver.policy_version == version
            assert equal(receiver.tensors(), sent)
            # From nothing changed to everything.
            sent = changed(sent, version, density=(0.0, 0.01, 0.02, 0.3, 1.0, 0.01, 0.02)[version - 1])


@pytest.mark.parametrize(("codec", "error"), [("bfloat16", 2.0**-8), ("float8_block", 2.0**-3)])
def test_lossy_codecs_arrive_within_their_promise(
    make_publisher: Callable[..., WirePublisher], codec: str, error: float
) -> None:
    publisher = make_publisher(codec)
    with receiver_of(publisher) as receiver:
        for version in (1, 2, 3):
            sent = weights(version)
            receiver.accept(publisher.stage(sent.items(), version))
            for name, tensor in receiver.tensors().items():
                assert tensor.dtype == LAYOUT[name][1]
                assert ((tensor - sent[name]).abs() <= error * sent[name].abs().max()).all()


def test_sparse_moves_what_changed_and_says_so(make_publisher: Callable[..., WirePublisher]) -> None:
    publisher, sent = make_publisher("sparse"), weights(0)
    with receiver_of(publisher) as receiver:
        moved = []
        for version in range(1, 4):
            receiver.prepare(publisher.stage(sent.items(), version))
            receiver.stage()
            receiver.verify()
            receipt = receiver.receipt().as_dict()
            receiver.commit()
            moved.append(receipt["bytes"])
            assert receipt["seconds"] > 0
            assert receipt["gb_per_s"] == pytest.approx(receipt["bytes"] / receipt["seconds"] / 1e9, abs=1e-3)
            assert receipt["link_gb_per_s"] > 0
            sent = changed(sent, version)
        assert moved[0] >= 60 * 50 * 4
        assert max(moved[1:]) < 0.1 * moved[0]


def test_who_missed_versions_catches_up(make_publisher: Callable[..., WirePublisher]) -> None:
    publisher, sent = make_publisher("sparse"), weights(0)
    with receiver_of(publisher) as early:
        early.accept(publisher.stage(sent.items(), 1))
        for version in range(2, 6):
            sent = changed(sent, version)
            newest = publisher.stage(sent.items(), version)
            if version % 2 == 0:
                early.accept(newest)
                assert equal(early.tensors(), sent)
        early.accept(newest)
        with receiver_of(publisher) as late:
            late.accept(newest)
            assert equal(late.tensors(), sent)
        assert equal(early.tensors(), sent)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["publish", "stage", "commit", "abort", "broken", "dense"]), max_size=14))
def test_no_order_of_acts_changes_the_live_version(acts: list[str]) -> None:
    sent = {0: weights(0)}
    with WirePublisher(LAYOUT, TcpOutbox(), "sparse") as publisher, receiver_of(publisher) as receiver:
        newest = publisher.stage(sent[0].items(), 0)
        live: int | None = None
        for act in acts:
            version = max(sent)
            try:
                if act in ("publish", "dense"):
                    sent[version + 1] = changed(sent[version], version, 0.9 if act == "dense" else 0.02)
                    newest = publisher.stage(sent[version + 1].items(), version + 1)
                elif act == "stage":
                    receiver.prepare(newest)
                    receiver.stage()
                elif act == "broken":
                    receiver.prepare(with_items(newest, lambda item: replace(item, checksum="0" * 16)))
                    receiver.stage()
                elif act == "commit":
                    receiver.verify()
                    receiver.commit()
                    live = receiver.policy_version
                else:
                    receiver.abort()
            except TransferError:
                receiver.abort()
            assert receiver.policy_version == live
        receiver.abort()
        if live is not None:
            assert equal(receiver.tensors(), sent[live])
        receiver.accept(newest)
        assert equal(receiver.tensors(), sent[max(sent)])


def with_items(shipment: Shipment, change: Callable[[Item], Item]) -> Shipment:
    payloads = tuple(replace(p, items=tuple(change(item) for item in p.items)) for p in shipment.payloads)
    return replace(shipment, payloads=payloads)


def lies(good: Shipment) -> dict[str, Shipment]:
    payloads = good.payloads
    return {
        "checksum": with_items(good, lambda item: replace(item, checksum="0" * 16)),
        "other plan": replace(good, plan_hash="0" * 16),
        "renamed": with_items(good, lambda item: replace(item, key=item.key.replace("a.weight", "x.weight"))),
        "missing": replace(good, payloads=tuple(replace(p, items=p.items[1:]) for p in payloads)),
        "doubled": replace(good, payloads=tuple(replace(p, items=(*p.items, p.items[0])) for p in payloads)),
        "wrong base": replace(good, payloads=tuple(replace(p, base_version=77) for p in payloads)),
        "gone": replace(good, payloads=tuple(replace(p, name="9-no") for p in payloads)),
        "too long": with_items(good, lambda item: replace(item, parts=tuple(longer(part) for part in item.parts))),
        "other codec": with_items(good, lambda item: replace(item, codec="float8_block")),
        "no codec": with_items(good, lambda item: replace(item, codec="zip")),
    }


def longer(part: TensorSpec) -> TensorSpec:
    return replace(part, offset=part.offset + (1 << 20))


@pytest.mark.parametrize("lie", list(lies(Shipment(1, "", ()))))
@pytest.mark.parametrize("codec", ["identity", "sparse"])
def test_a_shipment_that_lies_leaves_the_old_version(
    make_publisher: Callable[..., WirePublisher], codec: str, lie: str
) -> None:
    publisher, old = make_publisher(codec), weights(0)
    new = changed(old, 1)
    with receiver_of(publisher) as receiver:
        receiver.accept(publisher.stage(old.items(), 1))
        good = publisher.stage(new.items(), 2)
        with pytest.raises(TransferError):
            receiver.accept(lies(good)[lie])
        receiver.abort()
        assert receiver.policy_version == 1
        assert equal(receiver.tensors(), old)
        receiver.accept(good)
        assert equal(receiver.tensors(), new)


def test_changes_for_other_weights_are_found_out() -> None:
    with (
        WirePublisher(LAYOUT, TcpOutbox(), "sparse") as one,
        WirePublisher(LAYOUT, TcpOutbox(), "sparse") as other,
        receiver_of(one) as receiver,
    ):
        receiver.accept(one.stage(weights(0).items(), 1))
        other.stage(weights(5).items(), 1)  # the same number, other weights
        wrong = other.stage(changed(weights(5), 1).items(), 2)
        receiver._inboxes = [open_inbox(other.descriptor)]
        with pytest.raises(TransferError, match="checksum"):
            receiver.accept(wrong)
        assert receiver.policy_version == 1
        assert equal(receiver.tensors(), weights(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(make_publisher: Callable[..., WirePublisher], value: float) -> None:
    publisher, old = make_publisher("sparse"), weights(0)
    with receiver_of(publisher) as receiver:
        receiver.accept(publisher.stage(old.items(), 1))
        for version, name in enumerate(LAYOUT, start=2):
            new = {**old, name: old[name].clone()}
            new[name].view(-1)[-1] = value
            with pytest.raises(TransferError, match=f"'{name}' has values that are not finite"):
                receiver.accept(publisher.stage(new.items(), version))
        assert receiver.policy_version == 1
        assert equal(receiver.tensors(), old)


def test_a_truncated_payload_is_refused(tmp_path: Path) -> None:
    with WirePublisher(LAYOUT, FileOutbox(str(tmp_path))) as publisher, receiver_of(publisher) as receiver:
        receiver.accept(publisher.stage(weights(1).items(), 1))
        good = publisher.stage(weights(2).items(), 2)
        path = tmp_path / f"{good.payloads[0].name}.payload"
        content = path.read_bytes()
        for damaged in (content[:-9], content[: len(content) // 2], b"", content[:40] + b"\xff" + content[41:]):
            path.write_bytes(damaged)
            with pytest.raises(TransferError, match=r"are there|checksum"):
                receiver.accept(good)
            assert equal(receiver.tensors(), weights(1))
        path.unlink()
        with pytest.raises(TransferError, match="gone"):
            receiver.accept(good)
        path.write_bytes(content)
        receiver.accept(good)
        assert equal(receiver.tensors(), weights(2))


def test_a_slow_reader_of_files_that_are_replaced_all_the_time_sees_whole_versions(tmp_path: Path) -> None:
    publisher = WirePublisher(LAYOUT, FileOutbox(str(tmp_path), keep=1, snapshot_every=3), "sparse")
    sent = {1: weights(0)}
    publisher.stage(sent[1].items(), 1)
    stop, seen = threading.Event(), set[int]()

    def publish() -> None:
        version = 1
        while not stop.is_set() and version < 2000:
            sent[version + 1] = changed(sent[version], version)
            version += 1
            publisher.stage(sent[version].items(), version)

    writer = threading.Thread(target=publish)
    with receiver_of(publisher) as receiver:
        inbox = FileInbox(publisher.descriptor)
        writer.start()
        try:
            while len(seen) < 4 and writer.is_alive():
                try:
                    receiver.accept(inbox.newest())
                except TransferError:
                    receiver.abort()  # overtaken, and told so
                if receiver.policy_version is not None:
                    seen.add(receiver.policy_version)
                    assert equal(receiver.tensors(), sent[receiver.policy_version])
        finally:
            stop.set()
            writer.join()
        receiver.accept(inbox.newest())
        assert equal(receiver.tensors(), sent[max(sent)])
    assert seen, "no version came through while others were written"
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert len(list(tmp_path.glob("*.payload"))) <= 1 + 4 + 1  # the probe, a snapshot and what stands on it
    publisher.close()


def test_a_publisher_of_files_begins_in_a_clean_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    with WirePublisher(LAYOUT, FileOutbox(str(tmp_path))) as publisher:
        publisher.stage(weights(0).items(), 99)
    with WirePublisher(LAYOUT, FileOutbox(str(tmp_path))) as publisher:
        with pytest.raises(TransferError, match="no version"):
            FileInbox(publisher.descriptor).newest()
        shipment = publisher.stage(weights(0).items(), 1)
        assert FileInbox(publisher.descriptor).newest() == shipment
    assert (tmp_path / "notes.json").exists()


def test_a_reader_that_is_overtaken_over_tcp_is_cut_off_and_told() -> None:
    with WirePublisher(LAYOUT, TcpOutbox()) as publisher, receiver_of(publisher) as receiver:
        old = publisher.stage(weights(1).items(), 1)
        publisher.stage(weights(2).items(), 2)
        publisher.begin()  # writes over version 1
        with pytest.raises(TransferError, match="not offered"):
            receiver.accept(old)
        publisher.abort()
        receiver.accept(publisher.stage(weights(3).items(), 3))
        assert equal(receiver.tensors(), weights(3))


def test_tcp_tells_nothing_to_strangers_and_survives_them() -> None:
    import socket

    outbox = TcpOutbox()
    address = (outbox.descriptor["host"], outbox.descriptor["port"])
    for said in (
        b"GET / HTTP/1.1\r\n\r\n\n",
        b"{}\n",
        b"[]\n",
        b"x" * 5000,
        b'{"key": "no", "name": "probe", "start": 0, "stop": 9}\n',
    ):
        with socket.create_connection(address, timeout=10) as stranger:
            stranger.sendall(said)
            assert stranger.recv(100).startswith(b"-")
    with pytest.raises(TransferError, match="wrong key"):
        TcpInbox({**outbox.descriptor, "key": "0" * 32})
    inbox = TcpInbox(outbox.descriptor)
    with pytest.raises(TransferError, match="were asked for"):
        inbox.fetch("probe", 1 << 40, memoryview(bytearray(10)))
    inbox.fetch("probe", 0, memoryview(bytearray(10)))
    outbox.close()
    with pytest.raises(TransferError):
        inbox.fetch("probe", 0, memoryview(bytearray(10)))


@pytest.mark.parametrize("size", [0, 1, 1000, (4 << 20) - 1, (4 << 20) + 1, 9 << 20])
@pytest.mark.parametrize("streams", [1, 3, 8])
def test_every_byte_of_any_range_arrives_in_its_place(size: int, streams: int) -> None:
    outbox = TcpOutbox()
    content = torch.randint(0, 256, (size + 7,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)).numpy()
    outbox.offer(Shipment(1, "", ()), {"1-a": memoryview(content)})
    inbox = TcpInbox(outbox.descriptor)
    inbox.streams = streams
    got = bytearray(size)
    inbox.fetch("1-a", 5, memoryview(got))
    assert bytes(got) == content[5 : 5 + size].tobytes()
    inbox.close()
    outbox.close()


def test_four_ranks_publish_to_two_with_fused_weights() -> None:
    shapes = {"q": (8, 4), "k": (4, 4), "v": (4, 4), "o": (4, 8), "norm": (4,)}
    whole = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in shapes.items()}
    source = split(shapes, dict.fromkeys(shapes, 0), hosts="aabb")
    parallel = split(shapes, {"q": 0, "k": 0, "v": 0, "o": 1, "norm": None}, hosts="cd")
    plan = make_plan(source, fused(parallel, {"qkv": ["q", "k", "v"]}))
    publishers = [
        WirePublisher(
            {n: (s, torch.float32) for n, s in source.buffers(rank).items()}, TcpOutbox(), "sparse", plan=plan, rank=rank
        )
        for rank in range(4)
    ]
    destination = fused(parallel, {"qkv": ["q", "k", "v"]})
    receivers = [
        WireReceiver(
            [one.descriptor for one in publishers],
            plan=plan,
            rank=rank,
            layout={n: (s, torch.float32) for n, s in destination.buffers(rank).items()},
        )
        for rank in range(2)
    ]
    for version in (1, 2, 3):
        shipments = []
        for rank, publisher in enumerate(publishers):
            parts = {s.tensor: whole[s.tensor][tuple(slice(*e) for e in s.box)] for s in source.shards if s.place.rank == rank}
            shipments.append(publisher.stage(parts.items(), version))
        for rank, receiver in enumerate(receivers):
            receiver.accept(shipments)
            held = receiver.tensors()
            assert torch.equal(held["qkv"], torch.cat([whole[name].chunk(2)[rank] for name in "qkv"]))
            assert torch.equal(held["o"], whole["o"].chunk(2, dim=1)[rank])
            assert torch.equal(held["norm"], whole["norm"])
        with pytest.raises(TransferError, match="publishers must give"):
            receivers[0].prepare(shipments[:3])
        whole = {name: changed({name: tensor}, version, 0.1)[name] for name, tensor in whole.items()}
    for one in (*publishers, *receivers):
        one.close()


def test_a_host_with_several_engines_is_served_once() -> None:
    with (
        WirePublisher(LAYOUT, TcpOutbox()) as publisher,
        receiver_of(publisher) as first,
        SlotReceiver(over_the_wire(first.descriptor)) as second,
    ):
        for version in range(1, 5):
            first.accept(publisher.stage(weights(version).items(), version))
            second.accept(over_the_wire(first.arrived.as_dict()))
            assert equal(second.tensors(), weights(version))


def test_a_number_that_does_not_grow_is_published_whole() -> None:
    with WirePublisher(LAYOUT, TcpOutbox(), "sparse") as publisher:
        publisher.stage(weights(0).items(), 5)
        assert [p.base_version for p in publisher.stage(weights(0).items(), 5).payloads] == [None]
        assert [p.base_version for p in publisher.stage(weights(0).items(), 6).payloads] == [5, None]
        assert [p.base_version for p in publisher.stage(weights(9).items(), 7).payloads] == [None]  # all changed


def payload(version: int, base: int | None, size: int = 1) -> Payload:
    return Payload(f"{version}-{base}", version, base, "sparse", size, ())


def test_the_way_to_a_version_is_the_cheapest_from_what_is_held() -> None:
    offered = Shipment(4, "", (payload(4, 3), payload(3, 2), payload(2, None, 10), payload(4, None, 10)))
    assert [p.name for p in offered.route(3)] == ["4-3"]
    assert [p.name for p in offered.route(2)] == ["3-2", "4-3"]
    assert [p.name for p in offered.route(None)] == ["4-None"]
    assert [p.name for p in offered.route(7)] == ["4-None"]
    with pytest.raises(TransferError, match="stands on version 3, and version 2 is held"):
        Shipment(4, "", (payload(4, 3),)).route(2)


def test_what_is_no_descriptor_or_shipment_is_refused() -> None:
    with WirePublisher(LAYOUT, TcpOutbox()) as publisher, receiver_of(publisher) as receiver:
        for data in ({}, {"policy_version": 1}, {"policy_version": 1, "plan_hash": "", "payloads": [{}]}):
            with pytest.raises(TransferError, match="not a shipment"):
                receiver.prepare(data)
        for early in (receiver.stage, receiver.verify, receiver.receipt, receiver.commit):
            with pytest.raises(TransferError, match="prepare"):
                early()
        for change in ({"transport": "pigeon"}, {"plan_hash": "0"}, {"tensors": [{}]}, {"port": "x"}, {"port": 1}):
            with pytest.raises(TransferError):
                WireReceiver([{**publisher.descriptor, **change}])
    with pytest.raises(TransferError, match="not a place"):
        FileOutbox("pigeon://coop")
    shape_of = make_plan(*[Placement.whole({"a": (2,)})] * 2)
    assert shape_of.copies[0].key == "0/a[0:2]"
    assert region({"a": torch.arange(2)}, shape_of.copies[0].source, (2,)).tolist() == [0, 1]
