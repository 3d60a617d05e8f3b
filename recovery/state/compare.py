"""Readable differences of two states: where, what, and how much."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from protos.recovery.v1 import manifest_pb2
from recovery.errors import MisuseError
from recovery.state.chunks import PartBytes
from recovery.state.codec import float_to_bits, path_step, read_key, read_scalar
from recovery.state.digest import chunk_digest
from recovery.state.leaf import dtype_name, local_of
from recovery.state.limits import DEFAULT_LIMITS
from recovery.state.manifest import Manifest, PartSpec, TensorSpec
from recovery.state.tree import MAPPING_KINDS, SEQUENCE_KINDS
from recovery.types import DigestAlgorithm, PartName


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two states differ. ``what`` names what was expected and what was found."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path or '(root)'}: {self.what}"


def describe_differences(differences: Sequence[Difference], at_most: int = 20) -> str:
    """Return the differences as lines for an error's message; says how many are left out."""
    lines = [f"  {difference}" for difference in differences[:at_most]]
    if len(differences) > at_most:
        lines.append(f"  and {len(differences) - at_most} more")
    return "\n".join(lines)


def compare(expected: object, found: object) -> list[Difference]:
    """Return every difference between two manifests, two parts of manifests, two trees, or two values; none: equal.

    Manifests are compared by what they describe, not by who took them. Values are compared bit for bit: kinds of
    containers and scalars, order of entries, dtypes, shapes, floats by their bits. Whether equal lists are one object,
    and memory order, devices and the sharing of memory do not count.
    """
    if isinstance(expected, Manifest) and isinstance(found, Manifest):
        return list(_manifests(expected, found))
    if isinstance(expected, PartSpec) and isinstance(found, PartSpec):
        return list(_parts(expected, found))
    if isinstance(expected, manifest_pb2.Value) and isinstance(found, manifest_pb2.Value):
        return list(_TreeComparison(expected, found, (), ()).run())
    for special in (Manifest, PartSpec, manifest_pb2.Value):
        if isinstance(expected, special) != isinstance(found, special):
            raise MisuseError(f"a {type(expected).__name__} cannot be compared with a {type(found).__name__}")
    return list(_ValueComparison().run(expected, found, ""))


def _manifests(expected: Manifest, found: Manifest) -> Iterator[Difference]:
    for name in ("numerics_id", "digest_algorithm", "layout_digest", "fingerprint"):
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            yield Difference(name, f"{_short(ours)} expected, {_short(theirs)} found")
    if expected.cut != found.cut:
        yield Difference("cut", f"{expected.cut} expected, {found.cut} found")
    theirs_by_name = {part.name: part for part in found.parts}
    for part in expected.parts:
        other = theirs_by_name.pop(part.name, None)
        if other is None:
            yield Difference(part.name, "this part is missing")
        else:
            yield from _parts(part, other)
    for name in theirs_by_name:
        yield Difference(name, "this part is not expected")
    ours_names = [part.name for part in expected.parts if part.name in {other.name for other in found.parts}]
    theirs_names = [part.name for part in found.parts if part.name in set(ours_names)]
    if ours_names != theirs_names:
        yield Difference("parts", f"in the order {theirs_names}, expected {ours_names}")


def _parts(expected: PartSpec, found: PartSpec) -> Iterator[Difference]:
    if expected.part_class is not found.part_class:
        yield Difference(expected.name, f"{expected.part_class.value} expected, {found.part_class.value} found")
    for difference in _TreeComparison(expected.tree, found.tree, expected.tensors, found.tensors).run():
        yield Difference(f"{expected.name}/{difference.path}".removesuffix("/"), difference.what)
    found_by_path = {spec.path: spec for spec in found.tensors}
    for spec in expected.tensors:
        other = found_by_path.get(spec.path)
        if other is not None and (spec.dtype, spec.shape, spec.num_bytes) == (
            other.dtype,
            other.shape,
            other.num_bytes,
        ):
            what = _content_difference(expected, spec, found, other)
            if what:
                yield Difference(f"{expected.name}/{spec.path}".removesuffix("/"), what)


def _content_difference(expected: PartSpec, spec: TensorSpec, found: PartSpec, other: TensorSpec) -> str:
    if spec.digest and len(spec.digest) == len(other.digest):
        return "" if spec.digest == other.digest else "its bytes differ"
    ours, theirs = tensor_chunk_digests(expected, spec), tensor_chunk_digests(found, other)
    if len(ours) == len(theirs) and [len(digest) for digest in ours] == [len(digest) for digest in theirs]:
        different = sum(1 for a, b in zip(ours, theirs, strict=True) if a != b)
        if not different:
            return ""
        return f"its bytes differ in {different} of {len(ours)} chunks" if len(ours) > 1 else "its bytes differ"
    # Packed on one side and alone on the other, or of two algorithms: only a pass over the memory can tell.
    return ""


def tensor_chunk_digests(part: PartSpec, spec: TensorSpec) -> list[bytes]:
    """Return the digests that cover a tensor's bytes: its own, or those of its chunks; none for an empty tensor."""
    if spec.digest:
        return [spec.digest]
    end = spec.offset + spec.num_bytes
    return [chunk.digest for chunk in part.chunks if spec.offset <= chunk.offset < end]


class _TreeComparison:
    """Walks two trees side by side. Back references are followed; a pair of containers is compared once."""

    def __init__(
        self,
        expected: manifest_pb2.Value,
        found: manifest_pb2.Value,
        our_tensors: Sequence[TensorSpec],
        their_tensors: Sequence[TensorSpec],
    ) -> None:
        self._roots = (expected, found)
        self._tensors = (our_tensors, their_tensors)
        self._containers = (_containers_of(expected), _containers_of(found))
        self._seen: set[tuple[int, int]] = set()

    def run(self) -> Iterator[Difference]:
        yield from self._values(*self._roots, "")

    def _values(self, ours: manifest_pb2.Value, theirs: manifest_pb2.Value, path: str) -> Iterator[Difference]:
        if ours.WhichOneof("kind") == "shared" or theirs.WhichOneof("kind") == "shared":
            pair = (ours.shared if ours.WhichOneof("kind") == "shared" else -1, theirs.shared)
            if pair[0] >= 0 and theirs.WhichOneof("kind") == "shared":
                if pair in self._seen:
                    return
                self._seen.add(pair)
            ours, theirs = self._follow(0, ours), self._follow(1, theirs)
        kind, other = ours.WhichOneof("kind"), theirs.WhichOneof("kind")
        if kind != other:
            yield Difference(path, f"{self._text(0, ours)} expected, {self._text(1, theirs)} found")
        elif kind in MAPPING_KINDS:
            yield from self._mappings(getattr(ours, kind), getattr(theirs, kind), path)
        elif kind == "set":
            if ours.set != theirs.set:
                yield Difference(path, f"{self._text(0, ours)} expected, {self._text(1, theirs)} found")
        elif kind in SEQUENCE_KINDS:
            mine, others = getattr(ours, kind).items, getattr(theirs, kind).items
            if len(mine) != len(others):
                yield Difference(path, f"a {kind} of {len(mine)} items expected, of {len(others)} found")
            for position, (a, b) in enumerate(zip(mine, others, strict=False)):
                yield from self._values(a, b, f"{path}/{position}" if path else str(position))
        elif kind == "tensor":
            yield from self._tensor_specs(ours.tensor, theirs.tensor, path)
        elif ours != theirs:
            yield Difference(path, f"{self._text(0, ours)} expected, {self._text(1, theirs)} found")

    def _follow(self, side: int, value: manifest_pb2.Value) -> manifest_pb2.Value:
        return self._containers[side][value.shared] if value.WhichOneof("kind") == "shared" else value

    def _mappings(self, ours: manifest_pb2.Mapping, theirs: manifest_pb2.Mapping, path: str) -> Iterator[Difference]:
        prefix = path + "/" if path else ""
        mine = {path_step(read_key(entry.key, path, DEFAULT_LIMITS)): entry.value for entry in ours.entries}
        others = {path_step(read_key(entry.key, path, DEFAULT_LIMITS)): entry.value for entry in theirs.entries}
        for step, value in mine.items():
            if step in others:
                yield from self._values(value, others[step], prefix + step)
            else:
                yield Difference(prefix + step, f"missing; {self._text(0, value)} expected")
        for step, value in others.items():
            if step not in mine:
                yield Difference(prefix + step, f"not expected; {self._text(1, value)} found")
        if [s for s in mine if s in others] != [s for s in others if s in mine]:
            yield Difference(path, f"entries in the order {_some(others)}, expected {_some(mine)}")

    def _tensor_specs(self, ours: int, theirs: int, path: str) -> Iterator[Difference]:
        mine, others = self._tensors
        if ours >= len(mine) or theirs >= len(others):
            if not mine and not others:
                return  # bare trees: nothing is known of their tensors
            raise MisuseError(f"{path}: the tree refers to a tensor that its part does not list")
        a, b = mine[ours], others[theirs]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield Difference(path, f"{a.dtype} {list(a.shape)} expected, {b.dtype} {list(b.shape)} found")
        if a.kind is not b.kind:
            yield Difference(path, f"a {a.kind.name.lower()} expected, a {b.kind.name.lower()} found")
        if a.requires_grad != b.requires_grad:
            yield Difference(path, f"requires_grad {a.requires_grad} expected, {b.requires_grad} found")
        if a.shard != b.shard:
            yield Difference(path, f"{a.shard or 'no shard'} expected, {b.shard or 'no shard'} found")
        if a.path != b.path:
            yield Difference(path, f"tied to {a.path!r} expected, tied to {b.path!r} found")

    def _text(self, side: int, value: manifest_pb2.Value) -> str:
        kind = value.WhichOneof("kind") or "nothing"
        if kind == "tensor":
            specs = self._tensors[side]
            if value.tensor >= len(specs):
                return "a tensor"
            return f"a tensor {specs[value.tensor].dtype} {list(specs[value.tensor].shape)}"
        if kind == "shared":
            return self._text(side, self._containers[side][value.shared])
        if kind in MAPPING_KINDS:
            return f"a {kind} of {len(getattr(value, kind).entries)} entries"
        if kind in SEQUENCE_KINDS:
            return f"a {kind} of {len(getattr(value, kind).items)} items"
        return _short(read_scalar(value, kind, "", DEFAULT_LIMITS))


def _containers_of(tree: manifest_pb2.Value) -> list[manifest_pb2.Value]:
    found: list[manifest_pb2.Value] = []

    def walk(value: manifest_pb2.Value) -> None:
        kind = value.WhichOneof("kind")
        if kind in MAPPING_KINDS:
            found.append(value)
            for entry in getattr(value, kind).entries:
                walk(entry.value)
        elif kind in SEQUENCE_KINDS:
            found.append(value)
            if kind != "set":
                for item in getattr(value, kind).items:
                    walk(item)

    walk(tree)
    return found


class _ValueComparison:
    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def run(self, ours: object, theirs: object, path: str) -> Iterator[Difference]:
        if _is_array(ours) and _is_array(theirs):
            yield from self._arrays(ours, theirs, path)
        elif type(ours) is not type(theirs):
            yield Difference(path, f"{_short(ours)} expected, {_short(theirs)} found")
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            if self._first_time(ours, theirs):
                yield from self._mappings(ours, theirs, path)
        elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
            if self._first_time(ours, theirs):
                if len(ours) != len(theirs):
                    kind = type(ours).__name__
                    yield Difference(path, f"a {kind} of {len(ours)} items expected, of {len(theirs)} found")
                for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
                    yield from self.run(a, b, f"{path}/{position}" if path else str(position))
        elif not _same_scalar(ours, theirs):
            yield Difference(path, f"{_short(ours)} expected, {_short(theirs)} found")

    def _first_time(self, ours: object, theirs: object) -> bool:
        pair = (id(ours), id(theirs))
        if pair in self._seen:
            return False
        self._seen.add(pair)
        return True

    def _mappings(self, ours: dict[object, object], theirs: dict[object, object], path: str) -> Iterator[Difference]:
        prefix = path + "/" if path else ""
        # By step, because 1, 1.0 and True are one key to Python and three to us.
        mine = {path_step(key): value for key, value in ours.items()}
        others = {path_step(key): value for key, value in theirs.items()}
        for step, value in mine.items():
            if step in others:
                yield from self.run(value, others[step], prefix + step)
            else:
                yield Difference(prefix + step, f"missing; {_short(value)} expected")
        for step, value in others.items():
            if step not in mine:
                yield Difference(prefix + step, f"not expected; {_short(value)} found")
        if [s for s in mine if s in others] != [s for s in others if s in mine]:
            yield Difference(path, f"entries in the order {_some(others)}, expected {_some(mine)}")

    def _arrays(self, ours: object, theirs: object, path: str) -> Iterator[Difference]:
        if type(ours) is not type(theirs):
            yield Difference(path, f"{type(ours).__name__} expected, {type(theirs).__name__} found")
        a, b = local_of(ours), local_of(theirs)
        if dtype_name(a) != dtype_name(b) or tuple(a.shape) != tuple(b.shape):
            yield Difference(path, f"{dtype_name(a)} {list(a.shape)} expected, {dtype_name(b)} {list(b.shape)} found")
            return
        flags = [isinstance(value, torch.Tensor) and value.requires_grad for value in (ours, theirs)]
        if flags[0] != flags[1]:
            yield Difference(path, f"requires_grad {flags[0]} expected, {flags[1]} found")
        what = content_difference(a, b)
        if what:
            yield Difference(path, what)


def content_difference(ours: torch.Tensor | np.ndarray, theirs: torch.Tensor | np.ndarray) -> str:
    """Return how two tensors of equal dtype and shape differ, bit for bit; empty: they do not.

    Says how many elements differ and the largest absolute difference among those that are numbers on both sides.
    """
    first, second = PartBytes([ours]), PartBytes([theirs])
    count, total = 0, int(np.prod(ours.shape, dtype=np.int64))
    largest, numbers = 0.0, 0
    item = first.num_bytes // max(1, total)
    step = (4 << 20) // max(1, item) * max(1, item)
    for offset in range(0, first.num_bytes, max(1, step)):
        size = min(step, first.num_bytes - offset)
        a, b = first.read(offset, size), second.read(offset, size)
        if torch.equal(a, b):
            continue
        differs = (a.view(-1, item) != b.view(-1, item)).any(dim=1)
        count += int(differs.sum())
        gaps = _gaps(a, b, differs, ours)
        numbers += gaps.numel()
        if gaps.numel():
            largest = max(largest, float(gaps.max()))
    if not count:
        return ""
    note = f", by at most {largest:.6g}" if numbers else ", none of them by a finite amount"
    return f"{count} of {total} elements differ{note}"


def _gaps(a: torch.Tensor, b: torch.Tensor, differs: torch.Tensor, like: torch.Tensor | np.ndarray) -> torch.Tensor:
    from recovery.state.leaf import TORCH_DTYPES

    dtype = TORCH_DTYPES[dtype_name(like)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    # Cloned: a view needs its storage aligned to the element, and a piece of a packed chunk need not be.
    gaps = (a.clone().view(dtype)[differs].to(wide) - b.clone().view(dtype)[differs].to(wide)).abs()
    return gaps[torch.isfinite(gaps)]


class _Live(Protocol):
    @property
    def name(self) -> PartName: ...
    @property
    def bytes(self) -> PartBytes: ...


def damaged_tensors(part: _Live, spec: PartSpec, algorithm: DigestAlgorithm) -> list[str]:
    """Return the paths of the tensors whose memory no longer has the digests of ``spec``; hashes all of it.

    Raises:
        MisuseError: the memory is not laid out as ``spec`` says.
    """
    if part.bytes.tensor_num_bytes != [tensor.num_bytes for tensor in spec.tensors]:
        raise MisuseError(f"part {part.name!r} has other tensors than the manifest's")
    damaged: list[str] = []
    chunks = iter(spec.chunks)
    chunk = next(chunks, None)
    for tensor in spec.tensors:
        if not tensor.num_bytes:
            continue
        if tensor.digest:
            data = part.bytes.read(tensor.offset, tensor.num_bytes)
            intact = chunk_digest(algorithm, data) == tensor.digest
            while chunk is not None and chunk.offset + chunk.num_bytes <= tensor.offset + tensor.num_bytes:
                chunk = next(chunks, None)
        else:
            intact = True
            while chunk is not None and chunk.offset < tensor.offset + tensor.num_bytes:
                data = part.bytes.read(chunk.offset, chunk.num_bytes)
                intact = chunk_digest(algorithm, data) == chunk.digest and intact
                chunk = next(chunks, None)
        if not intact:
            damaged.append(tensor.path)
    return damaged


class _LivePart(Protocol):
    @property
    def tree(self) -> manifest_pb2.Value: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor | np.ndarray]: ...


class _State(Protocol):
    @property
    def part_names(self) -> Sequence[PartName]: ...
    def read_part(self, name: PartName) -> _LivePart: ...


def compare_states(expected: _State, found: _State) -> list[Difference]:
    """Return every difference between two workers' states as they are now, part by part, bit for bit."""
    from recovery.state.tree import join

    differences = []
    theirs = set(found.part_names)
    for name in expected.part_names:
        if name not in theirs:
            differences.append(Difference(name, "this part is missing"))
            continue
        mine, other = expected.read_part(name), found.read_part(name)
        for difference in compare(join(mine.tree, mine.tensors), join(other.tree, other.tensors)):
            differences.append(Difference(f"{name}/{difference.path}".removesuffix("/"), difference.what))
    ours = set(expected.part_names)
    return differences + [
        Difference(name, "this part is not expected") for name in found.part_names if name not in ours
    ]


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _same_scalar(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float) and type(ours) is float:
        return float_to_bits(ours) == float_to_bits(theirs)
    if isinstance(ours, complex) and isinstance(theirs, complex) and type(ours) is complex:
        return (float_to_bits(ours.real), float_to_bits(ours.imag)) == (
            float_to_bits(theirs.real),
            float_to_bits(theirs.imag),
        )
    if isinstance(ours, np.generic) and isinstance(theirs, np.generic):
        return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    return bool(ours == theirs)


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a {type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict | list | tuple | set | collections.abc.Mapping):
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, bytes) and len(value) in (16, 32):
        return value.hex()
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{type(value).__name__} {text}" if type(value) in (int, bool, float, str) else text


def _some(steps: dict[str, object] | dict[str, manifest_pb2.Value]) -> str:
    names = list(steps)
    return "[" + ", ".join(names[:8]) + (", ...]" if len(names) > 8 else "]")
