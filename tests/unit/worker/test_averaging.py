"""The mean of pseudo-gradients: bit-equal on all members and to a computation in one process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import cast

import pytest
import torch
from torch import Tensor

from recovery.errors import BadConfiguration
from recovery.transport.process_group import open_group
from recovery.worker.averaging import Averager, Collectives, reference_mean, sum_integers
from tests.support.memory_store import MemoryStore

SHAPES = [(3,), (), (0,), (5, 7), (1,), (2, 3, 11), (1009,)]


def contribution(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) * 10.0 ** (rank - 2) for shape in SHAPES]


def averaged_by(
    contributions: Sequence[list[Tensor]], weights: list[float], bucket_bytes: int, scope: str
) -> list[list[Tensor]]:
    """Return what each member gets; the members are threads, each with its own gloo group."""
    store, size = MemoryStore(), len(contributions)
    # All ranks live in one process here, so one rank's handle also knows the others' sockets: nobody closes early.
    finished = Barrier(size)

    def member(rank: int) -> list[Tensor]:
        averager = Averager(bucket_bytes)
        if size == 1:
            return averager.average(contributions[rank], weights, rank, None, 10.0)
        handle = open_group(store, scope, rank=rank, size=size, host="127.0.0.1", timeout_seconds=20.0)
        try:
            result = averager.average(contributions[rank], weights, rank, cast(Collectives, handle.group), 10.0)
            assert sum_integers([rank, 2**40], cast(Collectives, handle.group), 10.0) == [
                size * (size - 1) // 2,
                size * 2**40,
            ]
            return [tensor.clone() for tensor in result]
        finally:
            finished.wait(30)
            handle.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
@pytest.mark.parametrize("weighted", [False, True])
def test_members_get_the_reference_bit_for_bit(size: int, bucket_bytes: int, weighted: bool) -> None:
    contributions = [contribution(rank) for rank in range(size)]
    weights = [0.1 + 0.3 * rank for rank in range(size)] if weighted else [1.0] * size
    expected = reference_mean(contributions, weights)
    for result in averaged_by(contributions, weights, bucket_bytes, f"{size}/{bucket_bytes}/{weighted}"):
        assert all(same_bits(mine, theirs) for mine, theirs in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_their_dtype(dtype: torch.dtype) -> None:
    contributions = [contribution(rank, dtype) for rank in range(2)]
    expected = reference_mean(contributions, [1.0, 1.0])
    for result in averaged_by(contributions, [1.0, 1.0], 1 << 20, str(dtype)):
        assert [tensor.dtype for tensor in result] == [dtype] * len(SHAPES)
        assert all(same_bits(mine, theirs) for mine, theirs in zip(result, expected, strict=True))


def test_a_member_without_weight_changes_nothing() -> None:
    ones, junk = [torch.ones(4)], [torch.full((4,), 1e30)]
    (result, _) = averaged_by([ones, junk], [1.0, 0.0], 1 << 20, "weightless")
    assert torch.equal(result[0], torch.ones(4))


def test_all_without_weight_count_alike() -> None:
    (result, _) = averaged_by([[torch.zeros(3)], [torch.full((3,), 2.0)]], [0.0, 0.0], 1 << 20, "alike")
    assert torch.equal(result[0], torch.ones(3))


def test_contributions_are_not_changed() -> None:
    tensors = contribution(0)
    before = [tensor.clone() for tensor in tensors]
    Averager(64).average(tensors, [1.0], 0, None, 1.0)
    assert all(same_bits(old, new) for old, new in zip(before, tensors, strict=True))


def test_integers_are_refused_by_position() -> None:
    with pytest.raises(BadConfiguration, match="pseudo-gradient 1 has dtype"):
        Averager(64).average([torch.ones(1), torch.ones(1, dtype=torch.int64)], [1.0], 0, None, 1.0)


def test_buffers_of_a_failed_call_are_not_used_again() -> None:
    averager = Averager(64)
    first = averager.average([torch.ones(8)], [1.0], 0, None, 1.0)
    with pytest.raises(ValueError, match="zip"):
        # Two weights but no group: fails in the middle, as a group does that breaks half-way.
        averager.average([torch.ones(8)], [1.0, 1.0], 0, None, 1.0)
    second = averager.average([torch.ones(8)], [1.0], 0, None, 1.0)
    assert first[0].data_ptr() != second[0].data_ptr()
