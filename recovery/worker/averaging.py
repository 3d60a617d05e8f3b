"""The weighted mean of pseudo-gradients over one epoch's group, bit-equal on every member.

Each bucket is cut into one segment a member. Members swap segments (all-to-all), each sums its own segment over the
ranks **in rank order**, divides by the sum of weights, and all gather the results. The order of summation depends on
nothing but the roster, so a single process can compute the same bits (``reference_mean``), and every member holds the
same bits because each element is computed in exactly one place. Traffic is that of a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, Work

from recovery.errors import BadConfiguration


class Collectives(Protocol):
    """What is used of a process group; torch's stubs leave these methods out of the backend classes."""

    def size(self) -> int:
        """Return the number of ranks."""

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], options: AllToAllOptions
    ) -> Work:
        """Swap equal segments."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: AllgatherOptions) -> Work:
        """Gather everybody's tensor."""


_ACCUMULATE = {torch.float64: torch.float64}


class Averager:
    """Averages lists of tensors over a group, in buckets of bounded size.

    Owned by the training thread. The tensors that ``average`` returns belong to the averager's current buffers: they
    stay valid until the next call of ``average``. After a failed call the buffers are dropped, never used again,
    because an abandoned operation may still write into them.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._results: list[Tensor] = []

    def average(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        rank: int,
        group: Collectives | None,
        timeout: float,
    ) -> list[Tensor]:
        """Return the weighted means, one a tensor: same shape and dtype, on the CPU.

        Args:
            tensors: This member's contribution: dense floating-point CPU or device tensors; not changed.
            weights: One a rank, at least 0; if all are 0, every member counts alike.
            rank: This member's rank.
            group: The epoch's group; None for a roster of one.
            timeout: Seconds that one collective may take.

        Raises:
            BadConfiguration: a tensor is not floating-point.
            RuntimeError: the group failed (from gloo). Nothing outside of the averager's own buffers was written.
        """
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                raise BadConfiguration(f"pseudo-gradient {index} has dtype {tensor.dtype}: only floats can be averaged")
        results, self._results = self._buffers_for(tensors), []
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            accumulate = _ACCUMULATE.get(dtype, torch.float32)
            for spans in _buckets([results[i].numel() for i in same], self._bucket_bytes // accumulate.itemsize):
                size = sum(stop - start for _, start, stop in spans)
                mine = torch.zeros(_padded(size, len(weights)), dtype=accumulate)
                _gather(mine, [(tensors[same[i]], start, stop) for i, start, stop in spans])
                mean = _mean_of_bucket(mine, weights, rank, group, timeout)
                _scatter(mean, [(results[same[i]], start, stop) for i, start, stop in spans])
        self._results = results
        return results

    def _buffers_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        same = len(self._results) == len(tensors) and all(
            old.shape == new.shape and old.dtype == new.dtype for old, new in zip(self._results, tensors, strict=True)
        )
        return self._results if same else [torch.empty(t.shape, dtype=t.dtype) for t in tensors]


def reference_mean(contributions: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """Return what every member gets for these contributions (one list of tensors a rank), computed in one process."""
    means = []
    for parts in zip(*contributions, strict=True):
        accumulate = _ACCUMULATE.get(parts[0].dtype, torch.float32)
        rows = torch.stack([part.detach().reshape(-1).to(accumulate) for part in parts])
        means.append(_sum_in_rank_order(rows, weights).to(parts[0].dtype).reshape(parts[0].shape))
    return means


def sum_integers(values: Sequence[int], group: Collectives | None, timeout: float) -> list[int]:
    """Return the sums of 64-bit integers over the group."""
    if group is None:
        return list(values)
    mine = torch.tensor(list(values), dtype=torch.int64)
    everyone = _all_gather(mine, group, timeout)
    return [int(total) for total in everyone.reshape(group.size(), -1).sum(dim=0)]


def _mean_of_bucket(
    mine: Tensor, weights: Sequence[float], rank: int, group: Collectives | None, timeout: float
) -> Tensor:
    if group is None:
        return _sum_in_rank_order(mine.reshape(1, -1), weights)
    swapped = torch.empty_like(mine)
    options = AllToAllOptions()
    options.timeout = timedelta(seconds=timeout)
    group.alltoall_base(swapped, mine, [], [], options).wait()
    segment = _sum_in_rank_order(swapped.reshape(len(weights), -1), weights)
    return _all_gather(segment, group, timeout)


def _all_gather(mine: Tensor, group: Collectives, timeout: float) -> Tensor:
    everyone = torch.empty(mine.numel() * group.size(), dtype=mine.dtype)
    options = AllgatherOptions()
    options.timeout = timedelta(seconds=timeout)
    group.allgather([list(everyone.chunk(group.size()))], [mine], options).wait()
    return everyone


def _sum_in_rank_order(rows: Tensor, weights: Sequence[float]) -> Tensor:
    if not any(weights):
        weights = [1.0] * len(weights)
    total = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        # Two roundings, multiply then add: a fused multiply-add would differ between CPUs of one numerics id.
        total += row * weight
    return total.div_(sum(weights))


def _padded(size: int, members: int) -> int:
    return -(-size // members) * members


def _buckets(sizes: Sequence[int], limit: int) -> list[list[tuple[int, int, int]]]:
    """Return lists of (tensor, start, stop) in elements; every list holds at most ``limit`` elements."""
    buckets: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = max(limit, 1)
            stop = min(size, start + room)
            buckets[-1].append((index, start, stop))
            room -= stop - start
            start = stop
    return buckets


def _gather(out: Tensor, spans: Sequence[tuple[Tensor, int, int]]) -> None:
    at = 0
    for tensor, start, stop in spans:
        out[at : at + stop - start].copy_(tensor.detach().reshape(-1)[start:stop])
        at += stop - start


def _scatter(values: Tensor, spans: Sequence[tuple[Tensor, int, int]]) -> None:
    at = 0
    for tensor, start, stop in spans:
        tensor.view(-1)[start:stop].copy_(values[at : at + stop - start])
        at += stop - start
