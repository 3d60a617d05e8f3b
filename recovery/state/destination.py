"""Where a leaf's bytes are received: the tensor that exists, or a new one in the form that the worker needs."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor, nn

from recovery.errors import LayoutMismatch
from recovery.state.leaf import NUMPY_DTYPES, TORCH_DTYPES, TensorKind, dtype_name, local_of, tensor_leaf
from recovery.state.local_tensor import can_hold, local, may_overlap
from recovery.state.manifest import TensorSpec, empty_leaf
from recovery.state.part import Owner


def fits(existing: object, spec: TensorSpec, *, whole: bool) -> bool:
    """Return whether ``existing`` has the leaf's form, so that the donor's bytes can be written into its memory.

    Args:
        existing: What stands at the leaf's path on this worker; None where nothing does.
        spec: The leaf.
        whole: Elements that share memory (an expanded tensor) do not fit: the leaf can be replaced by a dense one.
    """
    if isinstance(existing, np.ndarray):
        return (
            spec.kind is TensorKind.NDARRAY
            and (dtype_name(existing), existing.shape) == (spec.dtype, spec.shape)
            and existing.flags.writeable
        )
    if not isinstance(existing, Tensor) or spec.kind is TensorKind.NDARRAY:
        return False
    here = local(existing)
    if (dtype_name(here), tuple(here.shape)) != (spec.dtype, spec.shape) or not can_hold(here):
        return False
    if tensor_leaf(spec.path, existing).shard != spec.shard:
        return False
    return not (whole and may_overlap(here))


def staging(spec: TensorSpec) -> Tensor | np.ndarray:
    """Return memory for a leaf that is to be copied somewhere else at the commit: dense, row-major, on the CPU."""
    if spec.kind is TensorKind.NDARRAY:
        return np.empty(spec.shape, dtype=NUMPY_DTYPES[spec.dtype])
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])


def new_leaf(spec: TensorSpec, owner: Owner | None, at: str) -> Tensor | np.ndarray:
    """Return a leaf in its final form, whose content is undefined.

    Its device is the owner's (a step counter's is the CPU, unless the optimizer counts on the device), its memory order
    the donor's. Random generators are not touched.

    Raises:
        LayoutMismatch: a shard for which this worker has no DTensor to take the mesh from.
    """
    if spec.shard is None:
        return empty_leaf(spec, _device(spec, owner))
    plain = dataclasses.replace(spec, kind=TensorKind.TENSOR, requires_grad=False)
    dense = empty_leaf(plain, _device(spec, owner))
    assert isinstance(dense, Tensor)
    shard = _as_dtensor(dense, spec, owner, at)
    if spec.kind is TensorKind.PARAMETER:
        return nn.Parameter(shard, requires_grad=spec.requires_grad)
    return shard.requires_grad_(spec.requires_grad)


def _device(spec: TensorSpec, owner: Owner | None) -> torch.device:
    if owner is None:
        return torch.device("cpu")
    if not spec.shape and spec.device_kind == "cpu" and not owner.counts_on_device:
        return torch.device("cpu")
    return local(owner.parameter).device


def _as_dtensor(dense: Tensor, spec: TensorSpec, owner: Owner | None, at: str) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    assert spec.shard is not None
    parameter = None if owner is None else owner.parameter
    if not isinstance(parameter, DTensor):
        raise LayoutMismatch(f"{at}: the donor's is a shard of a DTensor, this worker's parameter is none")
    mesh = parameter.device_mesh
    if tuple(mesh.shape) != spec.shard.mesh_shape:
        raise LayoutMismatch(f"{at}: the donor's mesh is {spec.shard.mesh_shape}, this worker's {tuple(mesh.shape)}")

    def placement(text: str) -> Placement:
        kind, _, argument = text.rstrip(")").partition("(")
        if kind == "R":
            return Replicate()
        if kind == "S" and argument.isdecimal():
            return Shard(int(argument))
        if kind == "P" and argument:
            return Partial(argument)
        raise LayoutMismatch(f"{at}: the donor's placement {text!r} has no counterpart here")

    shape = torch.Size(spec.shard.global_shape)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    made: Tensor = DTensor.from_local(
        dense, mesh, [placement(text) for text in spec.shard.placements], run_check=False, shape=shape, stride=stride
    )
    return made


def raw(leaf: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return the memory of a leaf, as ``PartBytes`` writes it: no autograd, no version counter, the local shard."""
    return local(leaf) if isinstance(leaf, Tensor) else local_of(leaf)
