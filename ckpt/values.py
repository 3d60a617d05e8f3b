"""Parts as plain Python values: read out of a checkpoint, or made into a source that can be written as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckpt.reader import Checkpoint
from recovery.state.chunks import PartBytes
from recovery.state.digest import fingerprint as fingerprint_of
from recovery.state.digest import numerics_id
from recovery.state.live_part import LivePart, describe, live_part
from recovery.state.manifest import Manifest, empty_leaf
from recovery.state.parts import WorkerState
from recovery.state.tree import join
from recovery.types import (
    Cut,
    DigestAlgorithm,
    Fingerprint,
    NumericsId,
    PartClass,
    PartName,
    RunId,
    WorkerRef,
)


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a source lends; ``live`` is False for values that nobody changes."""

    data: torch.Tensor
    live: bool = False


class ValueSource:
    """A ``PartSource`` over values in memory, which must not change until it was written."""

    def __init__(self, manifest: Manifest, parts: Sequence[PartBytes]) -> None:
        self._manifest = manifest
        self._parts = parts

    @property
    def manifest(self) -> Manifest:
        """What it holds."""
        return self._manifest

    def read(self, part: int, offset: int, num_bytes: int) -> Bytes:
        """Return bytes of a part."""
        return Bytes(self._parts[part].read(offset, num_bytes))

    def acknowledge(self, part: int, chunk: int) -> None:
        """Nothing to do: values stay."""

    def release(self, reason: str) -> None:
        """Nothing to do: values stay."""


def source_of(
    values: Mapping[PartName, tuple[PartClass, object]],
    *,
    run_id: RunId,
    worker: WorkerRef,
    cut: Cut,
    layout_digest: bytes = b"",
    fingerprint: Fingerprint | None = None,
    numerics: NumericsId | None = None,
    algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128,
) -> ValueSource:
    """Return a source that holds ``values``: for each part its class and its tree of tensors and plain values.

    The trees' tensors are referenced, not copied. ``fingerprint`` is what the run sealed; where it is not given it is
    computed, except for one of several local ranks, whose record then goes without.

    Raises:
        UnsupportedLeaf: a value that has no exact form.
    """
    parts = [live_part(name, part_class, value) for name, (part_class, value) in values.items()]
    return live_source(
        parts,
        run_id=run_id,
        worker=worker,
        cut=cut,
        layout_digest=layout_digest,
        fingerprint=fingerprint,
        numerics=numerics,
        algorithm=algorithm,
    )


def live_source(
    parts: Sequence[LivePart],
    *,
    run_id: RunId,
    worker: WorkerRef,
    cut: Cut,
    layout_digest: bytes = b"",
    fingerprint: Fingerprint | None = None,
    numerics: NumericsId | None = None,
    algorithm: DigestAlgorithm = DigestAlgorithm.XXH3_128,
) -> ValueSource:
    """Return a source over parts that were read from a state and stand still; as ``source_of`` otherwise."""
    # Described as private first: the fingerprint of shards needs all ranks, and the caller may know it anyway.
    manifest = describe(
        [dataclasses.replace(part, part_class=PartClass.PRIVATE_COPIED) for part in parts],
        run_id=run_id,
        worker=worker,
        cut=cut,
        numerics_id=numerics if numerics is not None else numerics_id(),
        layout_digest=layout_digest,
        algorithm=algorithm,
    )
    replicated = [part for part in parts if part.part_class is PartClass.REPLICATED]
    if fingerprint is None and replicated and worker.num_local_ranks == 1:
        fingerprint = fingerprint_of(replicated)
    manifest = dataclasses.replace(
        manifest,
        fingerprint=fingerprint if fingerprint is not None and replicated else Fingerprint(b""),
        parts=tuple(
            dataclasses.replace(spec, part_class=part.part_class)
            for spec, part in zip(manifest.parts, parts, strict=True)
        ),
    )
    return ValueSource(manifest, [part.bytes for part in parts])


def standing_source(
    state: WorkerState, parts: Sequence[PartName], *, run_id: RunId, worker: WorkerRef, cut: Cut, copy: bool
) -> ValueSource:
    """Return a source over parts of a worker's state as they are now.

    Training thread only. With ``copy`` the tensors are copied, so that training may go on while it is written: for the
    small parts, such as the data position. Without, the state must stand still until the save has ended.
    """
    live = [state.read_part(name) for name in parts]
    if copy:
        live = [
            dataclasses.replace(part, bytes=PartBytes([_copied(leaf.value) for leaf in part.leaves], part.specs))
            for part in live
        ]
    return live_source(live, run_id=run_id, worker=worker, cut=cut, layout_digest=state.layout_digest())


def value_of(checkpoint: Checkpoint, part: PartName) -> object:
    """Return a part's verified value, in fresh memory on the CPU; a DTensor's shard comes as its local tensor.

    Raises:
        CheckpointRejected: a byte differs from the manifest.
    """
    spec = checkpoint.manifest.part(part)
    leaves = [empty_leaf(tensor, "cpu") for tensor in spec.tensors]
    with torch.no_grad():
        checkpoint.read_part(part, PartBytes(leaves, spec.tensors))
    return join(spec.tree, leaves)


def _copied(value: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    return value.copy() if isinstance(value, np.ndarray) else value.detach().clone()
