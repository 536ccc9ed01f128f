"""Two slots of shared memory: whatever goes wrong, a reader sees one whole version, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.transfer import Manifest, SlotPublisher, SlotReceiver, TransferError

LAYOUT = {"a.weight": ((3, 5), torch.float32), "b.weight": ((7,), torch.bfloat16), "c.weight": ((2, 2), torch.float32)}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version), dtype=dtype) for name, (shape, dtype) in LAYOUT.items()}


def versions_in(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(value) for tensor in tensors.values() for value in tensor.reshape(-1).tolist()}


@pytest.fixture(params=[True, False], ids=["memfd", "file"])
def publisher(request: pytest.FixtureRequest) -> Iterator[SlotPublisher]:
    with SlotPublisher(LAYOUT, use_memfd=request.param) as made:
        yield made


def test_versions_alternate_between_slots_and_arrive_without_a_copy(publisher: SlotPublisher) -> None:
    descriptor = json.loads(json.dumps(publisher.descriptor))
    with SlotReceiver(descriptor) as receiver:
        for version in range(1, 6):
            manifest = Manifest.from_dict(json.loads(json.dumps(publisher.stage(weights(version).items(), version).as_dict())))
            receiver.accept(manifest)
            assert receiver.policy_version == version
            assert versions_in(receiver.tensors()) == {float(version)}
            assert manifest.num_bytes == 3 * 5 * 4 + 7 * 2 + 2 * 2 * 4
            address = publisher.views(manifest.slot)["a.weight"].data_ptr() % 4096
            assert receiver.tensors()["a.weight"].data_ptr() % 4096 == address


def bad_stages() -> dict[str, dict[str, torch.Tensor]]:
    good = weights(9)
    return {
        "renamed": {("x.weight" if name == "a.weight" else name): tensor for name, tensor in good.items()},
        "all renamed": {f"model.{name}": tensor for name, tensor in good.items()},
        "missing": {name: tensor for name, tensor in good.items() if name != "b.weight"},
        "transposed": good | {"a.weight": good["a.weight"].t()},
        "broadcastable": good | {"a.weight": torch.full((5,), 9.0)},
        "empty": {},
    }


@pytest.mark.parametrize("case", list(bad_stages()))
def test_what_does_not_cover_the_layout_is_refused_and_the_old_version_stays(publisher: SlotPublisher, case: str) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        receiver.accept(publisher.stage(weights(1).items(), 1))
        with pytest.raises(TransferError):
            publisher.stage(bad_stages()[case].items(), 2)
        assert (receiver.policy_version, versions_in(receiver.tensors())) == (1, {1.0})
        receiver.accept(publisher.stage(weights(3).items(), 3))  # and the next one goes through
        assert versions_in(receiver.tensors()) == {3.0}


def test_a_manifest_that_lies_is_refused(publisher: SlotPublisher) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        receiver.accept(publisher.stage(weights(1).items(), 1))
        good = publisher.stage(weights(2).items(), 2)
        sums = dict(good.checksums)
        lies = [
            replace(good, checksums={k: v for k, v in sums.items() if k != "a.weight"}),
            replace(good, checksums=sums | {"d.weight": "00"}),
            replace(good, checksums=sums | {"b.weight": sums["a.weight"]}),
            replace(good, layout_hash="0" * 16),
            replace(good, slot=2),
            replace(good, slot=-1),
            replace(good, slot=1 - good.slot),
        ]
        for lie in lies:
            with pytest.raises(TransferError):
                receiver.accept(lie)
            assert (receiver.policy_version, versions_in(receiver.tensors())) == (1, {1.0})
        receiver.accept(good)
        assert receiver.policy_version == 2


def test_one_flipped_bit_is_found(publisher: SlotPublisher) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        receiver.accept(publisher.stage(weights(1).items(), 1))
        manifest = publisher.stage(weights(2).items(), 2)
        publisher.views(manifest.slot)["c.weight"].view(torch.int32)[1, 1] ^= 1
        with pytest.raises(TransferError, match=r"c\.weight"):
            receiver.accept(manifest)
        assert versions_in(receiver.tensors()) == {1.0}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused(publisher: SlotPublisher, value: float) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        receiver.accept(publisher.stage(weights(1).items(), 1))
        for version, name in enumerate(LAYOUT, start=2):
            bad = weights(version)
            bad[name].view(-1)[-1] = value
            with pytest.raises(TransferError, match="not finite"):
                receiver.accept(publisher.stage(bad.items(), version))
        assert versions_in(receiver.tensors()) == {1.0}


def test_a_tensor_that_changes_after_it_was_called_complete_is_refused(publisher: SlotPublisher) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        views = publisher.begin()
        for name, tensor in weights(1).items():
            views[name].copy_(tensor)
            publisher.written(name)
        manifest = publisher.finish(1)
        publisher.views(manifest.slot)["b.weight"].fill_(2.0)
        with pytest.raises(TransferError, match=r"b\.weight.*checksum"):
            receiver.accept(manifest)


def test_the_live_slot_is_never_written_even_when_updates_fail_again_and_again(publisher: SlotPublisher) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        receiver.accept(publisher.stage(weights(1).items(), 1))
        for version in range(2, 7):  # none of these is accepted: each must reuse the one free slot
            stale = publisher.stage(weights(version).items(), version)
            assert stale.slot != 0
        assert versions_in(receiver.tensors()) == {1.0}
        with SlotReceiver(publisher.descriptor) as other:  # an engine left behind: now both slots are read
            other.accept(stale)
            with pytest.raises(TransferError, match="both slots"):
                publisher.begin()
        publisher.stage(weights(8).items(), 8)


def test_a_slot_that_is_being_written_cannot_be_prepared(publisher: SlotPublisher) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        old = publisher.stage(weights(1).items(), 1)
        publisher.stage(weights(2).items(), 2)
        publisher.begin()  # writes over version 1
        with pytest.raises(TransferError, match="written again"):
            receiver.prepare(old)
        with pytest.raises(TransferError, match="already being written"):
            publisher.begin()
        publisher.abort()


def test_commit_needs_a_verified_version(publisher: SlotPublisher) -> None:
    with SlotReceiver(publisher.descriptor) as receiver:
        with pytest.raises(TransferError, match="no version"):
            receiver.tensors()
        with pytest.raises(TransferError, match="prepare"):
            receiver.commit()
        receiver.prepare(publisher.stage(weights(1).items(), 1))
        with pytest.raises(TransferError, match="verify"):
            receiver.commit()
        receiver.verify()
        receiver.commit()
        assert receiver.policy_version == 1


def test_descriptors_of_nothing_are_refused() -> None:
    with SlotPublisher(LAYOUT) as publisher:
        descriptor = publisher.descriptor
    with pytest.raises(TransferError):
        SlotReceiver(descriptor)  # its publisher is closed
    with pytest.raises(TransferError):
        SlotReceiver({"format": 1})
    with pytest.raises(TransferError, match="format"):
        SlotReceiver({**descriptor, "format": 7})
    with pytest.raises(TransferError):
        SlotPublisher({})


# One letter per act of a publisher and two receivers; see ``play``.
ACTS = st.lists(
    st.sampled_from(["stage", "half", "bad", "prepare0", "prepare1", "verify0", "verify1", "commit0", "commit1", "abort0"])
)


@settings(max_examples=150, deadline=None)
@given(ACTS)
def test_no_order_of_acts_changes_a_live_version(acts: list[str]) -> None:
    with (
        SlotPublisher(LAYOUT) as publisher,
        SlotReceiver(publisher.descriptor) as first,
        SlotReceiver(publisher.descriptor) as second,
    ):
        receivers = (first, second)
        live: list[int | None] = [None, None]
        prepared: list[int | None] = [None, None]
        newest: Manifest | None = None
        for version, act in enumerate(acts, start=1):
            try:
                if act == "stage":
                    newest = publisher.stage(weights(version).items(), version)
                elif act == "half":  # a writer that stops in the middle
                    publisher.begin()["a.weight"].fill_(-1.0)
                    publisher.abort()
                elif act == "bad":
                    publisher.stage(list(weights(-2).items())[:2], version)
                elif newest is not None:
                    index = int(act[-1])
                    getattr(receivers[index], act[:-1])(*([newest] if act.startswith("prepare") else []))
                    if act.startswith("prepare"):
                        prepared[index] = newest.policy_version
                    elif act.startswith("commit"):
                        live[index] = prepared[index]
            except TransferError:
                pass
            for receiver, expected in zip(receivers, live, strict=True):
                assert receiver.policy_version == expected
                if expected is not None:
                    receiver.abort()  # ``tensors`` is then the live version
                    assert versions_in(receiver.tensors()) == {float(expected)}


WRITER = textwrap.dedent(
    """
    import json, os, sys, torch
    from evergrad.transfer import SlotPublisher
    size = int(sys.argv[1])
    publisher = SlotPublisher({"a": ((size,), torch.float32), "b": ((size,), torch.float32)})
    manifest = publisher.stage([("a", torch.ones(size)), ("b", torch.ones(size))], 1)
    print(json.dumps({"descriptor": publisher.descriptor, "manifest": manifest.as_dict()}), flush=True)
    sys.stdin.readline()
    views = publisher.begin()
    print("writing", flush=True)
    while True:
        views["a"].add_(1.0)
    """
)


def memory_with_a_name() -> list[str]:
    """Shared memory that outlives its process; semaphores are others', of pools of processes that come and go."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))


def test_a_writer_killed_in_the_middle_leaves_readers_their_version_and_nothing_else(tmp_path: Path) -> None:
    before = memory_with_a_name()
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, "50000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        hello = json.loads(child.stdout.readline())
        manifest = Manifest.from_dict(hello["manifest"])
        with SlotReceiver(hello["descriptor"]) as receiver:
            receiver.accept(manifest)
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "writing\n"
            with pytest.raises(TransferError):  # the slot it writes is closed to readers
                receiver.prepare(replace(manifest, slot=1 - manifest.slot))
            child.send_signal(signal.SIGKILL)
            child.wait()
            # The lock went with the process, the half-written slot does not pass, the live one is whole.
            with pytest.raises(TransferError, match="checksum"):
                receiver.accept(replace(manifest, slot=1 - manifest.slot, policy_version=2))
            assert receiver.policy_version == 1
            assert versions_in(receiver.tensors()) == {1.0}
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert memory_with_a_name() == before


READER = textwrap.dedent(
    """
    import json, sys
    from evergrad.transfer import Manifest, SlotReceiver, TransferError
    receiver = SlotReceiver(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        try:
            receiver.accept(Manifest.from_dict(json.loads(line)))
            said = receiver.policy_version
        except TransferError as error:
            said = str(error)
        seen = sorted({v for t in receiver.tensors().values() for v in (t.min().item(), t.max().item())})
        print(json.dumps({"said": said, "seen": seen}), flush=True)
    """
)


def test_a_reader_in_another_process_sees_whole_versions_only() -> None:
    with SlotPublisher({"a": ((4096,), torch.float32), "b": ((4096,), torch.float32)}) as publisher:
        child = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(publisher.descriptor) + "\n")
            for version in range(1, 20):
                manifest = publisher.stage([("a", torch.full((4096,), version)), ("b", torch.full((4096,), version))], version)
                if version % 5 == 0:  # overtaken: written again before the reader looks at it
                    publisher.begin()["b"].fill_(-1.0)
                    publisher.abort()
                child.stdin.write(json.dumps(manifest.as_dict()) + "\n")
                child.stdin.flush()
                answer = json.loads(child.stdout.readline())
                live = version if version % 5 else version - 1
                assert answer["seen"] == [live]
                assert (answer["said"] == version) == bool(version % 5)
        finally:
            child.stdin.close()
            child.wait()
            child.stdout.close()
