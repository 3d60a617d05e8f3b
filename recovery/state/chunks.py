"""A part's tensors as one byte string: where its chunks lie, and reading and writing any range of it."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from recovery.errors import MisuseError
from recovery.state.leaf import local_of
from recovery.types import MIB

CHUNK_BYTES = 4 * MIB
"""The unit of digests. A multiple of every item size, so that no chunk of a large tensor splits an element."""

GIL_SHARE = 256
"""Small tensors handled between two offers of the GIL: some tenths of a millisecond, far below its switch interval."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size: copying as integers keeps NaN payloads and works for dtypes that have no copy kernel."""


_ONE_THREAD_BYTES = 32 * 1024
"""Up to here torch copies with the calling thread alone."""


def copy_bytes(into: torch.Tensor, data: torch.Tensor) -> None:
    """Copy 1-d contiguous uint8 CPU tensors of one size with the calling thread alone; others run meanwhile.

    torch would let every thread that calls it start a team as large as the machine has cores: readers and writers that
    are several already then wait for each other. Measured on two cores: 6.1 GB/s verified by two threads, and 8.6.
    """
    if data.numel() <= _ONE_THREAD_BYTES:
        into.copy_(data)
        return
    np.copyto(into.numpy(), data.numpy())
    torch.autograd.graph.increment_version(into)  # as copy_ does: autograd sees that the memory changed


class Sized(Protocol):
    """What has a size in bytes; a ``TensorSpec``, for example."""

    @property
    def num_bytes(self) -> int: ...


def chunk_ranges(tensor_num_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (offset, bytes) of every chunk of a part whose tensors have these bytes, in order, without gaps.

    A tensor of at least ``CHUNK_BYTES`` starts a chunk and is cut every ``CHUNK_BYTES``; its rest is its own chunk.
    Neighbouring smaller tensors are packed, whole, while they fit into ``CHUNK_BYTES``. No chunk is empty.
    """
    return list(iterate_chunk_ranges(tensor_num_bytes))


def iterate_chunk_ranges(tensor_num_bytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield what ``chunk_ranges`` lists, so that a table can be checked without building one of its claimed size."""
    start = packed = 0
    for num_bytes in tensor_num_bytes:
        if packed and (num_bytes >= CHUNK_BYTES or packed + num_bytes > CHUNK_BYTES):
            yield start, packed
            start, packed = start + packed, 0
        if num_bytes < CHUNK_BYTES:
            packed += num_bytes
            continue
        for position in range(0, num_bytes, CHUNK_BYTES):
            yield start + position, min(CHUNK_BYTES, num_bytes - position)
        start += num_bytes
    if packed:
        yield start, packed


class PartBytes:
    """The tensors of one part, addressed as one byte string: logical bytes, row-major, one tensor after the other.

    Holds live references: what a tensor holds at the time of the call is read, and writes go into the tensors' own
    memory, whatever their strides and devices. Threads may read and write ranges that do not overlap at once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | np.ndarray], specs: Sequence[Sized] | None = None) -> None:
        """Store references.

        Args:
            tensors: Tensors, DTensors (their local tensors count) or arrays, in the order of the part.
            specs: Where given, each tensor must have its spec's ``num_bytes``.

        Raises:
            MisuseError: tensors and specs do not fit each other.
        """
        self._holders = [_holder_of(local_of(tensor)) for tensor in tensors]
        self._starts: list[int] = []
        position = 0
        for holder in self._holders:
            self._starts.append(position)
            position += holder.nbytes if isinstance(holder, np.ndarray) else holder.numel() * holder.itemsize
        self.num_bytes = position
        self._flat: list[torch.Tensor | bool | None] = [False] * len(self._holders)  # False: not tried yet
        if specs is not None:
            self._check(specs)

    @property
    def num_tensors(self) -> int:
        return len(self._holders)

    @property
    def tensor_num_bytes(self) -> list[int]:
        """Bytes of each tensor."""
        ends = [*self._starts[1:], self.num_bytes] if self._starts else []
        return [end - start for start, end in zip(self._starts, ends, strict=True)]

    def view(self, offset: int, num_bytes: int) -> torch.Tensor | None:
        """Return the range without a copy if it lies in one dense row-major CPU tensor, else None.

        The result is a 1-d uint8 tensor that shares the tensor's memory.
        """
        self._check_range(offset, num_bytes)
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        index = bisect_right(self._starts, offset) - 1
        flat = self._flat_of(index)
        start = offset - self._starts[index]
        if flat is None or start + num_bytes > flat.numel():
            return None
        return flat[start : start + num_bytes]

    def read(self, offset: int, num_bytes: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the range as a 1-d contiguous uint8 CPU tensor.

        Args:
            offset: First byte.
            num_bytes: How many.
            out: Where to copy them, 1-d contiguous uint8 on the CPU of exactly ``num_bytes``. None: a view of the
                tensor's memory where possible, else a fresh copy.
        """
        if out is None:
            found = self.view(offset, num_bytes)
            if found is not None:
                return found
            out = torch.empty(num_bytes, dtype=torch.uint8)
        else:
            self._check_range(offset, num_bytes)
            _check_payload(out, num_bytes)
        dense: list[torch.Tensor] = []
        dense_from = position = 0
        for index, start, stop in self._spans(offset, num_bytes):
            flat = self._flat_of(index)
            if flat is not None:
                dense.append(flat if stop - start == flat.numel() else flat[start:stop])
            else:
                _gather_run(dense, out[dense_from:position])
                _copy_strided(self._holders[index], start, out[position : position + stop - start], to_holder=False)
                dense, dense_from = [], position + stop - start
            position += stop - start
        _gather_run(dense, out[dense_from:position])
        return out

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copy ``data`` (1-d contiguous uint8 on the CPU) into the range of its size that begins at ``offset``.

        An expanded tensor's one element takes the last of the bytes that stand for it.
        """
        _check_payload(data, data.numel())
        self._check_range(offset, data.numel())
        position = 0
        for index, start, stop in self._spans(offset, data.numel()):
            flat = self._flat_of(index)
            piece = data[position : position + stop - start]
            if flat is not None:
                copy_bytes(flat[start:stop], piece)
            else:
                _copy_strided(self._holders[index], start, piece, to_holder=True)
            position += stop - start

    def tensor_range(self, index: int) -> tuple[int, int]:
        """Return (offset, bytes) of a tensor."""
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self.num_bytes
        return start, end - start

    def tensors_in(self, offset: int, num_bytes: int) -> range:
        """Return the indices of the tensors that have bytes in the range (empty tensors between them included)."""
        self._check_range(offset, num_bytes)
        if not num_bytes:
            return range(0)
        first = bisect_right(self._starts, offset) - 1
        return range(first, bisect_right(self._starts, offset + num_bytes - 1))

    def _spans(self, offset: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        end = offset + num_bytes
        for count, index in enumerate(self.tensors_in(offset, num_bytes)):
            start, size = self.tensor_range(index)
            if size:
                yield index, max(0, offset - start), min(size, end - start)
            if count % GIL_SHARE == GIL_SHARE - 1:
                time.sleep(0)

    def _flat_of(self, index: int) -> torch.Tensor | None:
        flat = self._flat[index]
        if isinstance(flat, bool):
            holder = self._holders[index]
            flat = None
            if isinstance(holder, torch.Tensor) and holder.device.type == "cpu" and holder.is_contiguous():
                if holder.numel() != 1:
                    flat = holder.view(-1).view(torch.uint8)
                else:  # a contiguous tensor of one element may have any stride, which cannot become a stride of bytes
                    flat = holder.unsqueeze(-1).view(torch.uint8).view(-1)
            self._flat[index] = flat
        return flat

    def _check_range(self, offset: int, num_bytes: int) -> None:
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise MisuseError(f"bytes {offset} to {offset + num_bytes} of a part of {self.num_bytes} bytes")

    def _check(self, specs: Sequence[Sized]) -> None:
        found, expected = self.tensor_num_bytes, [spec.num_bytes for spec in specs]
        if found != expected:
            at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), -1)
            detail = f"tensor {at} has {found[at]} and its spec {expected[at]} bytes" if at >= 0 else "one for each"
            raise MisuseError(f"{len(found)} tensors do not fit {len(expected)} specs: {detail}")


def _holder_of(value: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    if isinstance(value, torch.Tensor):
        return value.detach()
    usable = value.flags.writeable and all(step >= 0 and step % value.itemsize == 0 for step in value.strides)
    # torch has no negative strides, and warns of arrays that it must not write to: those stay arrays.
    return torch.from_numpy(value) if usable else value


def _check_payload(data: torch.Tensor, num_bytes: int) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or data.device.type != "cpu" or not data.is_contiguous():
        raise MisuseError(f"a payload is a 1-d contiguous uint8 CPU tensor, not {data.dtype} {tuple(data.shape)}")
    if data.numel() != num_bytes:
        raise MisuseError(f"a buffer of {data.numel()} bytes for {num_bytes}")


def _gather_run(dense: list[torch.Tensor], out: torch.Tensor) -> None:
    if len(dense) == 1:
        out.copy_(dense[0])
    elif dense:
        torch.cat(dense, out=out)  # one call that releases the GIL, however many small tensors there are


def _copy_strided(holder: torch.Tensor | np.ndarray, start: int, data: torch.Tensor, *, to_holder: bool) -> None:
    """Copy bytes ``start`` to ``start + len(data)`` of a tensor's logical bytes from or to ``data``."""
    if isinstance(holder, np.ndarray):
        _copy_array(holder, start, data.numpy(), to_holder=to_holder)
        return
    words, item = _as_words(holder)
    stop = start + data.numel()
    if start % item or stop % item or data.storage_offset() % item:
        # A range that splits an element: the same tensor with one more dimension, its elements' bytes.
        words, item = holder.unsqueeze(-1).view(torch.uint8), 1
    flat = data.view(words.dtype)
    position = 0
    for place in _boxes(tuple(words.shape), start // item, stop // item):
        box = words[place]
        piece = flat[position : position + box.numel()].view(box.shape)
        position += box.numel()
        if to_holder:
            for dim in range(box.dim()):
                if box.stride(dim) == 0 and box.shape[dim] > 1:  # copy_ refuses to write one element many times
                    box, piece = box.narrow(dim, 0, 1), piece.narrow(dim, piece.shape[dim] - 1, 1)
            _copy_box(piece, box, to_box=True)
        else:
            _copy_box(piece, box, to_box=False)


_FAR_BYTES = 2048
"""Neighbours of a row this far apart in memory are copied by way of a dense buffer."""
_TILE_ELEMENTS = 16 * 1024
"""Size of that buffer: inside the second-level cache, and too small for torch to wake its other threads for a copy."""


def _copy_box(piece: torch.Tensor, box: torch.Tensor, *, to_box: bool) -> None:
    """Copy between a row-major piece and a box of any strides.

    The rows of a transposed matrix step a whole column's distance an element, often a power of two, so that all land
    in few sets of the cache: one direct copy runs at a twentieth of the speed of two, each along one side's memory.
    """
    far = box.dim() > 1 and box.stride(-1) * box.itemsize >= _FAR_BYTES and box.numel() > 4096
    order = sorted(range(box.dim()), key=box.stride, reverse=True) if far else []
    if order == list(range(box.dim())) or 0 in box.stride():
        order = []
    if not order:
        box.copy_(piece) if to_box else piece.copy_(box)
        return
    rows = max(1, _TILE_ELEMENTS * box.shape[0] // box.numel())
    scratch = torch.empty(rows * (box.numel() // box.shape[0]), dtype=box.dtype)
    for first in range(0, box.shape[0], rows):
        tile, part = box[first : first + rows], piece[first : first + rows]
        dense = scratch[: tile.numel()].view([tile.shape[dim] for dim in order])
        as_piece = dense.permute([order.index(dim) for dim in range(tile.dim())])
        if to_box:
            as_piece.copy_(part)
            tile.permute(order).copy_(dense)
        else:
            dense.copy_(tile.permute(order))
            part.copy_(as_piece)


def _as_words(holder: torch.Tensor) -> tuple[torch.Tensor, int]:
    item = holder.itemsize
    if item == 16:
        return torch.view_as_real(holder).view(torch.int64), 8
    return holder.view(_WORDS[item]), item


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield index tuples of boxes that make up elements ``start`` to ``stop`` in row-major order, in that order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        for rest in _boxes(shape[1:], head, tail):
            yield (first, *rest)
        return
    if head:
        for rest in _boxes(shape[1:], head, inner):
            yield (first, *rest)
        first += 1
    if first < last:
        yield (slice(first, last),)
    for rest in _boxes(shape[1:], 0, tail):
        yield (last, *rest)


def _copy_array(holder: np.ndarray, start: int, data: np.ndarray, *, to_holder: bool) -> None:
    item = holder.itemsize
    first, stop = start // item, -(-(start + data.size) // item)
    elements = np.ascontiguousarray(holder.flat[first:stop])
    raw = elements.view(np.uint8)
    inside = slice(start - first * item, start - first * item + data.size)
    if to_holder:
        if not holder.flags.writeable:
            raise MisuseError(f"an array of shape {holder.shape} is read-only and cannot be written in place")
        raw[inside] = data
        holder.flat[first:stop] = elements
    else:
        data[:] = raw[inside]
