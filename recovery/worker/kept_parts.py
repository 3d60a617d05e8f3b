"""What never comes from a donor: data position, random generators. Captured at each boundary, kept in two places.

A replaced worker takes it back from its own checkpoint, or from the coordinator, which stores it with the boundary that
the worker reported: samples drawn after that boundary never reached a commit, so they are drawn again, and none before
it is.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from recovery.errors import ManifestRejected
from recovery.state import (
    Manifest,
    Restoration,
    RestoreMode,
    WorkerState,
    decode,
    describe,
    encode,
    numerics_id,
)
from recovery.types import Cut, RunId, WorkerRef

logger = logging.getLogger(__name__)

MAX_POSITION_BYTES = 64 * 1024
"""More than this is not a position but data: it goes to the checkpoint only."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class KeptReading:
    """Bytes of a ``KeptParts``; never overwritten."""

    data: Tensor
    live: bool = False


class KeptParts:
    """A copy of a worker's private-kept parts at one cut; a source for the checkpoint's writer."""

    def __init__(self, manifest: Manifest, contents: list[Tensor]) -> None:
        self.manifest = manifest
        self._contents = contents

    def read(self, part: int, offset: int, num_bytes: int) -> KeptReading:
        """Return bytes of the manifest's part number ``part``."""
        return KeptReading(self._contents[part][offset : offset + num_bytes])

    def acknowledge(self, part: int, chunk: int) -> None:
        """Nothing to give back early."""

    def release(self, reason: str) -> None:
        """Nothing was lent."""

    def to_bytes(self) -> bytes:
        """Return everything as one string: the manifest's length (4 bytes, little-endian), the manifest, the parts."""
        manifest = encode(self.manifest)
        return b"".join(
            [_LENGTH.pack(len(manifest)), manifest, *(content.numpy().tobytes() for content in self._contents)]
        )


def capture_kept(
    state: WorkerState, *, run_id: RunId, worker: WorkerRef, cut: Cut, layout_digest: bytes
) -> KeptParts | None:
    """Return a copy of the private-kept parts, or None if there are none; training thread, between two inner steps."""
    if not state.private_kept_names:
        return None
    parts = [state.read_part(name) for name in state.private_kept_names]
    contents = [
        part.bytes.read(0, part.bytes.num_bytes, torch.empty(part.bytes.num_bytes, dtype=torch.uint8)) for part in parts
    ]
    manifest = describe(
        parts, run_id=run_id, worker=worker, cut=cut, numerics_id=numerics_id(), layout_digest=layout_digest
    )
    return KeptParts(manifest, contents)


def restore_kept(state: WorkerState, position: bytes) -> None:
    """Put private-kept parts back from ``KeptParts.to_bytes``; parts that the worker does not have any more are left.

    Raises:
        RecoveryError: the string is not whole, or does not fit the worker; nothing was changed.
    """
    length = _LENGTH.unpack_from(position)[0] if len(position) >= _LENGTH.size else len(position)
    manifest = decode(position[_LENGTH.size : _LENGTH.size + length])
    rest = bytearray(position[_LENGTH.size + length :])
    content = torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
    if content.numel() != manifest.num_bytes:
        raise ManifestRejected(f"a data position of {manifest.num_bytes} bytes came with {content.numel()}")
    names = [name for name in state.private_kept_names if any(part.name == name for part in manifest.parts)]
    if not names:
        return
    restoration = Restoration(state, manifest, mode=RestoreMode.STAGED, parts=names)
    restoration.prepare()
    at = 0
    for part in manifest.parts:
        if part.name in names and part.num_bytes:
            restoration.destination(part.name).write(0, content[at : at + part.num_bytes])
        at += part.num_bytes
    restoration.commit()


def position_of(kept: KeptParts | None) -> bytes:
    """Return what the coordinator stores of ``kept``; empty if there is nothing, or too much."""
    if kept is None:
        return b""
    position = kept.to_bytes()
    if len(position) > MAX_POSITION_BYTES:
        logger.warning(
            "the private-kept parts have %d bytes; over %d the coordinator does not keep them, only checkpoints do",
            len(position),
            MAX_POSITION_BYTES,
        )
        return b""
    return position
