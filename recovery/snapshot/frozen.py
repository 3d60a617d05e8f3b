"""A part whose bytes stand in memory of our own: the same leaves, seen as views of one byte string."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from recovery.state.chunks import PartBytes, chunk_ranges
from recovery.state.leaf import NUMPY_DTYPES, TORCH_DTYPES, TensorKind
from recovery.state.live_part import LivePart
from recovery.state.manifest import TensorSpec
from recovery.state.turns import in_turns


def freeze(live: LivePart, data: torch.Tensor) -> LivePart:
    """Return ``live`` with its tensors replaced by what ``data`` holds.

    Args:
        live: The part as it was read.
        data: The part's logical bytes, 1-d uint8 on the CPU. Owned by the caller; the result refers to it, but for
            leaves whose place in it does not suit their dtype, which are copied.
    """
    leaves = tuple(
        dataclasses.replace(leaf, value=_value(spec, data[spec.offset : spec.offset + spec.num_bytes]))
        for leaf, spec in in_turns(zip(live.leaves, live.specs, strict=True))
    )
    values = [leaf.value for leaf in leaves]
    return dataclasses.replace(live, leaves=leaves, bytes=PartBytes(in_turns(values), live.specs))


def copy_range(live: LivePart, offset: int, out: torch.Tensor) -> None:
    """``out`` holds the part's bytes from ``offset`` on.

    A dense stretch is copied by the calling thread alone, without the GIL: torch's thread pool is left to training,
    and the guard does not depend on when the pool's threads get a core.
    """
    view = live.bytes.view(offset, out.numel())
    if view is None:
        live.bytes.read(offset, out.numel(), out)
    else:
        np.copyto(out.numpy(), view.numpy())


def stretches(live: LivePart, most_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of stretches that cover the part: dense memory where possible, chunks taken together."""
    ranges: list[tuple[int, int]] = []
    for offset, num_bytes in chunk_ranges([spec.num_bytes for spec in live.specs]):
        if ranges:
            start, size = ranges[-1]
            if size + num_bytes <= most_bytes and live.bytes.view(start, size + num_bytes) is not None:
                ranges[-1] = (start, size + num_bytes)
                continue
        ranges.append((offset, num_bytes))
    return ranges


def _value(spec: TensorSpec, data: torch.Tensor) -> torch.Tensor | np.ndarray:
    if spec.kind is TensorKind.NDARRAY:
        dtype = NUMPY_DTYPES[spec.dtype]
        raw = data.numpy() if data.data_ptr() % dtype.itemsize == 0 else data.numpy().copy()
        return raw.view(dtype).reshape(spec.shape)
    torch_dtype = TORCH_DTYPES[spec.dtype]
    if data.data_ptr() % torch_dtype.itemsize or data.storage_offset() % torch_dtype.itemsize:
        data = data.clone()
    if not data.numel():
        return torch.empty(spec.shape, dtype=torch_dtype)
    return data.view(torch_dtype).view(spec.shape)
