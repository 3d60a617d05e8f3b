"""The mean of pseudo-gradients: bit-equal on all members and to a computation in one process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, Work

from recovery.errors import BadConfiguration, LayoutMismatch
from recovery.transport.process_group import open_group
from recovery.worker.averaging import Averager, Collectives, reference_mean
from recovery.worker.gradient_codec import GradientCodec, PlainCodec, codec_named
from tests.support.memory_store import MemoryStore

PLAIN = PlainCodec()
SHAPES = [(3,), (), (0,), (5, 7), (1,), (2, 3, 11), (1009,)]


def contribution(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) * 10.0 ** (rank - 2) for shape in SHAPES]


class CountingGroup:
    """Passes everything on to a group and counts the bytes that this member hands to it."""

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self.swapped_bytes = 0
        self.gathered_bytes = 0

    def size(self) -> int:
        return self._group.size()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], options: AllToAllOptions
    ) -> Work:
        self.swapped_bytes += input.nbytes
        return self._group.alltoall_base(output, input, output_sizes, input_sizes, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: AllgatherOptions) -> Work:
        self.gathered_bytes += inputs[0].nbytes
        return self._group.allgather(outputs, inputs, options)


@dataclass
class Averaged:
    """What one member got, and the bytes that it sent for it."""

    tensors: list[Tensor]
    swapped_bytes: int = 0
    gathered_bytes: int = 0


def averaged_by(
    contributions: Sequence[list[Tensor]],
    weights: list[float],
    bucket_bytes: int,
    scope: str,
    codec: GradientCodec = PLAIN,
) -> list[Averaged]:
    """Return what each member gets; the members are threads, each with its own gloo group."""
    store, size = MemoryStore(), len(contributions)
    # All ranks live in one process here, so one rank's handle also knows the others' sockets: nobody closes early.
    finished = Barrier(size)

    def member(rank: int) -> Averaged:
        averager = Averager(bucket_bytes, codec)
        if size == 1:
            assert averager.agree(contributions[rank], [7], rank, None, 10.0) == [7]
            return Averaged(averager.average(contributions[rank], weights, rank, None, 10.0))
        handle = open_group(store, scope, rank=rank, size=size, host="127.0.0.1", timeout_seconds=20.0)
        try:
            group = cast(Collectives, handle.group)
            sums = averager.agree(contributions[rank], [rank, 2**40], rank, group, 10.0)
            assert sums == [size * (size - 1) // 2, size * 2**40]
            counting = CountingGroup(group)
            result = averager.average(contributions[rank], weights, rank, counting, 10.0)
            return Averaged([tensor.clone() for tensor in result], counting.swapped_bytes, counting.gathered_bytes)
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
        assert all(same_bits(mine, theirs) for mine, theirs in zip(result.tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_their_dtype(dtype: torch.dtype) -> None:
    contributions = [contribution(rank, dtype) for rank in range(2)]
    expected = reference_mean(contributions, [1.0, 1.0])
    for result in averaged_by(contributions, [1.0, 1.0], 1 << 20, str(dtype)):
        assert [tensor.dtype for tensor in result.tensors] == [dtype] * len(SHAPES)
        assert all(same_bits(mine, theirs) for mine, theirs in zip(result.tensors, expected, strict=True))


def test_a_member_without_weight_changes_nothing() -> None:
    ones, junk = [torch.ones(4)], [torch.full((4,), 1e30)]
    (result, _) = averaged_by([ones, junk], [1.0, 0.0], 1 << 20, "weightless")
    assert torch.equal(result.tensors[0], torch.ones(4))


def test_all_without_weight_count_alike() -> None:
    (result, _) = averaged_by([[torch.zeros(3)], [torch.full((3,), 2.0)]], [0.0, 0.0], 1 << 20, "alike")
    assert torch.equal(result.tensors[0], torch.ones(3))


def test_contributions_are_not_changed() -> None:
    tensors = contribution(0)
    before = [tensor.clone() for tensor in tensors]
    Averager(64).average(tensors, [1.0], 0, None, 1.0)
    assert all(same_bits(old, new) for old, new in zip(before, tensors, strict=True))


def test_integers_are_refused_by_position() -> None:
    with pytest.raises(BadConfiguration, match="pseudo-gradient 1 has dtype"):
        Averager(64).average([torch.ones(1), torch.ones(1, dtype=torch.int64)], [1.0], 0, None, 1.0)


class BrokenGroup:
    """Fails as gloo does when a peer is gone."""

    def size(self) -> int:
        return 2

    def alltoall_base(self, *_: object) -> Work:
        raise RuntimeError("Connection closed by peer")

    def allgather(self, *_: object) -> Work:
        raise RuntimeError("Connection closed by peer")


def test_buffers_of_a_failed_call_are_not_used_again() -> None:
    averager = Averager(64)
    first = averager.average([torch.ones(8)], [1.0], 0, None, 1.0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        averager.average([torch.ones(8)], [1.0, 1.0], 0, BrokenGroup(), 1.0)
    second = averager.average([torch.ones(8)], [1.0], 0, None, 1.0)
    assert first[0].data_ptr() != second[0].data_ptr()


# Fewer bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
def test_rounded_members_get_the_reference_bit_for_bit(size: int, name: str, bucket_bytes: int) -> None:
    codec = codec_named(name)
    contributions = [contribution(rank) for rank in range(size)]
    weights = [0.1 + 0.3 * rank for rank in range(size)]
    expected = reference_mean(contributions, weights, codec)
    for result in averaged_by(contributions, weights, bucket_bytes, f"{size}/{name}/{bucket_bytes}", codec):
        assert all(same_bits(mine, theirs) for mine, theirs in zip(result.tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_rounded_means_keep_their_dtype(name: str, dtype: torch.dtype) -> None:
    codec = codec_named(name)
    contributions = [contribution(rank, dtype) for rank in range(2)]
    expected = reference_mean(contributions, [1.0, 2.0], codec)
    for result in averaged_by(contributions, [1.0, 2.0], 1 << 20, f"{name}/{dtype}", codec):
        assert [tensor.dtype for tensor in result.tensors] == [dtype] * len(SHAPES)
        assert all(same_bits(mine, theirs) for mine, theirs in zip(result.tensors, expected, strict=True))


@pytest.mark.parametrize(("name", "bytes_an_element"), [("plain", 4.0), ("bf16", 2.0), ("int8", 1 + 4 / 256)])
def test_the_wire_carries_the_codecs_bytes(name: str, bytes_an_element: float) -> None:
    elements, size = 3 * 256 * 100, 3
    contributions = [[torch.randn(elements)] for _ in range(size)]
    for result in averaged_by(contributions, [1.0] * size, 1 << 16, f"wire/{name}", codec_named(name)):
        # Each member swaps its whole contribution, its own segment included, and gathers one segment from each.
        assert bytes_an_element <= result.swapped_bytes / elements <= 1.05 * bytes_an_element
        assert bytes_an_element <= result.gathered_bytes / (elements / size) <= 1.05 * bytes_an_element


# Members that want different things


def disagreement(sides: Sequence[tuple[list[Tensor], Averager]], scope: str) -> list[type[Exception] | None]:
    store, size = MemoryStore(), len(sides)
    finished = Barrier(size)

    def member(rank: int) -> type[Exception] | None:
        handle = open_group(store, scope, rank=rank, size=size, host="127.0.0.1", timeout_seconds=20.0)
        tensors, averager = sides[rank]
        try:
            averager.agree(tensors, [1], rank, cast(Collectives, handle.group), 10.0)
        except (RuntimeError, LayoutMismatch) as error:
            assert "rank" in str(error)
            return type(error)
        finally:
            finished.wait(30)
            handle.close()
        return None

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def test_members_find_out_before_any_tensor_moves_that_they_average_different_things() -> None:
    """Field reports: gloo#456 (a longer message ends the process), pytorch#113376 (a shorter one hangs)."""
    small, large = [torch.ones(3)], [torch.ones(4)]
    assert disagreement([(small, Averager(64)), (large, Averager(64))], "two") == [LayoutMismatch, LayoutMismatch]
    # The odd one is told to stop; the others lose one epoch.
    three = [(small, Averager(64)), (large, Averager(64)), (small, Averager(64))]
    assert disagreement(three, "three") == [RuntimeError, LayoutMismatch, RuntimeError]
    settings = [(small, Averager(64)), (small, Averager(128)), (small, Averager(64, codec_named("bf16")))]
    assert disagreement(settings, "settings") == [LayoutMismatch] * 3
