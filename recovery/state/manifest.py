"""What a snapshot holds, as immutable objects and as one canonical protobuf message. Disk and wire use the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import blake3
import numpy as np
import torch
from google.protobuf.message import DecodeError, EncodeError
from torch import nn

from protos.recovery.v1 import common_pb2, manifest_pb2
from recovery.errors import ManifestRejected, UnsupportedLeaf
from recovery.state.admission import ALGORITHM_DIGEST_BYTES, admit
from recovery.state.leaf import (
    NUMPY_DTYPES,
    TORCH_DTYPES,
    Leaf,
    dim_order,
    dtype_name,
)
from recovery.state.leaf import ShardSpec as ShardSpec
from recovery.state.leaf import TensorKind as TensorKind
from recovery.state.limits import DEFAULT_LIMITS, Limits
from recovery.types import (
    Cut,
    DigestAlgorithm,
    Fingerprint,
    Incarnation,
    NumericsId,
    PartClass,
    PartName,
    RunId,
    Version,
    WorkerId,
    WorkerRef,
)

MANIFEST_FORMAT = 1
ALGORITHMS = {
    DigestAlgorithm.XXH3_128: common_pb2.DIGEST_ALGORITHM_XXH3_128,
    DigestAlgorithm.BLAKE3: common_pb2.DIGEST_ALGORITHM_BLAKE3,
}
DIGEST_BYTES = {algorithm: ALGORITHM_DIGEST_BYTES[number] for algorithm, number in ALGORITHMS.items()}
PART_CLASSES = {
    PartClass.REPLICATED: common_pb2.PART_CLASS_REPLICATED,
    PartClass.PRIVATE_COPIED: common_pb2.PART_CLASS_PRIVATE_COPIED,
    PartClass.PRIVATE_KEPT: common_pb2.PART_CLASS_PRIVATE_KEPT,
}
TENSOR_KINDS = {
    TensorKind.TENSOR: manifest_pb2.TENSOR_KIND_TENSOR,
    TensorKind.PARAMETER: manifest_pb2.TENSOR_KIND_PARAMETER,
    TensorKind.NDARRAY: manifest_pb2.TENSOR_KIND_NDARRAY,
}
_ALGORITHM_OF = {number: algorithm for algorithm, number in ALGORITHMS.items()}
_PART_CLASS_OF = {number: part_class for part_class, number in PART_CLASSES.items()}
_KIND_OF = {number: kind for kind, number in TENSOR_KINDS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a part; field for field the message of the same name."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    """Of the local tensor."""
    offset: int
    """First byte in the part."""
    num_bytes: int
    device_kind: str = "cpu"
    kind: TensorKind = TensorKind.TENSOR
    shard: ShardSpec | None = None
    requires_grad: bool = False
    dim_order: tuple[int, ...] = ()
    """Dimensions from the largest to the smallest stride; empty: row-major."""
    digest: bytes = b""
    """Of this tensor alone, where it shares its chunk with others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSpec:
    """A range of a part and its digest."""

    offset: int
    num_bytes: int
    digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """One part: its structure, its tensors, its chunks."""

    name: PartName
    part_class: PartClass
    tree: manifest_pb2.Value
    tensors: tuple[TensorSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a snapshot holds."""

    run_id: RunId
    worker: WorkerRef
    cut: Cut
    numerics_id: NumericsId
    layout_digest: bytes
    """BLAKE3 over the canonical layout; empty where no layout is agreed on (a plain state dict)."""
    fingerprint: Fingerprint
    """Of the replicated parts; empty where none is listed."""
    digest_algorithm: DigestAlgorithm
    parts: tuple[PartSpec, ...]

    def part(self, name: PartName) -> PartSpec:
        """Return the part of that name.

        Raises:
            ManifestRejected: there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise ManifestRejected(f"no part {name!r} in the manifest of {self.worker}: {[p.name for p in self.parts]}")

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_chunks(self) -> int:
        return sum(len(part.chunks) for part in self.parts)


def specs_of(leaves: Iterable[Leaf]) -> tuple[TensorSpec, ...]:
    """Return the specs of leaves that follow each other in one part, without digests."""
    specs = []
    offset = 0
    for leaf in leaves:
        value = leaf.value
        if isinstance(value, torch.Tensor):
            num_bytes, device = value.numel() * value.itemsize, value.device.type
        else:
            num_bytes, device = value.nbytes, "cpu"
        specs.append(
            TensorSpec(
                path=leaf.path,
                dtype=dtype_name(value),
                shape=tuple(value.shape),
                offset=offset,
                num_bytes=num_bytes,
                device_kind=device,
                kind=leaf.kind,
                shard=leaf.shard,
                requires_grad=leaf.requires_grad,
                dim_order=dim_order(value),
            )
        )
        offset += num_bytes
    return tuple(specs)


def empty_leaf(spec: TensorSpec, device: torch.device | str | None = None) -> torch.Tensor | np.ndarray:
    """Return a new tensor or array of the spec's dtype, shape, memory order, kind and requires_grad, not filled.

    For a shard it is the local tensor. ``device`` None: the spec's kind of device.
    """
    if spec.kind is TensorKind.NDARRAY:
        array: np.ndarray = np.empty(
            tuple(spec.shape[dim] for dim in spec.dim_order) if spec.dim_order else spec.shape, NUMPY_DTYPES[spec.dtype]
        )
        return array.transpose(np.argsort(spec.dim_order)) if spec.dim_order else array
    order = spec.dim_order or tuple(range(len(spec.shape)))
    place = spec.device_kind if device is None else device
    tensor = torch.empty_permuted(spec.shape, order, dtype=TORCH_DTYPES[spec.dtype], device=place)
    if spec.kind is TensorKind.PARAMETER:
        return nn.Parameter(tensor, requires_grad=spec.requires_grad)
    return tensor.requires_grad_(spec.requires_grad)


def manifest_digest(data: bytes) -> bytes:
    """Return the BLAKE3 digest of an encoded manifest, 32 bytes."""
    return blake3.blake3(data).digest()


def encode(manifest: Manifest, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return the canonical encoding: equal manifests give equal bytes in every process.

    Raises:
        UnsupportedLeaf: it would be larger than ``limits`` lets a receiver accept.
    """
    message = manifest_pb2.Manifest(
        format=MANIFEST_FORMAT,
        run_id=manifest.run_id,
        worker=common_pb2.WorkerRef(
            worker_id=manifest.worker.worker_id,
            incarnation=manifest.worker.incarnation,
            local_rank=manifest.worker.local_rank,
            num_local_ranks=manifest.worker.num_local_ranks,
        ),
        cut=common_pb2.Cut(
            version=common_pb2.Version(
                lineage=manifest.cut.version.lineage, outer_step=manifest.cut.version.outer_step
            ),
            inner_step=manifest.cut.inner_step,
        ),
        numerics_id=manifest.numerics_id,
        layout_digest=manifest.layout_digest,
        fingerprint=manifest.fingerprint,
        digest_algorithm=ALGORITHMS[manifest.digest_algorithm],
    )
    for part in manifest.parts:
        _encode_part(part, message.parts.add())
    try:
        data = message.SerializeToString(deterministic=True)
    except EncodeError as error:
        raise UnsupportedLeaf(f"the manifest of {manifest.worker} cannot be encoded: {error}") from error
    if len(data) > limits.manifest_bytes:
        raise UnsupportedLeaf(
            f"the manifest of {manifest.worker} has {len(data)} bytes, at most {limits.manifest_bytes} are accepted: "
            f"keep large data in tensors instead of texts and lists"
        )
    return data


def _encode_part(part: PartSpec, out: manifest_pb2.Part) -> None:
    out.name = part.name
    out.part_class = PART_CLASSES[part.part_class]
    out.tree.CopyFrom(part.tree)
    out.num_bytes = part.num_bytes
    add_tensor = out.tensors.add
    for spec in part.tensors:
        message = add_tensor(
            path=spec.path,
            dtype=spec.dtype,
            shape=spec.shape,
            offset=spec.offset,
            num_bytes=spec.num_bytes,
            device_kind=spec.device_kind,
            kind=TENSOR_KINDS[spec.kind],
            requires_grad=spec.requires_grad,
            dim_order=spec.dim_order,
            digest=spec.digest,
        )
        if spec.shard is not None:
            message.shard.global_shape.extend(spec.shard.global_shape)
            message.shard.global_offset.extend(spec.shard.global_offset)
            message.shard.placements.extend(spec.shard.placements)
            message.shard.mesh_shape.extend(spec.shard.mesh_shape)
    add_chunk = out.chunks.add
    for chunk in part.chunks:
        add_chunk(offset=chunk.offset, num_bytes=chunk.num_bytes, digest=chunk.digest)


def decode(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """Return the manifest that ``data`` encodes, after checking everything that it claims.

    Nothing is allocated in proportion to a claimed size or count: only in proportion to ``data``, which is capped.

    Raises:
        ManifestRejected: too large, truncated, not in canonical form, of another format, inconsistent, or over a limit.
    """
    if len(data) > limits.manifest_bytes:
        raise ManifestRejected(f"a manifest of {len(data)} bytes, at most {limits.manifest_bytes} are accepted")
    message = manifest_pb2.Manifest()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ManifestRejected(f"{len(data)} bytes are not a manifest: {error}") from error
    if message.format != MANIFEST_FORMAT:
        raise ManifestRejected(f"a manifest of format {message.format}, this program reads {MANIFEST_FORMAT}")
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != data:
        raise ManifestRejected("a manifest with unknown fields or not in canonical form")
    admit(message, limits)
    return _from_message(message)


def _from_message(message: manifest_pb2.Manifest) -> Manifest:
    worker = message.worker
    version = Version(message.cut.version.lineage, message.cut.version.outer_step)
    return Manifest(
        run_id=RunId(message.run_id),
        worker=WorkerRef(
            WorkerId(worker.worker_id), Incarnation(worker.incarnation), worker.local_rank, worker.num_local_ranks
        ),
        cut=Cut(version, message.cut.inner_step),
        numerics_id=NumericsId(message.numerics_id),
        layout_digest=message.layout_digest,
        fingerprint=Fingerprint(message.fingerprint),
        digest_algorithm=_ALGORITHM_OF[message.digest_algorithm],
        parts=tuple(_part_from(part) for part in message.parts),
    )


def _part_from(part: manifest_pb2.Part) -> PartSpec:
    return PartSpec(
        name=PartName(part.name),
        part_class=_PART_CLASS_OF[part.part_class],
        tree=part.tree,
        tensors=tuple(_tensor_from(spec) for spec in part.tensors),
        chunks=tuple(
            ChunkSpec(offset=chunk.offset, num_bytes=chunk.num_bytes, digest=chunk.digest) for chunk in part.chunks
        ),
        num_bytes=part.num_bytes,
    )


def _tensor_from(spec: manifest_pb2.TensorSpec) -> TensorSpec:
    shard = None
    if spec.HasField("shard"):
        shard = ShardSpec(
            global_shape=tuple(spec.shard.global_shape),
            global_offset=tuple(spec.shard.global_offset),
            placements=tuple(spec.shard.placements),
            mesh_shape=tuple(spec.shard.mesh_shape),
        )
    return TensorSpec(
        path=spec.path,
        dtype=spec.dtype,
        shape=tuple(spec.shape),
        offset=spec.offset,
        num_bytes=spec.num_bytes,
        device_kind=spec.device_kind,
        kind=_KIND_OF[spec.kind],
        shard=shard,
        requires_grad=spec.requires_grad,
        dim_order=tuple(spec.dim_order),
        digest=spec.digest,
    )
