"""The weighted mean of pseudo-gradients over one epoch's group, bit-equal on every member.

Each bucket is cut into one segment a member. Members swap segments (all-to-all), each sums its own segment over the
ranks **in rank order**, divides by the sum of weights, and all gather the results. The order of summation depends on
nothing but the roster, so a single process can compute the same bits (``reference_mean``), and every member holds the
same bits because each element is computed in exactly one place. Traffic is that of a ring all-reduce, in the bytes of
the run's gradient codec.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import blake3
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, Work

from recovery.errors import BadConfiguration, LayoutMismatch, ManifestRejected
from recovery.worker.gradient_codec import GradientCodec, PlainCodec


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
_PLAIN = PlainCodec()
_SHAPE_WORDS = 4
"""64-bit words of the digest by which members compare what they are about to average."""


class Averager:
    """Averages lists of tensors over a group, in buckets of bounded size.

    Owned by the training thread. The tensors that ``average`` returns belong to the averager's current buffers: they
    stay valid until the next call of ``average``. After a failed call the buffers are dropped, never used again,
    because an abandoned operation may still write into them.
    """

    def __init__(self, bucket_bytes: int, codec: GradientCodec = _PLAIN) -> None:
        self._bucket_bytes = bucket_bytes
        self._codec = codec
        self._results: list[Tensor] = []
        self._encoded: list[Tensor] = []

    def agree(
        self, tensors: Sequence[Tensor], integers: Sequence[int], rank: int, group: Collectives | None, timeout: float
    ) -> list[int]:
        """Return the sums of 64-bit integers over the group, once all members are known to average the same shapes.

        gloo ends a process that gets more bytes than it expects: what would differ is found here, before any tensor
        moves.

        Raises:
            LayoutMismatch: this member's shapes, dtypes, codec or bucket size are not those of most of the others. The
                message names their ranks.
            RuntimeError: the group failed.
        """
        if group is None:
            return list(integers)
        terms = (self._codec.name, self._bucket_bytes, [(tuple(t.shape), str(t.dtype)) for t in tensors])
        digest = blake3.blake3(repr(terms).encode()).digest(8 * _SHAPE_WORDS)
        words = list(struct.unpack(f"<{_SHAPE_WORDS}q", digest))
        everyone = _all_gather(torch.tensor([*words, *integers], dtype=torch.int64), group, timeout)
        rows = everyone.reshape(group.size(), -1)
        described = [tuple(row.tolist()) for row in rows[:, :_SHAPE_WORDS]]
        others = [other for other, shape in enumerate(described) if shape != tuple(words)]
        if others and 2 * len(others) >= len(described):
            raise LayoutMismatch(
                f"rank {rank} wants to average {len(tensors)} tensors with codec {self._codec.name} in buckets of "
                f"{self._bucket_bytes} bytes, ranks {', '.join(map(str, others))} want something else: "
                "pseudo_gradients() has to return the same shapes and dtypes everywhere, under the same settings"
            )
        if others:
            raise RuntimeError(f"ranks {', '.join(map(str, others))} want to average other shapes or dtypes")
        return [int(total) for total in rows[:, _SHAPE_WORDS:].sum(dim=0)]

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
        encoded: list[Tensor] = []
        self._encoded = []
        for accumulate, spans in _buckets_of(results, self._codec, self._bucket_bytes):
            size = sum(stop - start for _, start, stop in spans)
            mine = torch.zeros(_padded(size, len(weights) * self._codec.block), dtype=accumulate)
            _gather(mine, [(tensors[i], start, stop) for i, start, stop in spans])
            rows = _mean_of_bucket(mine, weights, self._codec, group, timeout)
            mean = self._codec.decode(rows, accumulate).reshape(-1)
            _scatter(mean, [(results[i], start, stop) for i, start, stop in spans])
            if self._codec.name != _PLAIN.name:
                encoded.append(rows)
        self._results, self._encoded = results, encoded
        return results

    def hand_over(self) -> None:
        """What the last ``average`` returned belongs to somebody else from now on: it is not used again."""
        self._results = []

    def take_encoded(self) -> list[Tensor]:
        """Return the last average as it travelled, a tensor a bucket, for ``decode_averages``; empty: it was plain."""
        encoded, self._encoded = self._encoded, []
        return encoded

    def _buffers_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        same = len(self._results) == len(tensors) and all(
            old.shape == new.shape and old.dtype == new.dtype for old, new in zip(self._results, tensors, strict=True)
        )
        return self._results if same else [torch.empty(t.shape, dtype=t.dtype) for t in tensors]


def decode_averages(
    encoded: Sequence[Tensor], like: Sequence[tuple[torch.Size, torch.dtype]], codec: GradientCodec, bucket_bytes: int
) -> list[Tensor]:
    """Return the averages that ``take_encoded`` returned the bytes of, bit for bit as every member got them.

    Args:
        encoded: One tensor a bucket.
        like: Shape and dtype of each average.
        codec: The run's.
        bucket_bytes: The run's.

    Raises:
        ManifestRejected: the bytes are not those of such averages.
    """
    results = [torch.empty(shape, dtype=dtype) for shape, dtype in like]
    buckets = list(_buckets_of(results, codec, bucket_bytes))
    if len(buckets) != len(encoded):
        raise ManifestRejected(f"{len(encoded)} buckets of averages came where {len(buckets)} were due")
    for (accumulate, spans), rows in zip(buckets, encoded, strict=True):
        mean = codec.decode(rows, accumulate).reshape(-1)
        if mean.numel() < sum(stop - start for _, start, stop in spans):
            raise ManifestRejected(f"a bucket of averages has {mean.numel()} values: too few for its tensors")
        _scatter(mean, [(results[i], start, stop) for i, start, stop in spans])
    return results


def terms_digest(layout_digest: bytes, codec_name: str, bucket_bytes: int) -> bytes:
    """Return the digest of what all workers of a run must have in common: their layout, and how they average."""
    return blake3.blake3(layout_digest + repr((codec_name, bucket_bytes)).encode()).digest()


def reference_mean(
    contributions: Sequence[Sequence[Tensor]], weights: Sequence[float], codec: GradientCodec = _PLAIN
) -> list[Tensor]:
    """Return what every member gets for these contributions (one list of tensors a rank), computed in one process."""
    first = contributions[0]
    means = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in first]
    for dtype in {tensor.dtype for tensor in first}:
        same = [index for index, tensor in enumerate(first) if tensor.dtype == dtype]
        spans = [(index, 0, first[index].numel()) for index in same]
        size = sum(stop for _, _, stop in spans)
        rows = torch.zeros(len(weights), _padded(size, codec.block), dtype=_ACCUMULATE.get(dtype, torch.float32))
        for row, tensors in zip(rows, contributions, strict=True):
            _gather(row, [(tensors[index], start, stop) for index, start, stop in spans])
        mean = _sum_in_rank_order(_rounded(rows, codec), weights)
        _scatter(
            _rounded(mean.reshape(1, -1), codec).reshape(-1),
            [(means[index], start, stop) for index, start, stop in spans],
        )
    return means


def _rounded(rows: Tensor, codec: GradientCodec) -> Tensor:
    return codec.decode(codec.encode(rows), rows.dtype) if rows.numel() else rows


def _mean_of_bucket(
    mine: Tensor, weights: Sequence[float], codec: GradientCodec, group: Collectives | None, timeout: float
) -> Tensor:
    """Return the mean as it travels: one encoded row a member."""
    encoded = codec.encode(mine.reshape(len(weights), -1))
    if group is not None:
        swapped = torch.empty_like(encoded)
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout)
        group.alltoall_base(swapped.view(-1), encoded.view(-1), [], [], options).wait()
        encoded = swapped
    segment = codec.encode(_sum_in_rank_order(codec.decode(encoded, mine.dtype), weights).reshape(1, -1))
    if group is not None:
        segment = _all_gather(segment.view(-1), group, timeout).reshape(group.size(), -1)
    return segment


def _buckets_of(
    tensors: Sequence[Tensor], codec: GradientCodec, bucket_bytes: int
) -> Iterator[tuple[torch.dtype, list[tuple[int, int, int]]]]:
    """Yield what is averaged in one go: the dtype it is summed in, and (tensor, start, stop) in elements."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        accumulate = _ACCUMULATE.get(dtype, torch.float32)
        limit = max(1, bucket_bytes // accumulate.itemsize // codec.block) * codec.block
        for spans in _buckets([tensors[i].numel() for i in same], limit):
            yield accumulate, [(same[i], start, stop) for i, start, stop in spans]


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
