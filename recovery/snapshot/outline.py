"""A part's value held cheaply: what the training thread takes with it, so that the rest can be done elsewhere.

Taking a tree apart costs about ten microseconds a tensor, in Python. At a cut the training thread does less: it
compares the value with one that was taken apart before, and keeps the scalars.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from recovery.state.live_part import LivePart, live_part
from recovery.state.part import Part
from recovery.state.turns import in_turns

_PLAIN = (torch.Tensor, nn.Parameter)


class Outline:
    """A part's value as it was read once, and the same taken apart. Any thread may make one of a held value."""

    def __init__(self, part: Part, value: object, *, turns: bool = False) -> None:
        self.value = value
        self.part = take_apart(part, value, turns=turns)
        self.late = [i for i, spec in enumerate(self.part.specs) if spec.path.startswith("param_groups")]
        """Tensors of optimizer groups (a learning rate, say): schedulers change them in place after the step."""
        self._places = [_place(tensor) for tensor in in_turns(_tensors(value), turns)]

    def fits(self, value: object) -> bool:
        """Return whether ``value`` has the same structure and holds the same tensors in the same memory.

        Scalars may differ. False also where it cannot be told cheaply (DTensors, other subclasses).
        """
        if not _same_structure(self.value, value):
            return False
        return all(place == _place(tensor) for place, tensor in zip(self._places, _tensors(value), strict=True))

    def is_still(self, value: object) -> bool:
        """As ``fits``, and scalars are the same to the bit: what was taken apart is what taking apart would give.

        False also where that cannot be told cheaply.
        """
        return _equal(self.value, value, set()) and self.fits(value)

    def holds_same_tensors(self, value: object) -> bool:
        """As ``fits``, but does not look at where the tensors have their memory."""
        return _same_structure(self.value, value)


def held(value: object) -> object:
    """Return ``value`` with its own containers, so that scalars put into the old ones later do not show.

    Tensors are shared."""
    return _held(value, {})


def bytes_in(value: object) -> int:
    """Return the bytes of the tensors and arrays in ``value``, tied ones counted each time."""
    return sum(tensor.nbytes for tensor in _tensors(value))


def take_apart(part: Part, value: object, *, turns: bool = False) -> LivePart:
    """Return the part for a held value. ``turns``: as for ``live_part``.

    Raises:
        UnsupportedLeaf: as ``WorkerState.read_part``.
    """
    return live_part(part.name, part.part_class, value, turns=turns)


def _held(value: object, copies: dict[int, object]) -> object:
    if not isinstance(value, dict | list | tuple | set):
        return value
    if id(value) in copies:
        return copies[id(value)]  # a container used twice stays one
    if isinstance(value, tuple):
        parts = [_held(item, copies) for item in value]
        same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if same or type(value) is not tuple else tuple(parts)
    mine = copy.copy(value)
    copies[id(value)] = mine
    if isinstance(mine, dict):
        for key, item in mine.items():
            if isinstance(item, dict | list | tuple | set):
                mine[key] = _held(item, copies)
    elif isinstance(mine, list):
        mine[:] = [_held(item, copies) for item in mine]
    return mine


def _same_structure(old: object, new: object) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(new, torch.Tensor | np.ndarray):
        return old is new
    if isinstance(new, dict):
        assert isinstance(old, dict)
        return list(old) == list(new) and all(map(_same_structure, old.values(), new.values()))
    if isinstance(new, list | tuple):
        assert isinstance(old, list | tuple)
        return len(old) == len(new) and all(map(_same_structure, old, new))
    return True


_SCALARS = (bool, int, str, bytes, type(None))


def _equal(old: object, new: object, seen: set[int]) -> bool:
    kind = type(new)
    if type(old) is not kind:
        return False
    if isinstance(new, torch.Tensor | np.ndarray):
        return old is new
    if isinstance(new, dict | list | tuple):
        assert isinstance(old, dict | list | tuple)
        if id(old) in seen or id(new) in seen or len(old) != len(new):
            return False  # a container used twice, in either: whether in both is not worth telling
        if kind is not tuple:
            seen |= {id(old), id(new)}
        if isinstance(new, dict):
            assert isinstance(old, dict)
            if not all(map(_equal_scalar, old, new)):
                return False
            return all(_equal(a, b, seen) for a, b in zip(old.values(), new.values(), strict=True))
        return all(_equal(a, b, seen) for a, b in zip(old, new, strict=True))
    return _equal_scalar(old, new)


def _equal_scalar(old: object, new: object) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(new, float):
        assert isinstance(old, float)
        return old.hex() == new.hex() != "nan"  # a NaN's payload does not show
    return old == new if isinstance(new, _SCALARS) else old is new


def _tensors(value: object) -> Iterator[torch.Tensor | np.ndarray]:
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _place(tensor: torch.Tensor | np.ndarray) -> object:
    if isinstance(tensor, np.ndarray):
        return (tensor.ctypes.data, tensor.dtype, tensor.shape, tensor.strides)
    if type(tensor) not in _PLAIN:
        return object()  # equal to nothing
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
