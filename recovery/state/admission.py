"""Whether a parsed manifest may be believed: every cap and rule of consistency, before anything is allocated for it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from protos.recovery.v1 import common_pb2, manifest_pb2
from recovery.errors import ManifestRejected
from recovery.state.chunks import CHUNK_BYTES, iterate_chunk_ranges
from recovery.state.codec import path_step, read_key, read_scalar
from recovery.state.leaf import GRAD_DTYPES, ITEM_BYTES, NUMPY_DTYPES
from recovery.state.limits import Limits
from recovery.state.tree import MAPPING_KINDS, MUTABLE_KINDS, SEQUENCE_KINDS, set_order

ALGORITHM_DIGEST_BYTES: dict[int, int] = {
    common_pb2.DIGEST_ALGORITHM_XXH3_128: 16,
    common_pb2.DIGEST_ALGORITHM_BLAKE3: 32,
}
_KNOWN_CLASSES = frozenset(common_pb2.PartClass.values()) - {common_pb2.PART_CLASS_UNSPECIFIED}
_KNOWN_KINDS = frozenset(manifest_pb2.TensorKind.values()) - {manifest_pb2.TENSOR_KIND_UNSPECIFIED}
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_NUMERICS_ID = re.compile(r"[ -~]{0,200}")
_DEVICE_KIND = re.compile(r"[a-z]{1,16}")
_PLACEMENT = re.compile(r"[A-Za-z0-9_(),=. -]{1,80}")


def admit(message: manifest_pb2.Manifest, limits: Limits) -> None:
    """Return if the manifest is well-formed, consistent with itself and within ``limits``.

    Raises:
        ManifestRejected: it is not; names the part, the leaf and the value.
    """
    _check_head(message)
    _require(len(message.parts) <= limits.parts, f"{len(message.parts)} parts, at most {limits.parts} are accepted")
    budget = _Budget(limits)
    digest_bytes = ALGORITHM_DIGEST_BYTES[message.digest_algorithm]
    names: set[str] = set()
    for part in message.parts:
        _require(bool(_ID.fullmatch(part.name)), f"{part.name[:80]!r} is not a part's name")
        _require(part.name not in names, f"two parts are called {part.name!r}")
        names.add(part.name)
        _require(part.part_class in _KNOWN_CLASSES, f"part {part.name!r} is of the unknown class {part.part_class}")
        _check_part(part, digest_bytes, budget)


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ManifestRejected(f"a manifest with {complaint}")


def _check_head(message: manifest_pb2.Manifest) -> None:
    worker = message.worker
    _require(bool(_ID.fullmatch(message.run_id)), f"the run id {message.run_id[:80]!r}")
    _require(bool(_ID.fullmatch(worker.worker_id)), f"the worker id {worker.worker_id[:80]!r}")
    _require(bool(_ID.fullmatch(worker.incarnation)), f"the incarnation {worker.incarnation[:80]!r}")
    _require(worker.local_rank < worker.num_local_ranks, f"rank {worker.local_rank} of {worker.num_local_ranks}")
    _require(bool(_NUMERICS_ID.fullmatch(message.numerics_id)), f"the numerics id {message.numerics_id[:80]!r}")
    for name, digest in (("layout digest", message.layout_digest), ("fingerprint", message.fingerprint)):
        _require(len(digest) in (0, 32), f"a {name} of {len(digest)} bytes")
    algorithm = message.digest_algorithm
    _require(algorithm in ALGORITHM_DIGEST_BYTES, f"the unknown digest algorithm {algorithm}")


@dataclass(slots=True)
class _Budget:
    """What all parts together have used of the limits."""

    limits: Limits
    tensors: int = 0
    chunks: int = 0
    total_bytes: int = 0
    nodes: int = 0


def _check_part(part: manifest_pb2.Part, digest_bytes: int, budget: _Budget) -> None:
    limits = budget.limits
    budget.tensors += len(part.tensors)
    budget.chunks += len(part.chunks)
    _require(budget.tensors <= limits.tensors, f"more than {limits.tensors} tensors")
    _require(budget.chunks <= limits.chunks, f"more than {limits.chunks} chunks")
    paths = _check_tree(part, budget)
    offset = 0
    for path, spec in zip(paths, part.tensors, strict=True):
        complaint = _complaint_about(spec, path, offset, limits)
        if complaint:
            raise ManifestRejected(f"part {part.name!r}, tensor {spec.path[:200]!r}: a manifest with {complaint}")
        offset += spec.num_bytes
        if budget.total_bytes + offset > limits.total_bytes:
            raise ManifestRejected(f"a manifest with more than {limits.total_bytes} bytes of tensors")
    budget.total_bytes += offset
    _require(part.num_bytes == offset, f"part {part.name!r} of {part.num_bytes} bytes whose tensors have {offset}")
    _check_chunks(part, digest_bytes)


def _complaint_about(spec: manifest_pb2.TensorSpec, path: str, offset: int, limits: Limits) -> str:
    """Return what is wrong with a tensor; empty: nothing. Texts are only made when wanted: there may be 100,000s."""
    item = ITEM_BYTES.get(spec.dtype)
    shape, order = tuple(spec.shape), tuple(spec.dim_order)
    if spec.path != path:
        return f"this path where the tree has {path[:200]!r}"
    if item is None:
        return f"the unknown dtype {spec.dtype[:80]!r}"
    if len(shape) > limits.dims:
        return f"{len(shape)} dimensions, at most {limits.dims} are accepted"
    span = item  # zeros count as ones: a shape of (0, 2**63) has no bytes and would still break stride arithmetic
    for size in shape:
        span *= size or 1
    if span > limits.total_bytes:
        return f"a shape that spans more than {limits.total_bytes} bytes"
    num_bytes = 0 if 0 in shape else span
    if spec.num_bytes != num_bytes:
        return f"{spec.num_bytes} bytes where shape and dtype make {num_bytes}"
    if spec.offset != offset:
        return f"the offset {spec.offset} instead of {offset}"
    if spec.kind not in _KNOWN_KINDS:
        return f"the unknown kind {spec.kind}"
    if not _DEVICE_KIND.fullmatch(spec.device_kind):
        return f"the device kind {spec.device_kind[:80]!r}"
    if spec.requires_grad and spec.dtype not in GRAD_DTYPES:
        return f"requires_grad for {spec.dtype}"
    if order and (sorted(order) != list(range(len(shape))) or list(order) == sorted(order)):
        return f"the order of dimensions {order[:64]}"
    has_shard = spec.HasField("shard")
    if spec.kind == manifest_pb2.TENSOR_KIND_NDARRAY and (
        spec.dtype not in NUMPY_DTYPES or spec.device_kind != "cpu" or spec.requires_grad or has_shard
    ):
        return "an array that numpy cannot have"
    return _complaint_about_shard(spec) if has_shard else ""


def _complaint_about_shard(spec: manifest_pb2.TensorSpec) -> str:
    shard, dims = spec.shard, len(spec.shape)
    if not len(shard.global_shape) == len(shard.global_offset) == dims:
        return "a shard of other dimensions than its tensor"
    for size, start, whole in zip(spec.shape, shard.global_offset, shard.global_shape, strict=True):
        if not start + size <= whole < 1 << 62:
            return f"a shard from {start} to {start + size} of {whole}"
    if not 1 <= len(shard.mesh_shape) <= 8:
        return f"a mesh of {len(shard.mesh_shape)} dimensions"
    if len(shard.placements) != len(shard.mesh_shape):
        return "placements that do not fit the mesh"
    if not all(_PLACEMENT.fullmatch(text) for text in shard.placements):
        return "a placement that torch does not print"
    if not 0 < math.prod(shard.mesh_shape) <= 1 << 24:
        return "a mesh without or with too many ranks"
    return ""


def _check_chunks(part: manifest_pb2.Part, digest_bytes: int) -> None:
    """Check the table of chunks against the rule, and that exactly the tensors which share a chunk have a digest."""
    where = f"part {part.name!r}"
    tensors = [(spec.num_bytes, spec.digest) for spec in part.tensors]
    rule = iterate_chunk_ranges([num_bytes for num_bytes, _ in tensors])
    for number, chunk in enumerate(part.chunks):
        found, wanted = (chunk.offset, chunk.num_bytes), next(rule, None)
        if found != wanted:
            raise ManifestRejected(f"{where}: chunk {number} at {found} where the rule says {wanted}")
        if len(chunk.digest) != digest_bytes:
            raise ManifestRejected(f"{where}: chunk {number} with a digest of {len(chunk.digest)} bytes")
    _require(next(rule, None) is None, f"{where}: chunks that do not reach its end")
    sharing: list[int] = []
    packed = 0
    for index, (num_bytes, digest) in enumerate(tensors):
        # The rule again, as the tensors see it: a chunk ends where the next tensor is large or does not fit.
        if packed and (num_bytes >= CHUNK_BYTES or packed + num_bytes > CHUNK_BYTES):
            _check_sharing(part, sharing, digest_bytes)
            packed = 0
        if 0 < num_bytes < CHUNK_BYTES:
            packed += num_bytes
            sharing.append(index)
        elif digest:
            what = "the empty tensor" if not num_bytes else "a tensor with chunks of its own:"
            raise ManifestRejected(f"{where}: a digest for {what} {part.tensors[index].path[:200]!r}")
    _check_sharing(part, sharing, digest_bytes)


def _check_sharing(part: manifest_pb2.Part, sharing: list[int], digest_bytes: int) -> None:
    size = digest_bytes if len(sharing) > 1 else 0
    for index in sharing:
        spec = part.tensors[index]
        if len(spec.digest) != size:
            raise ManifestRejected(
                f"part {part.name!r}: {spec.path[:200]!r} with {len(spec.digest)} digest bytes, not {size}"
            )
    sharing.clear()


def _check_tree(part: manifest_pb2.Part, budget: _Budget) -> list[str]:
    """Return the path of each tensor's first reference; there are as many as the part has tensors."""
    walk = _TreeWalk(len(part.tensors), budget)
    try:
        walk.value(part.tree, "", 0)
    except ManifestRejected as error:
        raise ManifestRejected(f"part {part.name!r}: {error}") from None
    _require(
        len(walk.paths) == len(part.tensors),
        f"part {part.name!r} with {len(part.tensors)} tensors, of which its tree names {len(walk.paths)}",
    )
    return walk.paths


@dataclass(slots=True)
class _TreeWalk:
    num_tensors: int
    budget: _Budget
    paths: list[str] = field(default_factory=list)
    # Of each container in the order of opening: whether a back reference to it is allowed.
    referable: list[bool] = field(default_factory=list)

    def value(self, tree: manifest_pb2.Value, path: str, depth: int) -> None:
        limits = self.budget.limits
        self.budget.nodes += 1
        if self.budget.nodes > limits.nodes:
            raise ManifestRejected(f"a manifest with more than {limits.nodes} values")
        kind = tree.WhichOneof("kind")
        if kind is None:
            raise ManifestRejected(f"a value of no kind at {path[:200]!r}")
        if kind == "tensor":
            self._tensor(tree.tensor, path)
        elif kind == "shared":
            known = tree.shared < len(self.referable) and self.referable[tree.shared]
            _require(known, f"a reference at {path[:200]!r} to container {tree.shared}, which is not complete there")
        elif kind in MAPPING_KINDS or kind in SEQUENCE_KINDS:
            _require(depth < limits.depth, f"containers more than {limits.depth} deep at {path[:200]!r}")
            number = len(self.referable)
            self.referable.append(False)
            if kind in MAPPING_KINDS:
                self._mapping(getattr(tree, kind), path, depth + 1)
            elif kind == "set":
                self._set(tree.set, path)
            else:
                self._sequence(getattr(tree, kind), kind, path, depth + 1)
            self.referable[number] = kind in MUTABLE_KINDS
        else:
            read_scalar(tree, kind, path[:200], limits)

    def _tensor(self, index: int, path: str) -> None:
        if index < len(self.paths):
            return  # tied to an earlier one
        if index >= self.num_tensors:
            raise ManifestRejected(f"a manifest with tensor {index} of {self.num_tensors} at {path[:200]!r}")
        if index != len(self.paths):
            raise ManifestRejected(f"a manifest with tensor {index} at {path[:200]!r}, {len(self.paths)} is the next")
        if len(path) > self.budget.limits.path_chars:
            raise ManifestRejected(f"a manifest with a path of {len(path)} characters")
        self.paths.append(path)

    def _mapping(self, mapping: manifest_pb2.Mapping, path: str, depth: int) -> None:
        prefix = path + "/" if path else ""
        _require(len(prefix) <= self.budget.limits.path_chars, f"a path of {len(prefix)} characters")
        keys: set[object] = set()
        short = path[:200]
        for entry in mapping.entries:
            key = read_key(entry.key, short, self.budget.limits)
            if key in keys:  # 1, 1.0 and True are one key to Python: such a mapping would come back shorter
                raise ManifestRejected(f"a manifest with the key {str(key)[:80]!r} twice at {short!r}")
            keys.add(key)
            self.value(entry.value, prefix + path_step(key), depth)

    def _set(self, items: manifest_pb2.Sequence, path: str) -> None:
        found = {read_key(item, path[:200], self.budget.limits) for item in items.items}
        _require(len(found) == len(items.items), f"a set with equal items at {path[:200]!r}")
        order = [set_order(item) for item in items.items]
        _require(order == sorted(order), f"a set out of order at {path[:200]!r}")
        self.budget.nodes += len(order)

    def _sequence(self, sequence: manifest_pb2.Sequence, kind: str, path: str, depth: int) -> None:
        prefix = path + "/" if path else ""
        for position, item in enumerate(sequence.items):
            if kind == "torch_size":
                # torch.Size takes int64 only; a hostile one is found here rather than when it is built
                _require(item.WhichOneof("kind") == "small_int", f"a torch.Size of other things than ints at {path!r}")
            self.value(item, prefix + str(position), depth)
