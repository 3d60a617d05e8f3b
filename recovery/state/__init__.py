"""What a worker's state is: parts, trees, manifests, chunks, digests. Knows no network and no disk."""

from recovery.state.chunks import CHUNK_BYTES, PartBytes, chunk_ranges
from recovery.state.digest import (
    BLOCK_BYTES,
    PartDigests,
    PartialFingerprint,
    chunk_digest,
    combine_fingerprints,
    digest_part,
    digest_part_and_blocks,
    fingerprint,
    numerics_id,
    part_digests,
    partial_fingerprint,
)
from recovery.state.leaf import Leaf, ShardSpec, TensorKind
from recovery.state.limits import DEFAULT_LIMITS, Limits
from recovery.state.manifest import (
    MANIFEST_FORMAT,
    ChunkSpec,
    Manifest,
    PartSpec,
    TensorSpec,
    decode,
    empty_leaf,
    encode,
    manifest_digest,
    specs_of,
)
from recovery.state.parts import Fragment, LivePart, LocalProgress, RunProgress, Stateful, WorkerState, describe
from recovery.state.restore import Restoration, RestoreMode, RestoreReport
from recovery.state.tree import Split, join, split

__all__ = [
    "BLOCK_BYTES",
    "CHUNK_BYTES",
    "ChunkSpec",
    "DEFAULT_LIMITS",
    "Fragment",
    "Leaf",
    "Limits",
    "LivePart",
    "LocalProgress",
    "MANIFEST_FORMAT",
    "Manifest",
    "PartBytes",
    "PartDigests",
    "PartSpec",
    "PartialFingerprint",
    "Restoration",
    "RestoreMode",
    "RestoreReport",
    "RunProgress",
    "ShardSpec",
    "Split",
    "Stateful",
    "TensorKind",
    "TensorSpec",
    "WorkerState",
    "chunk_digest",
    "chunk_ranges",
    "combine_fingerprints",
    "decode",
    "describe",
    "digest_part",
    "digest_part_and_blocks",
    "empty_leaf",
    "encode",
    "fingerprint",
    "join",
    "manifest_digest",
    "numerics_id",
    "part_digests",
    "partial_fingerprint",
    "specs_of",
    "split",
]
