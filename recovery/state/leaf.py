"""What a tensor leaf is: its kinds, its dtypes by name, its shard of a global tensor, its identity in memory."""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from recovery.errors import UnsupportedLeaf

_FLOAT_NAMES = ("float64", "float32", "float16", "complex64", "complex128")
_WHOLE_NAMES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
_NARROW_NAMES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_NUMPY_NAMES = (*_FLOAT_NAMES, *_WHOLE_NAMES)
_TORCH_NAMES = (*_NUMPY_NAMES, *_NARROW_NAMES)

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _TORCH_NAMES if hasattr(torch, name)}
"""Dtypes whose elements are whole bytes with one fixed meaning, by torch's name without the module."""
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {name: np.dtype(name) for name in _NUMPY_NAMES}
"""Dtypes of arrays and numpy scalars; the names are torch's."""
NUMPY_NAMES: dict[np.dtype[np.generic], str] = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
GRAD_DTYPES = frozenset(name for name, dtype in TORCH_DTYPES.items() if dtype.is_floating_point or dtype.is_complex)


class TensorKind(enum.Enum):
    """What a leaf was on the worker that took the snapshot, and becomes again where it has to be created."""

    TENSOR = 1
    PARAMETER = 2
    NDARRAY = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """One rank's box of a global tensor."""

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    placements: tuple[str, ...]
    """One entry a mesh dimension, as torch prints it: ``S(0)``, ``R``, ``P(sum)``."""
    mesh_shape: tuple[int, ...]


@dataclass(slots=True)
class Leaf:
    """A tensor found in a tree.

    ``value`` holds the bytes: the tensor or array itself, or a DTensor's local tensor. ``source`` is the object that
    stood in the tree. Both are live references, not copies.
    """

    path: str
    value: torch.Tensor | np.ndarray
    kind: TensorKind
    source: object
    shard: ShardSpec | None = None

    @property
    def requires_grad(self) -> bool:
        return isinstance(self.source, torch.Tensor) and self.source.requires_grad


def unsupported(path: str, value: object, remedy: str) -> UnsupportedLeaf:
    """Return the error that names the place, the type and what to do about it."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return UnsupportedLeaf(f"{path or '(root)'}: a value of type {name} has no exact form here; {remedy}")


def tensor_leaf(path: str, value: torch.Tensor) -> Leaf:
    """Return the leaf for a tensor of any supported class.

    Raises:
        UnsupportedLeaf: a subclass other than Parameter and DTensor, a sparse, nested, quantized, meta or lazily
            conjugated tensor, or a dtype without a byte form.
    """
    cls = type(value)
    local, shard = value, None
    if cls is torch.Tensor:
        kind = TensorKind.TENSOR
    elif cls is nn.Parameter:
        kind = TensorKind.PARAMETER
    else:
        kind = TensorKind.PARAMETER if isinstance(value, nn.Parameter) else TensorKind.TENSOR
        local, shard = _shard_of(path, value)
    if local.is_nested:  # before anything asks for its sizes, which it does not have
        raise unsupported(path, value, "it is nested: store list(value.unbind())")
    if local.layout is not torch.strided:
        raise unsupported(path, value, f"its layout is {local.layout}: store value.to_dense()")
    if local.dtype not in DTYPE_NAMES:
        raise unsupported(path, value, f"its dtype {local.dtype} is not one of {', '.join(TORCH_DTYPES)}")
    if local.device.type == "meta":
        raise unsupported(path, value, "it is on the meta device and has no bytes: materialise it first")
    if local.is_conj() or local.is_neg():
        raise unsupported(path, value, "it is lazily conjugated or negated: store value.resolve_conj().resolve_neg()")
    return Leaf(path, local, kind, value, shard)


def array_leaf(path: str, value: np.ndarray) -> Leaf:
    """Return the leaf for a numpy array.

    Raises:
        UnsupportedLeaf: objects, strings, structures, dates, or bytes not in this machine's order.
    """
    if value.dtype not in NUMPY_NAMES:
        raise unsupported(path, value, f"its dtype {value.dtype!r} is not one of {', '.join(NUMPY_DTYPES)}")
    return Leaf(path, value, TensorKind.NDARRAY, value)


def memory_key(leaf: Leaf) -> object:
    """Return what two leaves have in common exactly if they show the same bytes of memory in the same way.

    Leaves without bytes have no memory: for them it is the object's identity.
    """
    value = leaf.value
    if isinstance(value, torch.Tensor):
        if value.numel() == 0:
            return id(leaf.source)
        return (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
    if value.size == 0:
        return id(value)
    return (value.__array_interface__["data"][0], value.dtype, value.shape, value.strides)


def dtype_name(value: torch.Tensor | np.ndarray) -> str:
    """Return the name under which a supported leaf's dtype travels."""
    return DTYPE_NAMES[value.dtype] if isinstance(value, torch.Tensor) else NUMPY_NAMES[value.dtype]


def dim_order(value: torch.Tensor | np.ndarray) -> tuple[int, ...]:
    """Return the dimensions from the largest to the smallest stride if the leaf is dense but not row-major, else ()."""
    if isinstance(value, torch.Tensor):
        if value.is_contiguous():
            return ()
        shape, stride = tuple(value.shape), value.stride()
    else:
        if value.flags.c_contiguous or value.itemsize == 0:
            return ()
        shape = value.shape
        stride = tuple(step // value.itemsize for step in value.strides)
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != expected:
            return ()
        expected *= shape[dim]
    return order if order != tuple(range(len(shape))) else ()


def local_of(value: object) -> torch.Tensor | np.ndarray:
    """Return the tensor or array that holds a leaf's bytes: a DTensor's local tensor, anything else itself."""
    dtensor = _dtensor_class()
    if dtensor is not None and isinstance(value, dtensor):
        # to_local() would enter autograd and wait for collectives
        local: torch.Tensor = value._local_tensor  # type: ignore[attr-defined]
        return local
    if isinstance(value, torch.Tensor | np.ndarray):
        return value
    raise unsupported("", value, "tensors and numpy arrays hold bytes")


def _dtensor_class() -> type | None:
    # A DTensor can only exist if somebody imported the module; importing it here would cost each process 0.5 s.
    module = sys.modules.get("torch.distributed.tensor")
    found: type | None = getattr(module, "DTensor", None)
    return found


def _shard_of(path: str, value: torch.Tensor) -> tuple[torch.Tensor, ShardSpec]:
    dtensor = _dtensor_class()
    if dtensor is None or type(value) is not dtensor:
        raise unsupported(path, value, "store value.as_subclass(torch.Tensor), or the plain tensors that it is made of")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
    local: torch.Tensor = value._local_tensor  # type: ignore[attr-defined]
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    if tuple(shape) != tuple(local.shape):
        raise unsupported(
            path, value, f"its local shape {tuple(local.shape)} is not the {tuple(shape)} of its placements"
        )
    if math.prod(shape) == 0:  # torch reports an empty shard's offset at the global end; keep it inside
        offset = tuple(min(start, size) for start, size in zip(offset, value.shape, strict=True))
    shard = ShardSpec(
        global_shape=tuple(value.shape),
        global_offset=tuple(offset),
        placements=tuple(str(placement) for placement in placements),
        mesh_shape=tuple(mesh.shape),
    )
    return local, shard
