"""Manifests and parts made from plain trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from protos.recovery.v1 import manifest_pb2
from recovery.state.chunks import PartBytes, chunk_ranges
from recovery.state.digest import digest_part, numerics_id
from recovery.state.manifest import ChunkSpec, Manifest, PartSpec, TensorSpec, specs_of
from recovery.state.tree import split
from recovery.types import (
    Cut,
    DigestAlgorithm,
    Fingerprint,
    Incarnation,
    PartClass,
    PartName,
    RunId,
    Version,
    WorkerId,
    WorkerRef,
)


@dataclass
class Part:
    """A part of a state, as ``recovery.state.parts`` reads it."""

    name: PartName
    tree: manifest_pb2.Value
    specs: tuple[TensorSpec, ...]
    tensors: list[torch.Tensor | np.ndarray]
    bytes: PartBytes


def part_of(name: str, value: object) -> Part:
    tree, leaves = split(value)
    specs = specs_of(leaves)
    tensors = [leaf.value for leaf in leaves]
    return Part(PartName(name), tree, specs, tensors, PartBytes(tensors, specs))


def part_spec(part: Part, algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128) -> PartSpec:
    digests = digest_part(part.bytes, algorithm)
    ranges = chunk_ranges([spec.num_bytes for spec in part.specs])
    return PartSpec(
        name=part.name,
        part_class=PartClass.REPLICATED,
        tree=part.tree,
        tensors=tuple(replace(spec, digest=digest) for spec, digest in zip(part.specs, digests.tensors, strict=True)),
        chunks=tuple(
            ChunkSpec(offset=offset, num_bytes=size, digest=digest)
            for (offset, size), digest in zip(ranges, digests.chunks, strict=True)
        ),
        num_bytes=part.bytes.num_bytes,
    )


def manifest_of(
    values: Mapping[str, object], algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128, **changes: object
) -> Manifest:
    manifest = Manifest(
        run_id=RunId("run"),
        worker=WorkerRef(WorkerId("w0"), Incarnation("i0")),
        cut=Cut(Version(1, 2), 3),
        numerics_id=numerics_id(),
        layout_digest=b"L" * 32,
        fingerprint=Fingerprint(b"F" * 32),
        digest_algorithm=algorithm,
        parts=tuple(part_spec(part_of(name, value), algorithm) for name, value in values.items()),
    )
    return replace(manifest, **changes)  # type: ignore[arg-type]
