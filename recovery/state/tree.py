"""A state tree taken apart into structure and tensors, and put together again, exactly.

``join(*split(x))`` equals ``x``: kinds, order, bits, ties between tensors, and sharing of lists and dicts.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from protos.recovery.v1 import manifest_pb2
from recovery.errors import ManifestRejected
from recovery.state.codec import SCALAR_WRITERS, path_step, read_key, read_scalar, write_key, write_numpy_scalar
from recovery.state.leaf import Leaf, array_leaf, memory_key, tensor_leaf, unsupported
from recovery.state.limits import DEFAULT_LIMITS, Limits
from recovery.state.turns import TURN, give_turn

MAPPING_TYPES: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered_dict",
    collections.Counter: "counter",
    collections.defaultdict: "default_dict",
}
MAPPING_KINDS = frozenset(MAPPING_TYPES.values())
SEQUENCE_KINDS = frozenset({"list", "tuple", "torch_size", "set"})


class Split(NamedTuple):
    """A tree in two halves. ``leaves[i]`` is what the tree's ``tensor: i`` refers to, in order of first reference."""

    tree: manifest_pb2.Value
    leaves: list[Leaf]


def split(value: object, limits: Limits = DEFAULT_LIMITS, *, turns: bool = False) -> Split:
    """Return ``value`` as a structure without tensors and the tensors, by reference.

    Tensors that show the same memory in the same way are one leaf. A ``defaultdict``'s factory stays behind. ``turns``:
    the interpreter is offered to other threads meanwhile.

    Raises:
        UnsupportedLeaf: a type that has no exact form, a cycle, or a size or depth over ``limits``; names the path.
    """
    splitter = _Splitter(limits, turns)
    tree = manifest_pb2.Value()
    splitter.write(value, tree, "", 0)
    return Split(tree, splitter.leaves)


def join(
    tree: manifest_pb2.Value,
    leaves: Sequence[Leaf | torch.Tensor | np.ndarray],
    limits: Limits = DEFAULT_LIMITS,
) -> object:
    """Return the value that ``split`` took apart, with ``leaves`` in its places (a ``Leaf`` stands for its source).

    Raises:
        ManifestRejected: the tree is malformed or refers to a leaf that is not there.
    """
    return _Joiner(leaves, limits).value(tree, "", 0)


class _Splitter:
    def __init__(self, limits: Limits, turns: bool) -> None:
        self.leaves: list[Leaf] = []
        self._turns = turns
        self._limits = limits
        self._index_of_memory: dict[object, int] = {}
        self._number_of_container: dict[int, int] = {}
        self._open: set[int] = set()
        self._num_opened = 0
        self._num_nodes = 0
        # Ids are only unique while their objects live, and a getter may have made a container just for this call.
        self._alive: list[object] = []

    def write(self, value: object, out: manifest_pb2.Value, path: str, depth: int) -> None:
        self._num_nodes += 1
        if self._num_nodes > self._limits.nodes:
            raise unsupported(path, value, f"a tree has at most {self._limits.nodes} values: store arrays as tensors")
        if self._turns and self._num_nodes % TURN == 0:
            give_turn()
        kind = type(value)
        scalar = SCALAR_WRITERS.get(kind)
        if scalar is not None:
            scalar(value, out, path, self._limits)
        elif isinstance(value, torch.Tensor):
            out.tensor = self._leaf_index(tensor_leaf(self._short(path, value), value))
        elif kind is np.ndarray:
            out.tensor = self._leaf_index(array_leaf(self._short(path, value), value))  # type: ignore[arg-type]
        elif kind in _CONTAINER_TYPES:
            self._write_container(value, kind, out, path, depth)
        elif isinstance(value, np.generic):
            write_numpy_scalar(value, out, path)
        else:
            raise unsupported(path, value, remedy_for(value))

    def _short(self, path: str, value: object) -> str:
        if len(path) > self._limits.path_chars:
            raise unsupported(path[:200] + "...", value, f"a path has at most {self._limits.path_chars} characters")
        return path

    def _leaf_index(self, leaf: Leaf) -> int:
        index = self._index_of_memory.setdefault(memory_key(leaf), len(self.leaves))
        if index == len(self.leaves):
            if index >= self._limits.tensors:
                raise unsupported(leaf.path, leaf.source, f"a tree has at most {self._limits.tensors} tensors")
            self.leaves.append(leaf)
        return index

    def _write_container(self, value: object, kind: type, out: manifest_pb2.Value, path: str, depth: int) -> None:
        identity = id(value)
        if identity in self._open:
            raise unsupported(path, value, "it contains itself: break the cycle")
        if depth >= self._limits.depth:
            raise unsupported(path, value, f"containers nest at most {self._limits.depth} deep: flatten it")
        if kind in _MUTABLE_TYPES:  # sharing of an immutable tuple cannot be told from equality
            number = self._number_of_container.setdefault(identity, self._num_opened)
            if number != self._num_opened:
                out.shared = number
                return
            self._alive.append(value)
        self._num_opened += 1
        self._open.add(identity)
        if kind is set:
            _write_set(value, out, path, self._limits)  # type: ignore[arg-type]
        elif kind in MAPPING_TYPES:
            self._write_mapping(value, getattr(out, MAPPING_TYPES[kind]), path, depth)  # type: ignore[arg-type]
        else:
            sequence = getattr(out, _SEQUENCE_TYPES[kind])
            sequence.SetInParent()
            prefix = path + "/" if path else ""
            for position, item in enumerate(value):  # type: ignore[arg-type,var-annotated]
                self.write(item, sequence.items.add(), prefix + str(position), depth + 1)
        self._open.discard(identity)

    def _write_mapping(self, value: dict[object, object], out: manifest_pb2.Mapping, path: str, depth: int) -> None:
        out.SetInParent()
        prefix = path + "/" if path else ""
        limits = self._limits
        for key, item in value.items():
            entry = out.entries.add()
            if type(key) is str and len(key) <= limits.path_chars and key.isascii():
                entry.key.text = key  # nearly every key: kept short because optimizers have 10,000s of them
            else:
                write_key(key, entry.key, path, limits)
            self.write(item, entry.value, prefix + path_step(key), depth + 1)


_SEQUENCE_TYPES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "torch_size"}
_MUTABLE_TYPES = frozenset({list, set, *MAPPING_TYPES})
_CONTAINER_TYPES = frozenset({*_SEQUENCE_TYPES, *_MUTABLE_TYPES})
MUTABLE_KINDS = frozenset({"list", "set", *MAPPING_KINDS})


def _write_set(value: set[object], out: manifest_pb2.Value, path: str, limits: Limits) -> None:
    # A set's order differs from process to process: the encoding's order makes equal sets equal bytes.
    items = []
    for item in value:
        encoded = manifest_pb2.Value()
        write_key(item, encoded, path, limits)
        items.append((set_order(encoded), encoded))
    items.sort(key=lambda pair: pair[0])
    out.set.SetInParent()
    out.set.items.extend(encoded for _, encoded in items)


def set_order(item: manifest_pb2.Value) -> bytes:
    """Return what a set's items are sorted by."""
    return item.SerializeToString(deterministic=True)


def remedy_for(value: object) -> str:
    """Return what a user can do about a value that cannot travel."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "store value._asdict() or tuple(value)"
    if isinstance(value, torch.nn.Module) or hasattr(value, "state_dict"):
        return "store value.state_dict()"
    if isinstance(value, torch.Generator):
        return "store value.get_state()"
    if isinstance(value, np.random.Generator):
        return "store value.bit_generator.state"
    if hasattr(kind, "__members__"):
        return "store the enum member's value or name"
    if isinstance(value, bytearray | memoryview):
        return "store bytes(value)"
    if isinstance(value, frozenset):
        return "store set(value)"
    if hasattr(value, "__dataclass_fields__"):
        return "store dataclasses.asdict(value)"
    if isinstance(value, np.ndarray):
        return "store numpy.array(value)"
    bases = [base for base in kind.__mro__[1:] if base in SCALAR_WRITERS or base in _CONTAINER_TYPES]
    if bases:
        return f"a subclass would come back as {bases[0].__name__}: store {bases[0].__name__}(value)"
    if callable(value):
        return "leave functions and classes out of the state; the joiner has its own"
    return "store plain values and tensors, as its state_dict() would"


class _Joiner:
    def __init__(self, leaves: Sequence[Leaf | torch.Tensor | np.ndarray], limits: Limits) -> None:
        self._leaves = [leaf.source if isinstance(leaf, Leaf) else leaf for leaf in leaves]
        self._limits = limits
        self._containers: list[object] = []

    def value(self, tree: manifest_pb2.Value, path: str, depth: int) -> object:
        kind = tree.WhichOneof("kind")
        if kind == "tensor":
            if tree.tensor >= len(self._leaves):
                raise ManifestRejected(f"{path}: tensor {tree.tensor} of {len(self._leaves)}")
            return self._leaves[tree.tensor]
        if kind in MAPPING_KINDS:
            return self._mapping(tree, kind, path, self._deeper(path, depth))
        if kind in SEQUENCE_KINDS:
            return self._sequence(tree, kind, path, self._deeper(path, depth))
        if kind == "shared":
            if tree.shared >= len(self._containers) or self._containers[tree.shared] is None:
                raise ManifestRejected(f"{path}: refers to container {tree.shared}, which is not there")
            return self._containers[tree.shared]
        if kind is None:
            raise ManifestRejected(f"{path or '(root)'}: a value of no kind")
        return read_scalar(tree, kind, path, self._limits)

    def _deeper(self, path: str, depth: int) -> int:
        if depth >= self._limits.depth:
            raise ManifestRejected(f"{path}: containers nest more than {self._limits.depth} deep")
        return depth + 1

    def _mapping(self, tree: manifest_pb2.Value, kind: str, path: str, depth: int) -> object:
        found: dict[object, object] = _NEW_MAPPING[kind]()
        number = self._open()
        prefix = path + "/" if path else ""
        for entry in getattr(tree, kind).entries:
            key = read_key(entry.key, path, self._limits)
            found[key] = self.value(entry.value, prefix + path_step(key), depth)
        self._containers[number] = found
        return found

    def _open(self) -> int:
        # Not there before it is filled: what referred to an open container would be a cycle.
        self._containers.append(None)
        return len(self._containers) - 1

    def _sequence(self, tree: manifest_pb2.Value, kind: str, path: str, depth: int) -> object:
        items = getattr(tree, kind).items
        if kind == "set":
            self._containers.append({read_key(item, path, self._limits) for item in items})
            return self._containers[-1]
        prefix = path + "/" if path else ""
        number = self._open()
        found = [self.value(item, prefix + str(position), depth) for position, item in enumerate(items)]
        if kind == "list":
            self._containers[number] = found
            return found
        parts = tuple(found)  # never referred to, so it stays out of `_containers`
        if kind == "tuple":
            return parts
        if not all(type(item) is int for item in parts):
            raise ManifestRejected(f"{path}: a torch.Size of other things than ints")
        return torch.Size(parts)  # type: ignore[arg-type]


_NEW_MAPPING: dict[str, Callable[[], Any]] = {kind: new for new, kind in MAPPING_TYPES.items()}
