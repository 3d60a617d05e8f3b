"""One part as it stands in memory, and manifests made from such parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from protos.recovery.v1 import manifest_pb2
from recovery.errors import UnsupportedLeaf
from recovery.state.chunks import PartBytes, chunk_ranges
from recovery.state.destination import raw
from recovery.state.digest import digest_part, digest_part_and_blocks, fingerprint
from recovery.state.leaf import Leaf
from recovery.state.manifest import ChunkSpec, Manifest, PartSpec, TensorSpec, specs_of
from recovery.state.tree import split
from recovery.state.turns import in_turns
from recovery.types import Cut, DigestAlgorithm, Fingerprint, NumericsId, PartClass, PartName, RunId, WorkerRef


@dataclass(frozen=True, slots=True)
class LivePart:
    """A part at the moment it was read. Tensors are references to live memory, scalars are copies.

    Attributes:
        name: The part's.
        part_class: The part's.
        tree: Structure and scalars.
        specs: One a tensor, without digests.
        leaves: One a tensor: the object that the worker holds, and its memory.
        bytes: The tensors as one byte string.
    """

    name: PartName
    part_class: PartClass
    tree: manifest_pb2.Value
    specs: tuple[TensorSpec, ...]
    leaves: tuple[Leaf, ...]
    bytes: PartBytes

    @property
    def tensors(self) -> list[Tensor | np.ndarray]:
        """The memory of each tensor (a DTensor's local shard)."""
        return [leaf.value for leaf in self.leaves]


def live_part(name: PartName, part_class: PartClass, value: object, *, turns: bool = False) -> LivePart:
    """Return the part whose tree is ``value``.

    About 10 microseconds a tensor. ``turns``: the interpreter is offered to other threads meanwhile; for threads that
    training must not wait for.

    Raises:
        UnsupportedLeaf: a value in it has no exact form; names the part and the path.
    """
    try:
        tree, leaves = split(value, turns=turns)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"part {name!r}: {error}") from error
    memory = PartBytes(raw(leaf.value) for leaf in in_turns(leaves, turns))
    return LivePart(name, part_class, tree, specs_of(in_turns(leaves, turns)), tuple(leaves), memory)


def describe(
    parts: Sequence[LivePart],
    *,
    run_id: RunId,
    worker: WorkerRef,
    cut: Cut,
    numerics_id: NumericsId,
    layout_digest: bytes,
    algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128,
    agreed_fingerprint: Fingerprint | None = None,
) -> Manifest:
    """Return the manifest of ``parts`` as their memory is now: the digest pass, which reads every byte once.

    The memory must stand still meanwhile. May run on any thread; other threads run while bytes are hashed.

    Args:
        parts: As they were read.
        run_id: Goes into the manifest, as do the next four.
        worker: Who describes.
        cut: What instant the parts show.
        numerics_id: Of this process.
        layout_digest: Of the whole worker.
        algorithm: Digest of chunks, and of the blocks of the fingerprint.
        agreed_fingerprint: What the worker's local ranks found together, where each holds only shards. None: it is
            computed from the replicated parts among ``parts``; empty if there is none.

    Raises:
        MisuseError: a replicated tensor is a shard of a larger one, and no fingerprint was given.
    """
    described = []
    blocks: dict[str, Sequence[bytes]] = {}
    replicated = [part for part in parts if part.part_class is PartClass.REPLICATED]
    needed = {part.name for part in replicated} if agreed_fingerprint is None else set()
    for part in parts:
        if part.name in needed:
            (chunks, tensors), blocks[part.name] = digest_part_and_blocks(part.bytes, algorithm, algorithm)
        else:
            chunks, tensors = digest_part(part.bytes, algorithm)
        ranges = chunk_ranges(part.bytes.tensor_num_bytes)
        described.append(
            PartSpec(
                name=part.name,
                part_class=part.part_class,
                tree=part.tree,
                tensors=tuple(_with_digests(part.specs, tensors)),
                chunks=tuple(
                    ChunkSpec(offset=offset, num_bytes=num_bytes, digest=digest)
                    for (offset, num_bytes), digest in zip(ranges, chunks, strict=True)
                ),
                num_bytes=part.bytes.num_bytes,
            )
        )
    if agreed_fingerprint is None:
        agreed_fingerprint = fingerprint(replicated, algorithm, blocks) if replicated else Fingerprint(b"")
    return Manifest(
        run_id=run_id,
        worker=worker,
        cut=cut,
        numerics_id=numerics_id,
        layout_digest=layout_digest,
        fingerprint=agreed_fingerprint,
        digest_algorithm=algorithm,
        parts=tuple(described),
    )


def _with_digests(specs: Sequence[TensorSpec], digests: Sequence[bytes]) -> Iterator[TensorSpec]:
    for spec, digest in in_turns(zip(specs, digests, strict=True)):
        yield dataclasses.replace(spec, digest=digest) if digest else spec
