"""Readable differences of two states: where, what, and how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from protos.recovery.v1 import manifest_pb2
from recovery.errors import MisuseError
from recovery.state.chunks import PartBytes
from recovery.state.codec import path_step, read_key, read_scalar
from recovery.state.difference import Difference as Difference
from recovery.state.difference import ValueComparison, short, some_of
from recovery.state.difference import content_difference as content_difference
from recovery.state.difference import describe_differences as describe_differences
from recovery.state.hashing import chunk_digest
from recovery.state.limits import DEFAULT_LIMITS
from recovery.state.manifest import Manifest, PartSpec, TensorSpec
from recovery.state.tree import MAPPING_KINDS, SEQUENCE_KINDS, join
from recovery.types import DigestAlgorithm, PartName


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
    return list(ValueComparison().run(expected, found, ""))


def _manifests(expected: Manifest, found: Manifest) -> Iterator[Difference]:
    for name in ("numerics_id", "digest_algorithm", "layout_digest", "fingerprint"):
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            yield Difference(name, f"{short(ours)} expected, {short(theirs)} found")
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
            yield Difference(path, f"entries in the order {some_of(others)}, expected {some_of(mine)}")

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
        return short(read_scalar(value, kind, "", DEFAULT_LIMITS))


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
