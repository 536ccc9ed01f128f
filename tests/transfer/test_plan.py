"""Plans: carrying one out gives what gathering everything and cutting it up again gives, and sends nothing twice."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.transfer import Placement, TransferError, make_plan
from evergrad.transfer.placements import Buffers, fused, held_shards, make_copies, region, split
from evergrad.transfer.plan import Box, Place, Plan, Shard, intersect, subtract

SHAPES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=3
)


def cut(box: Box, rng: random.Random, pieces: int) -> list[Box]:
    """``box`` in up to ``pieces`` parts, cut anywhere along any dimension."""
    parts = [box]
    for _ in range(pieces - 1):
        one = parts.pop(rng.randrange(len(parts)))
        dims = [dim for dim, (start, stop) in enumerate(one) if stop - start > 1]
        if not dims:
            return [*parts, one]
        dim = rng.choice(dims)
        start, stop = one[dim]
        middle = rng.randint(start + 1, stop - 1)
        parts += [(*one[:dim], (start, middle), *one[dim + 1 :]), (*one[:dim], (middle, stop), *one[dim + 1 :])]
    return parts


def random_placement(shapes: dict[str, tuple[int, ...]], rng: random.Random, *, complete: bool) -> Placement:
    """Parts of each tensor on random ranks and hosts, stacked in buffers of random depth; with ``complete`` all parts are
    somewhere, some of them several times."""
    hosts = [rng.choice("xy") for _ in range(rng.randint(1, 4))]
    shards, deep = [], rng.random() < 0.5
    for name, shape in shapes.items():
        for index, box in enumerate(cut(tuple((0, size) for size in shape), rng, rng.randint(1, 4))):
            count = rng.randint(1 if complete else 0, len(hosts))
            for rank in rng.sample(range(len(hosts)), count):
                # Parts of one rank lie apart in one buffer: along a dimension of its own, or in buffers of their own.
                at = (index, *(rng.randint(0, 2) for _ in shape)) if deep else (0,) * len(shape)
                shards.append(Shard(name, box, Place(rank, name if deep else f"{name}.{index}", at)))
    return Placement.of(shapes, shards, hosts)


def filled(placement: Placement, values: dict[str, torch.Tensor] | None) -> list[dict[str, torch.Tensor]]:
    """Memory of every rank; each shard holds its part of ``values``, all else NaN."""
    memory = []
    for rank in range(len(placement.hosts)):
        own = {name: torch.full(shape, float("nan")) for name, shape in placement.buffers(rank).items()}
        for shard in placement.shards:
            if values is not None and shard.place.rank == rank:
                part = values[shard.tensor][tuple(slice(*ends) for ends in shard.box)]
                region(own, shard.place, part.shape).copy_(part)
        memory.append(own)
    return memory


def carry_out(plan: Plan, sources: Sequence[Buffers], destinations: Sequence[Buffers]) -> None:
    """All copies of a plan, one mapping a rank."""
    for origin, copies in ((sources, plan.copies), (destinations, plan.fan_out)):
        for copy in copies:
            make_copies([copy], origin[copy.source.rank], destinations[copy.destination.rank])


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    counter = itertools.count()
    return {
        name: torch.tensor([next(counter) for _ in range(torch.Size(s).numel())]).view(s).float() for name, s in shapes.items()
    }


def same_memory(found: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]]) -> bool:
    return all(
        torch.equal(torch.nan_to_num(f[name], nan=-1.0), torch.nan_to_num(e[name], nan=-1.0))
        for f, e in zip(found, expected, strict=True)
        for name in e
    )


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(0, 2**32))
def test_carrying_out_a_plan_equals_gathering_and_slicing(shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    rng, values = random.Random(seed), numbered(shapes)
    source = random_placement(shapes, rng, complete=True)
    destination = random_placement(shapes, rng, complete=False)
    plan = make_plan(source, destination)
    memory = filled(destination, None)
    carry_out(plan, filled(source, values), memory)
    assert same_memory(memory, filled(destination, values))


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(0, 2**32))
def test_no_element_reaches_a_host_twice_nor_a_place_twice(shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    rng = random.Random(seed)
    source, destination = (random_placement(shapes, rng, complete=True) for _ in range(2))
    plan = make_plan(source, destination)
    number = numbered(shapes)
    crossed: set[tuple[str, float]] = set()
    held = filled(source, number)
    for copy in plan.copies:
        host = destination.hosts[copy.destination.rank]
        for value in region(held[copy.source.rank], copy.source, copy.shape).reshape(-1).tolist():
            assert (host, value) not in crossed
            crossed.add((host, value))
    wanted = {destination.hosts[s.place.rank] for s in destination.shards}
    total = sum(tensor.numel() for tensor in number.values())
    assert len(crossed) <= len(wanted) * total
    written = sum(copy.numel for copy in (*plan.copies, *plan.fan_out))
    assert written == sum(torch.Size(b - a for a, b in shard.box).numel() for shard in destination.shards)
    keys = [copy.key for copy in (*plan.copies, *plan.fan_out)]
    assert len(set(keys)) == len(keys)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(0, 2**32))
def test_a_plan_depends_on_what_is_where_and_not_on_the_order_it_is_told_in(
    shapes: dict[str, tuple[int, ...]], seed: int
) -> None:
    rng = random.Random(seed)
    placements = [random_placement(shapes, rng, complete=True) for _ in range(2)]
    shuffled = []
    for one in placements:
        shards = list(one.shards)
        rng.shuffle(shards)
        shuffled.append(Placement.of(dict(reversed(list(one.shapes.items()))), shards, one.hosts))
    assert make_plan(*placements) == make_plan(*shuffled)
    assert make_plan(*placements).hash == make_plan(*shuffled).hash


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "from evergrad.transfer import Placement, make_plan\n"
        "one = Placement.whole({'a': (4, 2), 'b': ()})\n"
        "print(make_plan(one, one).hash)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    one = Placement.whole({"b": (), "a": (4, 2)})
    assert done.stdout.strip() == make_plan(one, one).hash
    assert make_plan(one, one).hash != make_plan(*[Placement.whole({"a": (2, 4), "b": ()})] * 2).hash


BOXES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=2, max_size=2).map(
    lambda pairs: tuple((start, start + size) for start, size in pairs)
)


@given(BOXES, BOXES)
def test_a_box_is_what_it_shares_with_another_and_the_rest(a: Box, b: Box) -> None:
    def cells(box: Box) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(*ends) for ends in box)))

    common = intersect(a, b)
    pieces = [cells(piece) for piece in subtract(a, b)]
    shared = cells(common) if common is not None else []
    assert sorted([*shared, *(cell for piece in pieces for cell in piece)]) == sorted(cells(a))
    assert set(shared) == set(cells(a)) & set(cells(b))


def test_shards_of_four_ranks_become_fused_weights_of_two() -> None:
    shapes = {"q": (8, 4), "k": (4, 4), "v": (4, 4), "o": (4, 8), "norm": (4,)}
    values = numbered(shapes)
    source = split(shapes, dict.fromkeys(shapes, 0), hosts="aabb")  # FSDP cuts rows, whatever the tensor is
    parallel = split(shapes, {"q": 0, "k": 0, "v": 0, "o": 1, "norm": None}, hosts="cc")
    destination = fused(parallel, {"qkv": ["q", "k", "v"]})
    memory = filled(destination, None)
    plan = make_plan(source, destination)
    carry_out(plan, filled(source, values), memory)
    for rank in (0, 1):
        rows = [values[n].chunk(2)[rank] for n in "qkv"]
        assert torch.equal(memory[rank]["qkv"], torch.cat(rows))
        assert torch.equal(memory[rank]["o"], values["o"].chunk(2, dim=1)[rank])
        assert torch.equal(memory[rank]["norm"], values["norm"])
    # Both engines want the norm and are on one host: the second has it from the first.
    assert {copy.tensor for copy in plan.fan_out} == {"norm"}
    assert all(copy.source.rank == 0 and copy.destination.rank == 1 for copy in plan.fan_out)


def test_experts_go_to_the_ranks_that_keep_them_in_a_stack() -> None:
    shapes = {f"experts.{index}": (3, 2) for index in range(4)}
    shards = [
        Shard(f"experts.{index}", ((0, 3), (0, 2)), Place(index // 2, "experts", (index % 2, 0, 0))) for index in range(4)
    ]
    destination = Placement.of(shapes, shards, hosts=["a", "b"])
    values, memory = numbered(shapes), filled(destination, None)
    source = Placement.whole(shapes)
    carry_out(make_plan(source, destination), filled(source, values), memory)
    assert torch.equal(memory[1]["experts"], torch.stack([values["experts.2"], values["experts.3"]]))


def test_replicas_of_a_source_share_the_sending() -> None:
    shapes = dict.fromkeys("abcdefgh", (8,))
    source = split(shapes, dict.fromkeys(shapes), hosts="wxyz")
    plan = make_plan(source, split(shapes, dict.fromkeys(shapes), hosts="v"))
    assert [sum(copy.numel for copy in plan.sent_by(rank)) for rank in range(4)] == [16] * 4
    near = make_plan(source, split(shapes, dict.fromkeys(shapes), hosts="y"))
    assert near.sent_by(2) == list(near.copies)


def test_what_does_not_match_is_refused_by_name() -> None:
    whole = Placement.whole({"a": (4, 2), "b": (2,)})
    with pytest.raises(TransferError, match="source only, first 'b'"):
        make_plan(whole, Placement.whole({"a": (4, 2), "b2": (2,)}))
    with pytest.raises(TransferError, match="destination only, first 'c'"):
        make_plan(whole, Placement.whole({"a": (4, 2), "b": (2,), "c": (2,)}))
    with pytest.raises(TransferError, match="destination"):
        make_plan(whole, Placement.whole({"a": (2, 4), "b": (2,)}))
    half = Placement.of({"a": (4, 2)}, [Shard("a", ((0, 2), (0, 2)), Place(0, "a", (0, 0)))])
    with pytest.raises(TransferError, match="2:4"):
        make_plan(half, Placement.whole({"a": (4, 2)}))
    with pytest.raises(TransferError, match="one place"):
        Placement.of({"a": (4,)}, [Shard("a", ((0, 2),), Place(0, "a", (0,))), Shard("a", ((2, 4),), Place(0, "a", (1,)))])
    with pytest.raises(TransferError, match="does not fit"):
        Placement.of({"a": (4,)}, [Shard("a", ((2, 5),), Place(0, "a", (0,)))])
    with pytest.raises(TransferError, match="rank 1"):
        Placement.of({"a": (4,)}, [Shard("a", ((0, 4),), Place(1, "a", (0,)))])
    with pytest.raises(TransferError, match="do not divide"):
        split({"a": (3,)}, {"a": 0}, hosts="ab")


RANKS = """
import sys, torch, torch.distributed as dist
from collections import OrderedDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from evergrad.transfer.placements import held_shards, held_tensors
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 4), rank=int(sys.argv[2]), world_size=4)
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
torch.manual_seed(0)
parts = [("up", torch.nn.Linear(6, 8)), ("down", torch.nn.Linear(8, 5)), ("norm", torch.nn.LayerNorm(3))]
model = torch.nn.Sequential(OrderedDict(parts))
whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
fully_shard(model, mesh=mesh["fsdp"])
shapes, shards = held_shards(model.named_parameters(), rank)
everyone = [None] * 4
dist.all_gather_object(everyone, (shapes, shards, held_tensors(model.named_parameters())))
if rank == 0:
    torch.save((whole, everyone), sys.argv[3])
dist.destroy_process_group()
"""


def test_what_fsdp_and_tensor_parallelism_leave_on_four_ranks_becomes_whole(tmp_path: Path) -> None:
    meeting, result = f"{tmp_path}/meeting", f"{tmp_path}/result.pt"
    ranks = [subprocess.Popen([sys.executable, "-c", RANKS, meeting, str(rank), result]) for rank in range(4)]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * 4
    finally:
        for rank in ranks:
            rank.kill()
    whole, everyone = torch.load(result, weights_only=False)
    source = Placement.of(everyone[0][0], [shard for _, shards, _ in everyone for shard in shards], hosts=["a"] * 4)
    assert any(len({s.place.rank for s in source.shards if s.tensor == name}) > 1 for name in whole)
    destination = Placement.whole({name: tuple(tensor.shape) for name, tensor in whole.items()})
    memory = filled(destination, None)
    carry_out(make_plan(source, destination), [tensors for _, _, tensors in everyone], memory)
    assert all(torch.equal(memory[0][name], tensor) for name, tensor in whole.items())


def test_a_module_holds_its_tensors_whole() -> None:
    module = torch.nn.Linear(3, 2)
    shapes, shards = held_shards(module.named_parameters())
    assert Placement.of(shapes, shards) == Placement.whole({"weight": (2, 3), "bias": (2,)})


def test_who_wants_nothing_is_sent_nothing() -> None:
    nobody = Placement.of({"a": (4,)}, [], hosts=["a"])
    assert make_plan(Placement.whole({"a": (4,)}), nobody) == Plan((), ())
