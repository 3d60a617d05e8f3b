"""DTensors: the local shard travels with its place in the global tensor; fingerprints do not depend on sharding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from recovery.errors import UnsupportedLeaf
from recovery.state.digest import combine_fingerprints, fingerprint, partial_fingerprint
from recovery.state.leaf import ShardSpec, TensorKind
from recovery.state.manifest import decode, encode
from recovery.state.tree import join, split
from tests.unit.state.build import Part, manifest_of, part_of


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a group whose other ranks do not exist: enough for placements, which need no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_of(
    whole: torch.Tensor, rank: int, mesh_shape: tuple[int, ...], placements: list[Placement], parameter: bool = False
) -> tuple[DTensor | nn.Parameter, Part]:
    """Return one rank's DTensor of ``whole`` and a part that holds it."""
    size = 1
    for length in mesh_shape:
        size *= length
    with as_rank(rank, size):
        mesh = init_device_mesh("cpu", mesh_shape)
        local = whole
        for placement, length, position in zip(placements, mesh_shape, mesh.get_coordinate() or [], strict=True):
            if isinstance(placement, Shard):
                pieces = torch.chunk(local, length, placement.dim)
                empty = local.narrow(placement.dim, 0, 0)
                local = pieces[position] if position < len(pieces) else empty
        value: DTensor | nn.Parameter = DTensor.from_local(
            local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        if parameter:
            value = nn.Parameter(value)
        return value, part_of("p", {"w": value})


def test_the_leaf_is_the_local_shard_and_its_place() -> None:
    whole = torch.arange(35.0).view(7, 5)
    value, part = shard_of(whole, 1, (2,), [Shard(0)], parameter=True)
    (spec,) = part.specs
    assert spec.shard == ShardSpec(global_shape=(7, 5), global_offset=(4, 0), placements=("S(0)",), mesh_shape=(2,))
    assert (spec.shape, spec.num_bytes, spec.kind, spec.requires_grad) == ((3, 5), 60, TensorKind.PARAMETER, True)
    assert part.bytes.read(0, 60).view(torch.float32).tolist() == whole[4:].reshape(-1).tolist()
    tree, leaves = split({"w": value})
    joined = join(tree, leaves)
    assert isinstance(joined, dict)
    assert joined["w"] is value


def test_writing_goes_into_the_local_shard() -> None:
    value, part = shard_of(torch.zeros(8), 0, (2,), [Shard(0)])
    assert isinstance(value, DTensor)
    pointer = value._local_tensor.data_ptr()
    part.bytes.write(0, torch.ones(4).view(torch.uint8))
    assert value._local_tensor.data_ptr() == pointer
    assert value._local_tensor.sum() == 4


def test_manifests_carry_shards() -> None:
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(1)], run_check=False)
        manifest = manifest_of({"p": {"w": value, "plain": torch.ones(2)}})
    assert decode(encode(manifest)) == manifest
    assert manifest.parts[0].tensors[0].shard is not None


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((1,), [Shard(0)]),
        ((2,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((2,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((11,), [Shard(0)]),
    ],
)
def test_the_fingerprint_does_not_depend_on_sharding(mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    whole = torch.randn(10, 50_000)
    expected = fingerprint([part_of("p", {"w": whole})])
    size = torch.Size(mesh_shape).numel()
    ranks = [partial_fingerprint([shard_of(whole, rank, mesh_shape, placements)[1]]) for rank in range(size)]
    assert combine_fingerprints(ranks) == expected


def test_pending_reductions_travel_but_have_no_fingerprint() -> None:
    _, part = shard_of(torch.ones(2), 0, (2,), [Partial()])
    assert part.specs[0].shard is not None
    assert part.specs[0].shard.placements == ("P(sum)",)
    with pytest.raises(UnsupportedLeaf, match="pending reduction"):
        fingerprint([part])


def test_the_same_shard_twice_is_tied() -> None:
    with as_rank(0, 2):
        value = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        assert len(split([value, value]).leaves) == 1
