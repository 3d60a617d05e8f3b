"""The memory behind a tensor leaf: parameters, DTensors and expanded views, read and written as plain bits."""

from __future__ import annotations

import torch
from torch import Tensor

from recovery.state.leaf import local_of, memory_key, tensor_leaf

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local(tensor: Tensor) -> Tensor:
    """Return this process's memory of ``tensor`` as a plain tensor that autograd does not know.

    The result shares memory with ``tensor`` but not its version counter: writing it is not an in-place operation in
    autograd's eyes. For a DTensor it is the local shard.
    """
    here = local_of(tensor)
    assert isinstance(here, Tensor)
    return here.data


def may_overlap(tensor: Tensor) -> bool:
    """Return whether two elements of ``tensor`` may lie at one address (expanded or overlapping views)."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def can_hold(tensor: Tensor) -> bool:
    """Return whether ``tensor`` can be written at all: at most expanded, not overlapping otherwise, not lazy."""
    return not (tensor.is_conj() or tensor.is_neg()) and not may_overlap(_without_expanded(tensor))


def tie_key(path: str, tensor: Tensor) -> object:
    """Return what two tensors have in common exactly if they are the same elements of the same memory.

    Raises:
        UnsupportedLeaf: a tensor that cannot travel; names ``path``.
    """
    return memory_key(tensor_leaf(path, tensor))


def bits(tensor: Tensor) -> Tensor:
    """Return ``tensor``'s memory as integers, one or (complex128) two an element: copying them changes no NaN."""
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape hold the same bits."""
    return torch.equal(bits(a), bits(b).to(a.device))


def can_take(target: Tensor, source: Tensor) -> bool:
    """Return whether ``copy_bits(target, source)`` would leave ``target`` equal to ``source``.

    True for every dense target. An expanded target can take a source that is constant along the expanded dimensions.
    """
    if target.shape != source.shape or target.dtype != source.dtype or target.is_conj() or target.is_neg():
        return False
    if not may_overlap(target):
        return True
    constant = _without_expanded(source, like=target)
    return can_hold(target) and same_bits(constant.expand(source.shape), source)


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Write ``source`` into ``target``'s memory, bit for bit; ``can_take`` must hold."""
    if may_overlap(target):
        target, source = _without_expanded(target), _without_expanded(source, like=target)
    if target.data_ptr() == source.data_ptr() and target.stride() == source.stride() and target.device == source.device:
        return
    bits(target).copy_(bits(source))


def _without_expanded(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return ``tensor`` with every dimension that ``like`` expands (stride 0) narrowed to its first element."""
    for dim, (stride, size) in enumerate(zip((tensor if like is None else like).stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
